"""What ops that an engine computes row by row have to pass: within `row_independent`, a row has the
same bits whatever other rows are in the call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.ops.rows import row_independent

_Check = Callable[[Callable[..., Any], torch.dtype, torch.Generator], float]

_ROWS = 70


def _differences(rows_of: Callable[[Tensor], Tensor], g: torch.Generator) -> float:
    """Numbers that change when only some of the rows are computed, in any order."""
    with torch.no_grad(), row_independent():
        whole = rows_of(torch.arange(_ROWS))
        wrong = 0
        for count in (1, 2, 3, 16, 17, 40, 69):
            chosen = torch.randperm(_ROWS, generator=g)[:count]
            wrong += int((rows_of(chosen) != whole[chosen]).sum())
    return float(wrong)


def _sparse(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    """Also with keys that lie elsewhere and with other numbers of -1 among the indices."""
    wrong = 0.0
    for heads, width, value_dim, keys in ((1, 16, 16, 20), (5, 50, 44, 300), (17, 40, 32, 90)):
        q = torch.randn(_ROWS, heads, width, generator=g).to(dtype)
        kv = torch.randn(keys, width, generator=g).to(dtype)
        seen = torch.randint(0, keys, (_ROWS,), generator=g)
        column = torch.arange(keys, dtype=torch.int32)
        indices = torch.where(column <= seen[:, None], column, -1).int()
        moved = torch.randperm(keys, generator=g).int()
        elsewhere = torch.empty_like(kv)
        elsewhere[moved.long()] = kv

        attend = partial(call, scale=0.2, value_dim=value_dim)

        def some(
            chosen: Tensor,
            attend: Callable[..., Any] = attend,
            inputs: tuple[Tensor, Tensor, Tensor] = (q, kv, indices),
        ) -> Tensor:
            q, kv, indices = inputs
            needed = int((indices[chosen] >= 0).sum(1).max())
            return attend(q[chosen], kv, indices[chosen, :needed])[0]

        wrong += _differences(some, g)
        with torch.no_grad(), row_independent():
            first = attend(q, kv, indices)[0]
            gaps = torch.full((_ROWS, 2 * keys), -1, dtype=torch.int32)
            gaps[:, ::2] = torch.where(indices < 0, -1, moved[indices.clamp(min=0).long()])
            again = attend(q, elsewhere, gaps)[0]
            wrong += int((first != again).sum())
    return wrong


def _norm(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    wrong = 0.0
    for width in (1, 31, 130):
        x = torch.randn(_ROWS, width, generator=g).to(dtype)
        weight = torch.randn(width, generator=g).to(dtype)
        wrong += _differences(lambda rows, x=x, w=weight: call(x[rows], w, 1e-6), g)
    return wrong


def _gate(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    wrong = 0.0
    for width in (2, 62, 130):
        x = torch.randn(_ROWS, width, generator=g).to(dtype)
        wrong += _differences(lambda rows, x=x: call(x[rows]), g)
    return wrong


def _rotation(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    wrong = 0.0
    for interleaved in (False, True):
        for width in (2, 18, 64):
            x = torch.randn(_ROWS, 3, width, generator=g).to(dtype)
            angles = torch.randn(_ROWS, 1, width, generator=g)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

            def some(
                rows: Tensor,
                tensors: tuple[Tensor, ...] = (x, cos, sin),
                interleaved: bool = interleaved,
            ) -> Tensor:
                parts = (t[rows][None] for t in tensors)
                return call(*parts, interleaved=interleaved)[0]

            wrong += _differences(some, g)
    return wrong


ROW_CHECKS: dict[str, dict[str, tuple[_Check, float | None]]] = {
    op: {"rows do not depend on others": (check, 0.0)}
    for op, check in (
        ("sparse_latent_attention", _sparse),
        ("rms_norm", _norm),
        ("swiglu", _gate),
        ("rotate", _rotation),
    )
}
"""By op: the check and the largest passing error."""
