"""Tiny models and their transformers twins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM
from transformers import Qwen3Config as HfQwen3Config

TINY = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    # Large enough that logits and attention are far from uniform and an error shows.
    "initializer_range": 0.3,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-wide-heads": {"head_dim": 16, "attention_bias": True},
    "llama-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "llama-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    },
    "llama-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen3": {"head_dim": 16},
    "qwen3-tied": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3-bias": {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 6},
}


@pytest.fixture(params=CASES)
def reference(request: pytest.FixtureRequest) -> Any:
    """A random transformers model of each supported variation, fp32, in eval mode."""
    return build_reference(request.param)


@pytest.fixture
def make_reference() -> Callable[..., Any]:
    """`build_reference`."""
    return build_reference


def build_reference(case: str, **changes: Any) -> Any:
    """A random transformers model; every parameter, norms and biases too, is drawn."""
    values = {**TINY, **CASES[case], **changes}
    torch.manual_seed(0)
    if case.startswith("qwen3"):
        model: Any = Qwen3ForCausalLM(HfQwen3Config(**values))
    else:
        model = LlamaForCausalLM(LlamaConfig(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


@pytest.fixture
def load_in_transformers() -> Callable[[Path], Any]:
    """Load a checkpoint directory with transformers, which must not miss or ignore a weight."""

    def load(path: Path) -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        model, info = loaded
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        return model.eval()

    return load


@pytest.fixture
def ids() -> torch.Tensor:
    """[2, 40] token ids below the tiny vocabulary."""
    return torch.randint(0, TINY["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
