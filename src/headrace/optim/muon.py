"""Muon: momentum whose matrix updates are orthogonalised, block by block.

Every parameter comes with its blocks (`blocks.matrix_blocks`). Blocks of one shape, over all
layers, go through the Newton-Schulz iteration in batches of bounded size (`updates`). Parameters
may be sharded over processes (`sharded`); the result is the same.

Source: Jordan et al. 2024 (Muon), Liu et al. 2025 (update RMS matching); GLM-5 (arXiv 2602.15763)
section 2.1 for the split.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.optim.blocks import MatrixParameter, RowSplit
from headrace.optim.newton_schulz import Precision
from headrace.optim.sharded import Exchange, RowShard, aligned_split, row_shard
from headrace.optim.updates import SCRATCH_ELEMENTS, LocalMatrix, update_blocks


class Muon(torch.optim.Optimizer):
    """Muon for given matrices; its own `lr` per group like any optimizer.

    Processes that share sharded parameters must step together, with gradients for the same ones.

    Args:
        blocks: parameters with their blocks, as one group (see `add_blocks` for more).
        lr: size of an update relative to a matched AdamW step.
        momentum: of the gradient average, Nesterov style.
        weight_decay: decoupled.
        precision: of the Newton-Schulz iteration; see `newton_schulz.resolve_precision`.
        scratch_elements: see `updates.SCRATCH_ELEMENTS`.

    Raises:
        ValueError: a parameter is not a matrix, or its rows do not match its blocks.
        UserError: a parameter is sharded in a way Muon cannot follow.
    """

    def __init__(
        self,
        blocks: Sequence[MatrixParameter],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        precision: Precision = "auto",
        scratch_elements: int = SCRATCH_ELEMENTS,
    ) -> None:
        self._splits: dict[nn.Parameter, RowSplit] = {}
        self._shards: dict[nn.Parameter, RowShard | None] = {}
        self._exchanges: dict[tuple[nn.Parameter, ...], Exchange] = {}
        self._precision: Precision = precision
        self._scratch_elements = scratch_elements
        self._remember(blocks)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([parameter for parameter, _ in blocks], defaults)

    def add_blocks(self, blocks: Sequence[MatrixParameter], **options: Any) -> None:
        """Add a group with its own options: `lr`, `momentum`, `weight_decay` and any labels."""
        self._remember(blocks)
        self.add_param_group({"params": [parameter for parameter, _ in blocks], **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. torch's base class types the closure more narrowly than it uses it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        whole: list[tuple[LocalMatrix, RowSplit]] = []
        straddling: defaultdict[Any, list[tuple[nn.Parameter, LocalMatrix]]] = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                matrix = self._advance(parameter, group)
                split, shard = self._splits[parameter], self._shards[parameter]
                here = aligned_split(parameter.shape, split, shard) if shard else split
                if here is not None:
                    whole.append((matrix, here))
                elif shard is not None:
                    straddling[shard.group].append((parameter, matrix))
        update_blocks(whole, precision=self._precision, scratch_elements=self._scratch_elements)
        for pairs in straddling.values():
            exchange = self._exchange(tuple(parameter for parameter, _ in pairs))
            exchange.update([matrix for _, matrix in pairs], self._precision)
        return loss

    def _remember(self, blocks: Sequence[MatrixParameter]) -> None:
        for parameter, split in blocks:
            shape = list(parameter.shape)
            if len(shape) not in (2, 3) or (len(shape) == 3 and split.groups > 1):
                raise ValueError(f"Muon: a parameter {shape} cannot be split into {split}")
            if sum(split.rows) * split.groups != shape[-2]:
                raise ValueError(f"Muon: {shape[-2]} rows cannot be split into {split}")
            self._splits[parameter] = split
            self._shards[parameter] = row_shard(parameter)

    def _advance(self, parameter: nn.Parameter, group: dict[str, Any]) -> LocalMatrix:
        """Decay the weights, advance the gradient average; what is left is the update."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, target = _local(parameter.grad), _local(parameter)
        average = _local(state["momentum"])
        average.lerp_(gradient, 1 - group["momentum"])
        target.mul_(1 - group["lr"] * group["weight_decay"])
        return LocalMatrix(gradient, average, target, group["momentum"], group["lr"])

    def _exchange(self, parameters: tuple[nn.Parameter, ...]) -> Exchange:
        """The exchange plan of these parameters, made once."""
        if parameters not in self._exchanges:
            layouts = []
            for parameter in parameters:
                shard = self._shards[parameter]
                assert shard is not None
                layouts.append((tuple(parameter.shape), self._splits[parameter], shard))
            self._exchanges[parameters] = Exchange(layouts, scratch_elements=self._scratch_elements)
        return self._exchanges[parameters]


def _local(tensor: Tensor | None) -> Tensor:
    """This process's part of a tensor, sharing its memory."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
