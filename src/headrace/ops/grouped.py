"""Matrix products of many experts on CPUs.

torch's grouped product beats both a loop of products and one padded batch at every size measured;
it needs rows aligned to 16 bytes, and where they are not the loop takes its place.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.registry import register

_ALIGNMENT = 16


def grouped_matmul(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """See `headrace.ops.grouped_matmul`."""
    return _GroupedMatmul.apply(x, weight, counts)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return _rows_times(x, weight.mT, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        # An expanded gradient (that of a plain sum) has strides of zero, which the kernel rejects.
        grad = grads[0].contiguous()
        return (
            _rows_times(grad, weight, ctx.counts) if needs_x else None,
            _outer(grad, x, ctx.counts) if needs_weight else None,
            None,
        )


def _rows_times(x: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """x [N, A] times its expert's matrix of [E, A, B] -> [N, B]."""
    if _aligned(x, *matrices.shape[1:]):
        return F.grouped_mm(x.contiguous(), _dense(matrices), offs=_ends(counts))
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for rows, matrix, target in zip(x.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(rows, matrix, out=target)
    return out


def _outer(left: Tensor, right: Tensor, counts: list[int]) -> Tensor:
    """left_e^T @ right_e of [N, A] and [N, B] -> [E, A, B]; zero for an expert without rows."""
    if _aligned(left, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.mT, right.contiguous(), offs=_ends(counts))
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for a, b, target in zip(left.split(counts), right.split(counts), out, strict=True):
        torch.mm(a.mT, b, out=target)
    return out


def _aligned(x: Tensor, *widths: int) -> bool:
    """Whether torch has the grouped product (new in 2.10) and takes rows of these widths."""
    whole = all(width * x.element_size() % _ALIGNMENT == 0 for width in widths)
    return whole and x.numel() > 0 and hasattr(F, "grouped_mm")


def _dense(matrices: Tensor) -> Tensor:
    """[E, A, B] whose matrices are dense row by row or column by column."""
    return matrices if matrices.is_contiguous() or matrices.mT.is_contiguous() else matrices.clone()


def _ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


register("grouped_matmul", "cpu", grouped_matmul)
