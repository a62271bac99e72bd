"""What a product with a packed matrix has to pass, in every precision: the right result, and the
same bits for a row whatever other rows are in the call."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.ops.packed import KINDS, Kind, PackedMatrix
from headrace.ops.packed_grouped import PackedMatrices
from headrace.ops.registry import REFERENCE, REGISTRY

Linear = Callable[..., Tensor]
_Check = Callable[[Linear, torch.dtype, torch.Generator], float]

_SIZES = ((1, 1), (7, 5), (33, 64), (48, 130), (100, 31))
"""Outputs and inputs, around panels and steps."""


def _right(kind: Kind) -> _Check:
    """Largest error over the largest result; "int8" against exact sums of its own integers."""

    def check(linear: Linear, dtype: torch.dtype, g: torch.Generator) -> float:
        worst = 0.0
        for outputs, inputs in _SIZES:
            matrix = PackedMatrix.pack(torch.randn(outputs, inputs, generator=g), kind)
            bias = torch.randn(outputs, generator=g)
            for rows, added in ((0, bias), (1, None), (1, bias), (19, bias), (50, None)):
                x = torch.randn(rows, inputs, generator=g).to(dtype)
                got = linear(x, matrix, added)
                if got.shape != (rows, outputs) or got.dtype != dtype:
                    return math.inf
                want = _rounded(x, kind) @ matrix.unpack().double().T
                want = want if added is None else want + added
                if rows:
                    worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        return worst

    return check


def _rounded(x: Tensor, kind: Kind) -> Tensor:
    """x as a matrix of this kind sees it, in float64."""
    if kind == "float32":
        return x.double()
    if kind == "bfloat16":
        return x.bfloat16().double()
    scales = x.float().abs().amax(dim=1, keepdim=True) / 127.0
    return (x.float() / scales).round().double() * scales


def _rows_alone(linear: Linear, dtype: torch.dtype, g: torch.Generator) -> float:
    """Numbers that change with the other rows of a call. Some of those are much larger."""
    wrong = 0
    for kind in KINDS:
        matrix = PackedMatrix.pack(torch.randn(70, 90, generator=g), kind)
        bias = torch.randn(70, generator=g)
        x = torch.randn(70, 90, generator=g).to(dtype)
        x[::5] *= 100
        whole = linear(x, matrix, bias)
        for rows in (1, 2, 3, 8, 15, 16, 17, 31, 33, 48, 69):
            chosen = torch.randperm(70, generator=g)[:rows]
            wrong += int((linear(x[chosen], matrix, bias) != whole[chosen]).sum())
    return float(wrong)


def _bad_rows(linear: Linear, dtype: torch.dtype, g: torch.Generator) -> float:
    """Rows that are not what a NaN or an infinity in them, and only that, must make of them."""
    wrong = 0
    for kind in KINDS:
        matrix = PackedMatrix.pack(torch.rand(40, 50, generator=g) + 1, kind)
        x = torch.randn(20, 50, generator=g).to(dtype)
        before = linear(x, matrix)
        x[3, 7], x[18, 49] = torch.nan, torch.inf
        out = linear(x, matrix)
        infinite = out[18].isnan() if kind == "int8" else out[18] == torch.inf
        wrong += int((~out[3].isnan()).sum() + (~infinite).sum())
        good = [row for row in range(20) if row not in (3, 18)]
        wrong += int((out[good] != before[good]).sum())
    return float(wrong)


_COUNTS = ([0, 0, 0], [1, 0, 0], [0, 17, 2], [5, 1, 33], [40, 40, 40])
"""Rows of each of three groups."""


def _groups_right(kind: Kind) -> _Check:
    """As `_right`, for several matrices."""

    def check(grouped: Linear, dtype: torch.dtype, g: torch.Generator) -> float:
        worst = 0.0
        for outputs, inputs in _SIZES:
            matrices = PackedMatrices.pack(torch.randn(3, outputs, inputs, generator=g), kind)
            weights = matrices.unpack().double()
            for counts in _COUNTS:
                x = torch.randn(sum(counts), inputs, generator=g).to(dtype)
                got = grouped(x, matrices, counts)
                if got.shape != (sum(counts), outputs) or got.dtype != dtype:
                    return math.inf
                if not len(x):
                    continue
                parts = zip(_rounded(x, kind).split(counts), weights, strict=True)
                want = torch.cat([rows @ weight.T for rows, weight in parts])
                worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        return worst

    return check


def _groups_alone(grouped: Linear, dtype: torch.dtype, g: torch.Generator) -> float:
    """Numbers that change with the rows of their group, of others, or with empty groups."""
    wrong = 0
    for kind in KINDS:
        matrices = PackedMatrices.pack(torch.randn(3, 70, 90, generator=g), kind)
        x = torch.randn(3, 40, 90, generator=g).to(dtype)
        x[:, ::5] *= 100
        whole = grouped(x.flatten(0, 1), matrices, [40, 40, 40]).view(3, 40, 70)
        for counts in ([1, 1, 1], [0, 1, 0], [39, 2, 16], [0, 33, 40], [17, 0, 8]):
            chosen = [torch.randperm(40, generator=g)[:n] for n in counts]
            rows = torch.cat([x[e, some] for e, some in enumerate(chosen)])
            want = torch.cat([whole[e, some] for e, some in enumerate(chosen)])
            wrong += int((grouped(rows, matrices, counts) != want).sum())
    return float(wrong)


def _same_values(
    pack: Callable[..., PackedMatrix], dtype: torch.dtype, g: torch.Generator
) -> float:
    """Numbers that are not what the reference stores of the same weight."""
    wrong = 0
    for kind in KINDS:
        for outputs, inputs in _SIZES:
            weight = (torch.randn(outputs, inputs, generator=g) * 3).to(dtype)
            if outputs > 2:
                weight[0], weight[1, 0], weight[2, -1] = 0.0, torch.nan, torch.inf
            got, want = (PackedMatrix.pack(torch.ones(outputs, inputs), kind) for _ in range(2))
            got = pack(weight, got)
            with REGISTRY.use(REFERENCE):
                want.repack_(weight)
            parts = [(got.data, want.data)]
            if got.scales is not None and want.scales is not None:
                parts.append((got.scales, want.scales))
            for a, b in parts:
                wrong += int(((a != b) & ~(a.isnan() & b.isnan())).sum())
    return float(wrong)


PACKING_CHECKS: dict[str, tuple[Callable[..., float], float | None]] = {
    "the same values as the reference": (_same_values, 0.0),
}
"""Checks of `pack_matrix`."""

GROUPED_CHECKS: dict[str, tuple[_Check, float | None]] = {
    **{f"{kind} matrices": (_groups_right(kind), None) for kind in KINDS},
    "rows do not depend on others": (_groups_alone, 0.0),
}
"""Checks of `packed_grouped_linear`."""

PACKED_CHECKS: dict[str, tuple[_Check, float | None]] = {
    **{f"{kind} matrix": (_right(kind), None) for kind in KINDS},
    "rows do not depend on others": (_rows_alone, 0.0),
    "NaN and infinity stay in their rows": (_bad_rows, 0.0),
}
"""Checks of `packed_linear`: the check and the largest passing error by name."""
