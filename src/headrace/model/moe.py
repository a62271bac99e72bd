"""Mixture of experts: a sigmoid router picks K of E experts for each token.

Selection adds a bias that the trainer moves to balance the experts; the weights of the chosen ones
come from the unbiased scores. Source: DeepSeek-V3, arXiv 2412.19437, eqs. 12 to 16; checked against
transformers' `glm_moe_dsa`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.model.config import ModelConfig, MoeConfig
from headrace.model.feed_forward import SwiGLU, apply_gate
from headrace.model.step import Step
from headrace.ops import grouped_matmul

SMALLEST_SUM = 1e-20
"""Added to the sum of the chosen scores, which divides them."""


class Router(nn.Module):
    """Scores in fp32 whatever the model's dtype: near-ties would flip with rounding.

    Attributes:
        weight: [E, D] parameter.
        bias: [E] buffer, added for selection only; no gradient.
    """

    bias: Tensor

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.experts_per_token = moe.experts_per_token
        self.scaling = moe.scaling
        shape = (moe.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))
        self.register_buffer(
            "bias", torch.zeros(moe.num_experts, device=device, dtype=torch.float32)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, D] -> weights fp32 [N, K], experts int64 [N, K], scores fp32 [N, E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        experts = (scores.detach() + self.bias).topk(self.experts_per_token, dim=-1).indices
        chosen = scores.gather(1, experts)
        weights = chosen / (chosen.sum(-1, keepdim=True) + SMALLEST_SUM) * self.scaling
        return weights, experts, scores


class Experts(nn.Module):
    """E SwiGLU networks as stacked matrices: `gate_up` [E, 2I, D] and `down` [E, D, I]."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        count, inner, size = moe.num_experts, moe.intermediate_size, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, size, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, size, inner, device=device, dtype=dtype))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows x [N, D], sorted by expert, counts [E] of each -> [N, D]."""
        gate_up = grouped_matmul(x, self.gate_up, counts)
        return grouped_matmul(apply_gate(gate_up), self.down, counts)


class MixtureOfExperts(nn.Module):
    """Routed experts plus one that every token uses."""

    hf_prefix = "mlp"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        moe = config.moe
        if moe is None:
            raise ValueError("MixtureOfExperts needs config.moe")
        self.router = Router(config, moe, device=device)
        self.experts = Experts(config, moe, device=device, dtype=dtype)
        self.shared: SwiGLU | None = None
        if moe.num_shared:
            inner = moe.intermediate_size * moe.num_shared
            self.shared = SwiGLU(config, layer, inner=inner, device=device, dtype=dtype)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        rows = x.flatten(0, 1)
        weights, experts, scores = self.router(rows)
        if step.trace is not None:
            step.trace.router(self.router, scores, experts)
        per_token = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=scores.shape[1])
        sorted_out = self.experts(rows[order // per_token], counts)
        # Back to token order: a sum over K neighbours is deterministic, unlike scattered adds.
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        out = self.mix(sorted_out[back].unflatten(0, (-1, per_token)), weights)
        out = out.to(x.dtype).view_as(x)
        return out if self.shared is None else out + self.shared(x, step)

    def mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of what K experts say of each token: [N, K, D], [N, K] -> [N, D]."""
        return (outputs * weights.unsqueeze(-1)).sum(1)

    def residual_outputs(self) -> Iterator[Tensor]:
        """Weights whose output is added to the residual stream (initialised smaller)."""
        yield self.experts.down
        if self.shared is not None:
            yield from self.shared.residual_outputs()

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name below `hf_prefix` and view into the parameters, for every Hugging Face tensor."""
        yield "gate.weight", self.router.weight.detach()
        yield "gate.e_score_correction_bias", self.router.bias
        gate_up, down = self.experts.gate_up.detach(), self.experts.down.detach()
        for index in range(gate_up.shape[0]):
            gate, up = gate_up[index].chunk(2)
            yield f"experts.{index}.gate_proj.weight", gate
            yield f"experts.{index}.up_proj.weight", up
            yield f"experts.{index}.down_proj.weight", down[index]
        if self.shared is not None:
            for name, view in self.shared.hf_tensors():
                yield f"shared_experts.{name}", view
