"""What attention over blocks has to pass: right, and each row a function of its own past alone.

Pools are filled with NaN wherever no position lies that some row of the call may see, so that
whatever is read beyond shows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.ops import reference

Attend = Callable[..., Any]

SHAPES = {
    "one head": (1, 1, 16, 1),
    "odd sizes": (6, 2, 12, 5),
    "shared keys": (9, 3, 64, 16),
    "wide": (4, 2, 128, 32),
}
"""(H, Hkv, d, P) by what is special."""

LENGTHS = (1, 16, 17, 150, 64, 3)
"""Tokens of the sequences of one batch, around sizes of blocks and tiles."""


@dataclass(frozen=True)
class Paged:
    """Sequences whose keys and values lie in blocks.

    Attributes:
        q: rows [tokens, H, d] of each sequence.
        keys, values: rows [tokens, Hkv, d] of each.
        block_tokens: P.
    """

    q: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    block_tokens: int

    @classmethod
    def draw(
        cls,
        generator: torch.Generator,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        lengths: Sequence[int] = LENGTHS,
    ) -> "Paged":
        """Normal numbers; keys of different sequences differ in size."""
        heads, kv_heads, width, block_tokens = shape

        def rows(count: int, heads: int, factor: float) -> Tensor:
            return (torch.randn(count, heads, width, generator=generator) * factor).to(dtype)

        sizes = [1.0 + number % 3 for number in range(len(lengths))]
        return cls(
            [rows(n, heads, 1.0) for n in lengths],
            [rows(n, kv_heads, size) for n, size in zip(lengths, sizes, strict=True)],
            [rows(n, kv_heads, size) for n, size in zip(lengths, sizes, strict=True)],
            block_tokens,
        )

    def attend(
        self, call: Attend, chunks: Sequence[tuple[int, int, int]], order: torch.Generator
    ) -> list[Tensor]:
        """Outputs of chunks (sequence, start, count) as one call over a pool of their own.

        Blocks are dealt out in random order; tables are longer than they have to be.
        """
        size = self.block_tokens
        ends = [start + count for _, start, count in chunks]
        needed = [-(-end // size) for end in ends]
        blocks = torch.randperm(sum(needed) + 2, generator=order).tolist()
        kv_heads, width = self.keys[0].shape[1:]
        pools = [
            torch.full((len(blocks), kv_heads, size, width), math.nan, dtype=self.q[0].dtype)
            for _ in range(2)
        ]
        tables = torch.full((len(chunks), max(needed, default=0) + 1), -1, dtype=torch.int32)
        for row, (sequence, _, _) in enumerate(chunks):
            for place in range(needed[row]):
                block = blocks.pop()
                tables[row, place] = block
                begin, end = place * size, min((place + 1) * size, ends[row])
                for pool, rows in zip(pools, (self.keys, self.values), strict=True):
                    part = rows[sequence][begin:end]
                    pool[block, :, : end - begin] = part.transpose(0, 1)
        q = torch.cat([self.q[i][start : start + count] for i, start, count in chunks])
        counts = [count for _, _, count in chunks]
        starts = [start for _, start, _ in chunks]
        out = call(q, *pools, tables, starts, counts, scale=width**-0.5)
        return list(out.split(counts))

    def whole(self) -> list[tuple[int, int, int]]:
        """Every sequence in one chunk."""
        return [(i, 0, q.shape[0]) for i, q in enumerate(self.q)]


def _close(attend: Attend, dtype: torch.dtype, g: torch.Generator) -> float:
    """Largest error against float64 over the largest element of a sequence."""
    worst = 0.0
    for shape in SHAPES.values():
        case = Paged.draw(g, dtype, shape)
        q, keys, values = ([x.double() for x in rows] for rows in (case.q, case.keys, case.values))
        exact = Paged(q, keys, values, case.block_tokens)
        got = case.attend(attend, case.whole(), g)
        want = exact.attend(reference.paged_attention, case.whole(), g)
        for a, b in zip(got, want, strict=True):
            if a.shape != b.shape or a.dtype != dtype:
                return math.inf
            worst = max(worst, float((a.double() - b).abs().max() / b.abs().max()))
    return worst


def _surroundings(attend: Attend, dtype: torch.dtype, g: torch.Generator) -> float:
    """Numbers that change when rows come alone, with others, in other chunks or in other blocks."""
    wrong = 0
    for shape in SHAPES.values():
        case = Paged.draw(g, dtype, shape)
        together = case.attend(attend, case.whole(), g)
        for chunks in _splits(g):
            for (i, start, count), out in zip(chunks, case.attend(attend, chunks, g), strict=True):
                wrong += int((out != together[i][start : start + count]).sum())
    return float(wrong)


def _splits(g: torch.Generator) -> list[list[tuple[int, int, int]]]:
    """Batches of chunks of sequences of LENGTHS, some of them decoding steps."""
    batches: list[list[tuple[int, int, int]]] = [
        [(i, n - 1, 1) for i, n in enumerate(LENGTHS)],
        [(3, 63, 1)],
        [(3, 64, 86), (0, 0, 1), (3, 0, 64)],
    ]
    for _ in range(3):
        batch = []
        for i in torch.randperm(len(LENGTHS), generator=g).tolist():
            start = int(torch.randint(LENGTHS[i], (), generator=g))
            count = 1 + int(torch.randint(LENGTHS[i] - start, (), generator=g))
            batch.append((i, start, count))
        batches.append(batch)
    return batches


def _repeatable(attend: Attend, dtype: torch.dtype, g: torch.Generator) -> float:
    """Numbers that differ between two calls, the second one over other blocks."""
    case = Paged.draw(g, dtype, SHAPES["shared keys"])
    first, second = (case.attend(attend, case.whole(), g) for _ in range(2))
    return float(sum(int((a != b).sum()) for a, b in zip(first, second, strict=True)))


def _nothing(attend: Attend, dtype: torch.dtype, g: torch.Generator) -> float:
    """A step without sequences is an empty tensor."""
    q, pool = torch.zeros(0, 4, 16, dtype=dtype), torch.zeros(3, 2, 8, 16, dtype=dtype)
    out = attend(q, pool, pool, torch.zeros(0, 5, dtype=torch.int32), [], [], scale=1.0)
    return 0.0 if out.shape == q.shape and out.dtype == dtype else math.inf


PAGED_CHECKS: dict[
    str, tuple[Callable[[Attend, torch.dtype, torch.Generator], float], float | None]
] = {
    "forward": (_close, None),
    "alone, chunks, batch, blocks": (_surroundings, 0.0),
    "repeatable": (_repeatable, 0.0),
    "no sequences": (_nothing, 0.0),
}
"""Check and largest passing error by name; None is what forwards are allowed."""
