"""A tokenizer that splits characters, and a tiny sparse model for it."""

import pytest

from headrace.model.decoder import Decoder
from headrace.model.presets import preset
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer

LETTERS = "the quick brown fox jumps over the lazy dog\n" * 4


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """Bytes, chat tokens and a few merges of English: characters beyond ASCII are split."""
    return train_tokenizer([LETTERS], SMALLEST_VOCABULARY + 24, "glm-5")


@pytest.fixture(scope="session")
def renderer(tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return create_renderer("auto", folder)


@pytest.fixture
def model(tokenizer: TextTokenizer) -> Decoder:
    """Latent attention over the 8 keys that an indexer selects; weights large enough to matter."""
    config = preset(
        "glm5-tiny",
        tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        max_positions=1024,
        latent={"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 16},
        indexer={"num_heads": 2, "head_dim": 16, "topk": 8},
        moe={"num_experts": 4, "intermediate_size": 16},
        mtp=None,
    )
    model = Decoder(config)
    model.init_weights(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model.eval()
