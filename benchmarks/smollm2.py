"""SmolLM2-135M-Instruct for benchmarks; random weights of its shape where it is not installed."""

from pathlib import Path

from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.gguf_import import SMOLLM2, resolve_model

SHAPE = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    rope_theta=100000.0,
    tie_embeddings=True,
)


def random_smollm2() -> Decoder:
    """Random weights of its shape."""
    model = Decoder(SHAPE)
    model.init_weights(0)
    return model


def checkpoint_of(model: str, folder: Path) -> tuple[Path, str]:
    """A dense model's checkpoint directory, and why its weights are random, or "".

    Args:
        model: see `resolve_model`; only for SmolLM2 itself is there a stand-in.
        folder: where that would be written.

    Raises:
        UserError: see `resolve_model`.
    """
    try:
        return resolve_model(model), ""
    except UserError as error:
        if model != SMOLLM2:
            raise
        path = folder / "random-smollm2"
        save_checkpoint(random_smollm2(), path)
        return path, f"random weights instead of SmolLM2: {error}"
