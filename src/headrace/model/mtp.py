"""Multi-token prediction: extra layers that predict tokens beyond the next one.

Step s joins the hidden state at position t (of the main model for s = 0, else of step s - 1; after
the final norm in both cases) with the embedding of token t + s + 1, and the result predicts token
t + s + 2 through the model's own output projection. With shared parameters all steps are one layer.
Source: DeepSeek-V3, arXiv 2412.19437, eqs. 21 to 23; GLM-5, arXiv 2602.15763, section 2.1.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from headrace.model.block import Block
from headrace.model.config import ModelConfig
from headrace.model.linear import new_linear
from headrace.model.norm import RMSNorm
from headrace.model.step import Step


class MtpLayer(nn.Module):
    """One set of parameters; `join` [D, 2D] reads the embedding first, then the hidden state."""

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
        self.embed_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.join = new_linear(2 * size, size, bias=False, device=device, dtype=dtype)
        self.block = Block(config, layer, device=device, dtype=dtype)
        self.norm = RMSNorm(size, eps, device=device, dtype=dtype)

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """hidden and embedded [B, T, D] -> [B, T, D], after the norm."""
        joined = torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.norm(self.block(self.join(joined), step))

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name inside a Hugging Face layer and view into the parameters."""
        yield "enorm.weight", self.embed_norm.weight.detach()
        yield "hnorm.weight", self.hidden_norm.weight.detach()
        yield "eh_proj.weight", self.join.weight.detach()
        yield "shared_head.norm.weight", self.norm.weight.detach()
        yield from self.block.hf_tensors()


class Mtp(nn.Module):
    """All steps. Layer indices go on after the main model's."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.mtp is None:
            raise ValueError("Mtp needs config.mtp")
        self.depth = config.mtp.depth
        self.layers = nn.ModuleList(
            MtpLayer(config, config.num_layers + index, device=device, dtype=dtype)
            for index in range(config.mtp.stored_layers)
        )

    def forward(self, index: int, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """Step `index` >= 0; beyond the trained depth the last layer is used again."""
        own = min(index, len(self.layers) - 1)
        return self.layers[own](hidden, embedded, step._replace(offset=index - own))

    def stored(self) -> Iterator[MtpLayer]:
        """The sets of parameters."""
        return (cast(MtpLayer, layer) for layer in self.layers)
