"""The gated feed-forward of a block: SwiGLU, one token at a time.

Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, eq. 6.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headrace.model.config import ModelConfig
from headrace.model.linear import new_linear
from headrace.model.step import Step
from headrace.ops import is_small, reference, swiglu


def apply_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 I] -> [..., I]."""
    return reference.swiglu(gate_up) if is_small(gate_up) else swiglu(gate_up)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); `gate_up` is one projection, rows in the order gate, up.

    Args:
        inner: inner width; None is the config's intermediate_size.
    """

    hf_prefix = "mlp"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        inner: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.gate_up = new_linear(hidden, 2 * inner, bias=False, device=device, dtype=dtype)
        self.down = new_linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down(apply_gate(self.gate_up(x)))

    def residual_outputs(self) -> Iterator[Tensor]:
        """Weights whose output is added to the residual stream (initialised smaller)."""
        yield self.down.weight

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name below `hf_prefix` and view into the parameters, for every Hugging Face tensor."""
        gate, up = self.gate_up.weight.detach().chunk(2)
        yield "gate_proj.weight", gate
        yield "up_proj.weight", up
        yield "down_proj.weight", self.down.weight.detach()
