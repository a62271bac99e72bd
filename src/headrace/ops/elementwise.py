"""Norm, gate and rotation on CPUs, over the native library: each one pass forward and one back.

Rows may lie strided in a larger projection, so slices of one need no copy. Results do not depend on
the number of threads. Without gradients wanted, nothing is kept and autograd is not involved.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.native import build
from headrace.ops.registry import register

BACKEND = "cpu"

_Strides = tuple[int, int, int]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `headrace.ops.rms_norm`."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
    return _rms_norm(*_rows(x), weight.contiguous(), eps, None)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `headrace.ops.swiglu`."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGLU.apply(gate_up)  # pyright: ignore[reportReturnType]
    return _swiglu(gate_up.contiguous())


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """See `headrace.ops.rotate`."""
    if cos.dtype != x.dtype == torch.float32:
        cos, sin = cos.float(), sin.float()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotate.apply(x, cos, sin, interleaved)  # pyright: ignore[reportReturnType]
    return _rotate(x, cos, sin, interleaved, inverse=False)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, strides = _rows(x)
        weight = weight.contiguous()
        root = torch.empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, root)
        ctx.strides = strides
        return _rms_norm(x, strides, weight, eps, root)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, root = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_x else None
        dweight = torch.empty(weight.shape, dtype=torch.float32) if wants_weight else None
        build.call(
            "rms_norm_backward",
            torch.get_num_threads(),
            x.dtype == torch.bfloat16,
            *(x, weight, root, grad.contiguous()),
            *(root.numel(), x.shape[-1], *ctx.strides),
            weight.dtype == torch.bfloat16,
            *(dx, dweight),
        )
        return dx, None if dweight is None else dweight.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        build.call(
            "swiglu_backward",
            torch.get_num_threads(),
            gate_up.dtype == torch.bfloat16,
            *(gate_up, grad.contiguous()),
            *(grad.numel() // max(1, grad.shape[-1]), grad.shape[-1]),
            out,
        )
        return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.dtype = interleaved, x.dtype
        return _rotate(x, cos, sin, interleaved, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dx = _rotate(grad, cos, sin, ctx.interleaved, inverse=True, dtype=ctx.dtype)
        return dx, None, None, None


def _rms_norm(
    x: Tensor, strides: _Strides, weight: Tensor, eps: float, root: Tensor | None
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    build.call(
        "rms_norm_forward",
        torch.get_num_threads(),
        x.dtype == torch.bfloat16,
        *(x, weight, out.numel() // max(1, width), width, *strides),
        weight.dtype == torch.bfloat16,
        *(eps, out, root),
    )
    return out


def _swiglu(gate_up: Tensor) -> Tensor:
    inner = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype)
    build.call(
        "swiglu_forward",
        torch.get_num_threads(),
        gate_up.dtype == torch.bfloat16,
        *(gate_up, out.numel() // max(1, inner), inner, out),
    )
    return out


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    *,
    inverse: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`dtype` is that of the result; None is the wider one of x's and the tables'."""
    x, strides = _rows(x)
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype or torch.promote_types(x.dtype, cos.dtype))
    build.call(
        "rotate",
        torch.get_num_threads(),
        x.dtype == torch.bfloat16,
        *(x, cos.contiguous(), sin.contiguous()),
        *(out.numel() // max(1, width), width, *strides),
        *(x.shape[2], cos.shape[0] * cos.shape[1]),
        *(cos.dtype == torch.bfloat16, out.dtype == torch.bfloat16, interleaved, inverse),
        out,
    )
    return out


def _rows(x: Tensor) -> tuple[Tensor, _Strides]:
    """x, copied if it must be, and where its rows lie: (inner count, outer stride, inner stride).

    Row n of the last dimension begins at element n // inner * outer stride + n % inner * stride.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, (1, width, 0)
    # Leading dimensions, those merged that are evenly spaced together.
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if x.stride(-1) != 1 or len(levels) > 2:
        return x.contiguous(), (1, width, 0)
    if len(levels) < 2:
        return x, (1, levels[0][1] if levels else width, 0)
    return x, (levels[1][0], levels[0][1], levels[1][1])


for _function in (rms_norm, swiglu, rotate):
    register(_function.__name__, BACKEND, _function, available=build.unavailable_reason)
