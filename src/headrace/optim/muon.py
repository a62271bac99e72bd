"""Muon: momentum whose matrix updates are orthogonalised, AdamW for everything else.

Fused projections are orthogonalised block by block (queries, keys, values, gate and up each for
itself): together they would share one spectrum, which no unfused model has. Blocks of one shape go
through the Newton-Schulz iteration in one batch.

Source: Jordan et al. 2024 (Muon), Liu et al. 2025 (update RMS matching); GLM-5 (arXiv 2602.15763)
section 2.1 for why splitting matters.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.decoder import Decoder

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_UPDATE_RMS = 0.2
"""Root mean square of an update at learning rate 1, that of a typical AdamW step."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values end in about [0.7, 1.2].

    Args:
        matrices: [N, R, C] float.

    Returns:
        [N, R, C], same dtype.
    """
    a, b, c = _COEFFICIENTS
    wide = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if wide else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.transpose(1, 2) if wide else x


def matrix_blocks(model: Decoder) -> list[tuple[nn.Parameter, list[int]]]:
    """Parameters of `model` that Muon takes, with the row counts of their blocks.

    Embeddings and the output projection are not among them.
    """
    config = model.config
    attention = [
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    ]
    found = []
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2 or not name.startswith("layers."):
            continue
        if ".qkv." in name or name.endswith(".qkv"):
            rows = attention
        elif "gate_up" in name:
            rows = [config.intermediate_size] * 2
        else:
            rows = [parameter.shape[0]]
        if sum(rows) != parameter.shape[0]:
            raise ValueError(f"{name}: {parameter.shape[0]} rows cannot be split into {rows}")
        found.append((parameter, rows))
    return found


class Muon(torch.optim.Optimizer):
    """Muon for given matrices; its own `lr` per group like any optimizer.

    Args:
        blocks: parameters with the row counts of their blocks (see `matrix_blocks`).
        lr: size of an update relative to a matched AdamW step.
        momentum: of the gradient average, Nesterov style.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[nn.Parameter, list[int]]],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([parameter for parameter, _ in blocks], defaults)
        self._rows = dict(blocks)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. torch's base class types the closure more narrowly than it uses it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(average, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows = self._rows[parameter]
                for target, update in zip(
                    parameter.split(rows), direction.split(rows), strict=True
                ):
                    by_shape[(target.shape[0], target.shape[1])].append((target, update))
            for shape, pairs in by_shape.items():
                updates = orthogonalise(torch.stack([update for _, update in pairs]))
                scale = group["lr"] * _UPDATE_RMS * max(shape) ** 0.5
                for (target, _), update in zip(pairs, updates, strict=True):
                    target.add_(update, alpha=-scale)
        return loss
