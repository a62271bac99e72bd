"""What a selection has to pass: the best keys, exact ties, and nothing but the pair's two rows.

Whole numbers make scores exact and mostly tied, so they test the tie rule; random ones test that a
score does not change with what surrounds it.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headrace.ops import reference
from headrace.ops.conformance_cases import LAYOUTS
from headrace.ops.layout import Layout

Select = Callable[..., Any]


def _random(
    g: torch.Generator, dtype: torch.dtype, rows: int, keys: int, heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, weights, k), weights of both signs."""
    q = torch.randn(rows, heads, width, generator=g).to(dtype)
    weights = torch.randn(rows, heads, generator=g)
    return q, weights, torch.randn(keys, width, generator=g).to(dtype)


def _whole(
    g: torch.Generator, dtype: torch.dtype, rows: int, keys: int, heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of -1, 0 and 1: every score is exact, many are equal, many are +-0."""
    q = torch.randint(-1, 2, (rows, heads, width), generator=g).to(dtype)
    weights = torch.randint(-1, 2, (rows, heads), generator=g).float()
    return q, weights, torch.randint(-1, 2, (keys, width), generator=g).to(dtype)


def _best(select: Select, dtype: torch.dtype, g: torch.Generator) -> float:
    """How much worse than the best its worst key is, over the largest score.

    Infinite when a selection is not ascending, reaches what is invisible or has a wrong number.
    """
    worst = 0.0
    for heads, width, topk in ((1, 16, 1), (4, 32, 8), (5, 18, 16), (33, 16, 200)):
        for layout, rows, keys in LAYOUTS.values():
            q, weights, k = _random(g, dtype, rows, keys, heads, width)
            chosen = select(q, weights, k, layout, topk)
            scores = torch.einsum("shd,td->sht", q.double(), k.double()).relu()
            scores = torch.einsum("sht,sh->st", scores, weights.double())
            worst = max(worst, _regret(chosen, scores, layout, topk))
    return worst


def _regret(chosen: Tensor, scores: Tensor, layout: Layout, topk: int) -> float:
    lower, upper = (bound.tolist() for bound in layout.bounds(scores.shape[0]))
    if chosen.shape != (scores.shape[0], topk) or chosen.dtype != torch.int32:
        return math.inf
    worst = 0.0
    for row, picks in enumerate(chosen.tolist()):
        count = min(topk, upper[row] - lower[row])
        picks, rest = picks[:count], picks[count:]
        ascending = all(a < b for a, b in pairwise(picks))
        inside = all(lower[row] <= index < upper[row] for index in picks)
        if not (ascending and inside and all(index == -1 for index in rest)):
            return math.inf
        if count:
            visible = scores[row, lower[row] : upper[row]]
            missed = visible.sort(descending=True).values[count - 1] - scores[row, picks].min()
            worst = max(worst, float(missed / visible.abs().max().clamp(min=1e-30)))
    return worst


def _ties(select: Select, dtype: torch.dtype, g: torch.Generator) -> float:
    """Picks that differ from the lowest-index rule."""
    wrong = 0
    for heads, width, topk in ((1, 16, 3), (4, 32, 8), (3, 18, 17), (2, 128, 64)):
        for layout, rows, keys in (*LAYOUTS.values(), (Layout.causal(1, 200), 200, 200)):
            inputs = _whole(g, dtype, rows, keys, heads, width)
            want = reference.select_topk(*inputs, layout, topk)
            wrong += int((select(*inputs, layout, topk) != want).sum())
    return float(wrong)


def _surroundings(select: Select, dtype: torch.dtype, g: torch.Generator) -> float:
    """Picks that change when the same sequence is chunked, padded, batched or cached.

    Every key occurs several times: the scores of copies tie only if they are computed alike
    wherever the copies lie. The neighbours are larger, so that anything relative to a whole tensor
    shows.
    """
    tokens, heads, width, topk = 150, 4, 32, 24
    q, weights, k = _random(g, dtype, tokens, tokens, heads, width)
    k = k[torch.arange(tokens) % 29]
    alone = select(q, weights, k, Layout.causal(1, tokens), topk)
    wrong = 0

    def compare(rows: slice, chosen: Tensor, first: int) -> None:
        nonlocal wrong
        wrong += int((torch.where(chosen < 0, chosen, chosen - first) != alone[rows]).sum())

    for begin, end in ((0, 1), (1, 17), (17, 64), (64, 149), (149, 150)):
        rows = slice(begin, end)
        layout = Layout((0,), (end - begin,), (0,), (end,))
        compare(rows, select(q[rows], weights[rows], k[:end], layout, topk), 0)
    for before, after in ((1, 0), (13, 70), (64, 1)):
        others = [
            [4 * x for x in _random(g, dtype, count, count, heads, width)]
            for count in (before, after)
        ]
        batch = [
            torch.cat((left, own, right))
            for left, own, right in zip(others[0], (q, weights, k), others[1], strict=True)
        ]
        own = slice(before, before + tokens)
        packed = Layout.packed((before, tokens, after))
        compare(slice(None), select(*batch, packed, topk)[own], before)
        padded = Layout((before,), (tokens,), (before,), (tokens,))
        compare(slice(None), select(*batch, padded, topk)[own], before)
    return float(wrong)


def _nothing_visible(select: Select, dtype: torch.dtype, g: torch.Generator) -> float:
    """Entries other than -1 in rows that see nothing."""
    wrong = 0
    for rows, keys in ((4, 6), (4, 0), (0, 0)):
        inputs = _random(g, dtype, rows, keys, 2, 16)
        chosen = select(*inputs, Layout.packed([0]), 5)
        if chosen.shape != (rows, 5):
            return math.inf
        wrong += int((chosen != -1).sum())
    return float(wrong)


def _not_a_number(select: Select, dtype: torch.dtype, g: torch.Generator) -> float:
    """Picks that differ from the rule that NaN ranks last."""
    q, _, k = _random(g, dtype, 40, 40, 2, 16)
    weights = torch.rand(40, 2, generator=g) + 0.1
    k[3] = k[20] = float("nan")
    # Whole numbers elsewhere, or rounding could decide.
    q, k = q.round(), k.round()
    weights = weights.round(decimals=1).mul(8).round()
    layout = Layout.causal(1, 40)
    want = reference.select_topk(q, weights, k, layout, 12)
    return float((select(q, weights, k, layout, 12) != want).sum())


def _repeatable(select: Select, dtype: torch.dtype, g: torch.Generator) -> float:
    """Picks that differ between two calls."""
    inputs = _random(g, dtype, 100, 100, 4, 32)
    first, second = (select(*inputs, Layout.causal(1, 100), 16) for _ in range(2))
    return float((first != second).sum())


SELECTION_CHECKS: dict[
    str, tuple[Callable[[Select, torch.dtype, torch.Generator], float], float | None]
] = {
    "the best keys": (_best, 1e-6),
    "ties to the lowest index": (_ties, 0.0),
    "padding, chunks, batch": (_surroundings, 0.0),
    "rows that see nothing": (_nothing_visible, 0.0),
    "NaN ranks last": (_not_a_number, 0.0),
    "repeatable": (_repeatable, 0.0),
}
"""Check and largest passing error by name."""
