"""bfloat16 matrix products with float32 master weights, one cast per step instead of per use.

Autocast alone casts every weight again in every micro-batch, and again for its gradient. Here the
big matrices are swapped for bfloat16 copies while a step's micro-batches run; each copy's gradient
is added to its master's float32 gradient as soon as it is complete, so sums over micro-batches
keep their precision. Within one micro-batch the numbers are those of autocast.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Swap(NamedTuple):
    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter


class HalfWeights:
    """bfloat16 stand-ins for a decoder's matrices.

    Embedding, norms, routers and the indexer's head weights keep float32: the residual stream is
    made of the first, and rounding the others would change discrete choices.

    Args:
        model: its parameters must stay the same objects while this lives.
    """

    def __init__(self, model: nn.Module) -> None:
        self._swaps: list[_Swap] = []
        for path, module in model.named_modules():
            for name, master in module.named_parameters(recurse=False):
                if not _is_halved(f"{path}.{name}", master):
                    continue
                copy = nn.Parameter(
                    torch.empty_like(master, dtype=torch.bfloat16),
                    requires_grad=master.requires_grad,
                )
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(_AddTo(master))
                self._swaps.append(_Swap(module, name, master, copy))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run forward and backward passes with copies of the weights as they are now."""
        with torch.no_grad():
            for swap in self._swaps:
                swap.copy.copy_(swap.master)
        self._set("copy")
        try:
            yield
        finally:
            self._set("master")

    def _set(self, which: str) -> None:
        for swap in self._swaps:
            setattr(swap.module, swap.name, getattr(swap, which))


class _AddTo:
    """Moves a finished bfloat16 gradient into the master's float32 one."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, copy: Tensor) -> None:
        assert copy.grad is not None
        if self._master.grad is None:
            self._master.grad = copy.grad.to(self._master.dtype)
        else:
            self._master.grad.add_(copy.grad)
        copy.grad = None


def _is_halved(name: str, parameter: Tensor) -> bool:
    path = name.split(".")
    return (
        parameter.dim() >= 2
        and parameter.dtype == torch.float32
        and "embed" not in path
        and "router" not in path
        and not ("indexer" in path and "weights" in path)
    )
