"""One layer of a decoder."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from headrace.model.config import ModelConfig
from headrace.model.norm import RMSNorm
from headrace.model.parts import ATTENTION, FEED_FORWARD, Part, build_part
from headrace.model.step import Step


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.attention = build_part(
            ATTENTION, config.attention, config, layer, device=device, dtype=dtype
        )
        self.feed_forward_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.feed_forward = build_part(
            FEED_FORWARD, config.feed_forward(layer), config, layer, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        attention, feed_forward = self.parts()
        x = x + attention(self.attention_norm(x), step)
        return x + feed_forward(self.feed_forward_norm(x), step)

    def parts(self) -> tuple[Part, Part]:
        """Attention and feed-forward."""
        return cast(Part, self.attention), cast(Part, self.feed_forward)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name inside a Hugging Face layer and view into the parameters."""
        yield "input_layernorm.weight", self.attention_norm.weight.detach()
        yield "post_attention_layernorm.weight", self.feed_forward_norm.weight.detach()
        for part in self.parts():
            for name, view in part.hf_tensors():
                yield f"{part.hf_prefix}.{name}", view
