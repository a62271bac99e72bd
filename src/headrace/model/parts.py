"""Which attention and feed-forward kinds exist: one line each.

A kind is a module that keeps the contract of `Part`; a block asks for it by name and knows nothing
else about it. A new kind is a new module and a line in a table here.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.model.attention import GroupedQueryAttention
from headrace.model.config import ModelConfig
from headrace.model.feed_forward import SwiGLU
from headrace.model.latent_attention import LatentAttention
from headrace.model.moe import MixtureOfExperts
from headrace.model.step import Step


class Part(Protocol):
    """An attention (mixes tokens) or a feed-forward (works on each token alone)."""

    hf_prefix: str
    """Name of the part inside a Hugging Face layer, e.g. "self_attn"."""

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        ...

    def residual_outputs(self) -> Iterator[Tensor]:
        """Weights whose output is added to the residual stream."""
        ...

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name below `hf_prefix`, and a view that shares the parameter's memory."""
        ...


ATTENTION: dict[str, type[nn.Module]] = {"gqa": GroupedQueryAttention, "mla": LatentAttention}
FEED_FORWARD: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "moe": MixtureOfExperts}


def build_part(
    table: dict[str, type[nn.Module]],
    kind: str,
    config: ModelConfig,
    layer: int,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    """Build one part of one layer.

    Raises:
        UserError: no such kind.
    """
    if kind not in table:
        raise UserError(
            f"model config: kind {kind!r} is unknown; use one of {', '.join(sorted(table))}"
        )
    return table[kind](config, layer, device=device, dtype=dtype)
