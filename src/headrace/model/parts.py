"""Which attention and feed-forward kinds exist: one line each.

A kind is a module that keeps the contract of `AttentionPart` or `FeedForwardPart`; the decoder asks
for it by the name in the config and knows nothing else about it. A new kind is a new module and a
line in a table here. The layer index is passed so that a kind may differ between layers.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.model.attention import Attend, GroupedQueryAttention
from headrace.model.config import ModelConfig
from headrace.model.feed_forward import SwiGLU
from headrace.model.rope import Rotation


class Part(Protocol):
    """What every kind offers besides its forward."""

    hf_prefix: str
    """Name of the part inside a Hugging Face layer, e.g. "self_attn"."""

    def residual_outputs(self) -> Iterator[Tensor]:
        """Weights whose output is added to the residual stream."""
        ...

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name below `hf_prefix`, and a view that shares the parameter's memory."""
        ...


class AttentionPart(Part, Protocol):
    """Mixes tokens."""

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        ...


class FeedForwardPart(Part, Protocol):
    """Works on each token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        ...


ATTENTION: dict[str, type[nn.Module]] = {"gqa": GroupedQueryAttention}
FEED_FORWARD: dict[str, type[nn.Module]] = {"swiglu": SwiGLU}


def build_part(
    table: dict[str, type[nn.Module]],
    field: str,
    config: ModelConfig,
    layer: int,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    """Build the kind that `config.field` names, for one layer.

    Raises:
        UserError: no such kind.
    """
    kind = getattr(config, field)
    if kind not in table:
        raise UserError(
            f"model config: {field} = {kind!r} is unknown; use one of {', '.join(sorted(table))}"
        )
    return table[kind](config, layer, device=device, dtype=dtype)
