"""Inputs that a backend of each op has to get right, for the conformance suite.

Small and awkward on purpose: odd sizes, empty sequences, rows that see nothing, experts without
rows, shared key heads. Everything is drawn on the CPU from one seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.ops.layout import Layout
from headrace.ops.packed import PackedMatrix
from headrace.ops.packed_grouped import PackedMatrices

FLOAT32_ARGUMENTS = ("weights",)
"""Arguments that stay float32 when the others are bfloat16."""


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        name: what is special about it.
        tensors: differentiable arguments in float32, in the op's order, by name.
        rest: the arguments that follow them.
        options: keyword arguments.
    """

    name: str
    tensors: Mapping[str, Tensor]
    rest: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


LAYOUTS: dict[str, tuple[Layout, int, int]] = {
    "one sequence": (Layout.causal(1, 37), 37, 37),
    "equal sequences": (Layout.causal(3, 16), 48, 48),
    "packed, some empty": (Layout.packed([5, 0, 1, 29, 7, 0]), 42, 42),
    "padding rows": (Layout((2, 11, 30), (6, 6, 13), (0, 6, 12), (6, 6, 13)), 47, 31),
    "chunk over a cache": (Layout((0, 9, 14), (9, 4, 1), (40, 3, 0), (30, 17, 12)), 15, 75),
    "shared prefix": (Layout((0, 3), (3, 4), (0, 0), (20, 24)), 7, 24),
    "nothing": (Layout.packed([0, 0]), 3, 5),
}
"""Layout, query rows and key rows by what is special."""


def dense_attention(generator: torch.Generator) -> list[Case]:
    """Every layout, with one and several heads per key head and with d != dv."""
    shapes = [(4, 4, 16, 16), (6, 2, 8, 8), (3, 1, 24, 8), (2, 2, 7, 13)]
    cases = []
    for number, (name, (layout, rows, keys)) in enumerate(LAYOUTS.items()):
        heads, kv_heads, width, value_width = shapes[number % len(shapes)]
        tensors = {
            "q": _normal(generator, rows, heads, width),
            "k": _normal(generator, keys, kv_heads, width),
            "v": _normal(generator, keys, kv_heads, value_width),
        }
        cases.append(Case(name, tensors, (layout,), {"scale": width**-0.5}))
    layout = Layout.packed([300, 150])
    tensors = {name: _normal(generator, 450, 2, 32) for name in ("q", "k", "v")}
    # Large scores: what is rounded before the softmax shows.
    cases.append(Case("longer, large scores", tensors, (layout,), {"scale": 1.0}))
    return cases


def _selection(generator: torch.Generator, rows: int, keys: int, width: int) -> Tensor:
    """Ascending distinct int32 indices [rows, width], a random number of them per row."""
    order = torch.rand(rows, keys, generator=generator).argsort(-1)[:, :width]
    counts = torch.randint(0, width + 1, (rows, 1), generator=generator)
    order = order.masked_fill(torch.arange(width) >= counts, keys).sort(-1).values
    return order.masked_fill(order == keys, -1).int()


def sparse_latent_attention(generator: torch.Generator) -> list[Case]:
    """Sizes around tile sizes, rows without entries, values as wide as the row."""
    cases = []
    for name, (rows, keys, heads, width, value_dim, count) in {
        "one head, odd sizes": (5, 9, 1, 7, 5, 3),
        "many heads": (6, 40, 20, 40, 32, 33),
        "latent shape": (9, 80, 16, 96, 64, 48),
        "values are whole rows": (4, 30, 3, 18, 18, 17),
        "one key": (3, 1, 2, 16, 8, 1),
    }.items():
        tensors = {
            "q": _normal(generator, rows, heads, width),
            "kv": _normal(generator, keys, width),
        }
        indices = _selection(generator, rows, keys, count)
        indices[0] = -1
        options = {"scale": width**-0.5, "value_dim": value_dim, "want_mass": True}
        cases.append(Case(name, tensors, (indices,), options))
    tensors = {"q": torch.zeros(0, 2, 8), "kv": _normal(generator, 4, 8)}
    options = {"scale": 1.0, "value_dim": 4, "want_mass": True}
    cases.append(Case("no rows", tensors, (torch.zeros(0, 3, dtype=torch.int32),), options))
    return cases


def indexer_scores(generator: torch.Generator) -> list[Case]:
    """Odd sizes, one head, rows without entries."""
    cases = []
    for name, (rows, keys, heads, width, count) in {
        "one head, odd sizes": (5, 9, 1, 6, 3),
        "indexer shape": (9, 70, 4, 32, 40),
        "many heads": (3, 33, 33, 16, 17),
    }.items():
        tensors = {
            "q": _normal(generator, rows, heads, width),
            "weights": _normal(generator, rows, heads),
            "k": _normal(generator, keys, width),
        }
        indices = _selection(generator, rows, keys, count)
        indices[-1] = -1
        cases.append(Case(name, tensors, (indices,)))
    return cases


def grouped_matmul(generator: torch.Generator) -> list[Case]:
    """Experts without rows, widths that are not aligned, no rows at all."""
    cases = []
    for name, (counts, width, outputs) in {
        "aligned": ([3, 0, 17, 4], 32, 48),
        "odd widths": ([1, 5, 0], 7, 5),
        "all rows to the last": ([0, 0, 9], 16, 16),
        "no rows": ([0, 0], 8, 8),
    }.items():
        tensors = {
            "x": _normal(generator, sum(counts), width),
            "weight": _normal(generator, len(counts), outputs, width),
        }
        cases.append(Case(name, tensors, (counts,)))
    return cases


def linear_cross_entropy(generator: torch.Generator) -> list[Case]:
    """In one chunk, in several, row by row, without rows; with a confident model."""
    cases = []
    for name, (rows, width, vocabulary, chunk, spread) in {
        "one chunk": (19, 16, 37, 1 << 20, 0.3),
        "chunks": (19, 16, 37, 4 * 37 + 5, 0.3),
        "row by row": (5, 8, 11, 1, 0.3),
        "confident": (23, 16, 29, 6 * 29, 1.5),
        "no rows": (0, 8, 11, 64, 0.3),
    }.items():
        tensors = {
            "hidden": _normal(generator, rows, width),
            "weight": _normal(generator, vocabulary, width) * spread,
        }
        targets = torch.randint(0, vocabulary, (rows,), generator=generator)
        options = {"temperature": 0.7, "chunk_elements": chunk}
        cases.append(Case(name, tensors, (targets,), options))
    return cases


def rms_norm(generator: torch.Generator) -> list[Case]:
    """Odd widths, more dimensions, very small and very large rows, no rows."""
    cases = []
    for name, shape in {
        "odd width": (5, 7),
        "more dimensions": (2, 3, 4, 64),
        "wide": (3, 1000),
        "no rows": (0, 16),
    }.items():
        x = _normal(generator, *shape)
        weight = 1 + 0.1 * _normal(generator, shape[-1])
        cases.append(Case(name, {"x": x, "weight": weight}, (1e-5,)))
    # Each magnitude is a case: the error is measured against the largest element.
    for name, factor in {"small": 1e-4, "large": 1e4}.items():
        tensors = {"x": _normal(generator, 6, 32) * factor, "weight": torch.ones(32)}
        cases.append(Case(name, tensors, (1e-6,)))
    return cases


def swiglu(generator: torch.Generator) -> list[Case]:
    """Odd widths, more dimensions, saturated gates, no rows."""
    cases = [
        Case(name, {"gate_up": _normal(generator, *shape)})
        for name, shape in {
            "odd width": (5, 14),
            "more dimensions": (2, 3, 128),
            "no rows": (0, 16),
        }.items()
    ]
    saturated = torch.tensor([[-200.0, -30.0, 0.0, 30.0, 200.0] * 2])
    return [*cases, Case("saturated", {"gate_up": saturated})]


def rotate(generator: torch.Generator) -> list[Case]:
    """Both pairings, tables of one row and of every row."""
    cases = []
    for interleaved in (False, True):
        for batch, tables, tokens, heads, width in (
            (1, 1, 7, 3, 6),
            (3, 3, 5, 2, 32),
            (2, 1, 4, 1, 10),
        ):
            angles = 6 * torch.rand(tables, tokens, 1, width // 2, generator=generator)
            cos, sin = angles.cos(), angles.sin()
            if interleaved:
                cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
            else:
                cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            pairs = "neighbours" if interleaved else "halves"
            name = f"{pairs}, {batch} rows, {tables} of tables"
            x = _normal(generator, batch, tokens, heads, width)
            cases.append(Case(name, {"x": x}, (cos, sin), {"interleaved": interleaved}))
    return cases


CASES: dict[str, Callable[[torch.Generator], list[Case]]] = {
    "dense_attention": dense_attention,
    "grouped_matmul": grouped_matmul,
    "indexer_scores": indexer_scores,
    "linear_cross_entropy": linear_cross_entropy,
    "rms_norm": rms_norm,
    "rotate": rotate,
    "sparse_latent_attention": sparse_latent_attention,
    "swiglu": swiglu,
}
"""Cases of every differentiable op."""


def timing_cases(generator: torch.Generator) -> dict[str, Case]:
    """One call of each op that is large enough to compare backends by its time."""
    rows, keys = 256, 512
    chunk = Layout((0,), (rows,), (0,), (keys,))
    indexer = {
        "q": _normal(generator, rows, 4, 32),
        "weights": _normal(generator, rows, 4),
        "k": _normal(generator, keys, 32),
    }
    indices = torch.arange(64, dtype=torch.int32).expand(rows, -1).contiguous()
    latent = {"q": _normal(generator, rows, 8, 96), "kv": _normal(generator, keys, 96)}
    paged = {"q": _normal(generator, 256, 9, 64)}
    paged |= {name: _normal(generator, 128, 3, 16, 64) for name in ("keys", "values")}
    tables = torch.arange(128, dtype=torch.int32).view(4, 32)
    experts = {"x": _normal(generator, 512, 128), "weight": _normal(generator, 8, 256, 128)}
    decoder = PackedMatrix.pack(_normal(generator, 1536, 576), "bfloat16")
    grouped = PackedMatrices.pack(_normal(generator, 8, 256, 128), "bfloat16")
    head = {"hidden": _normal(generator, 256, 128), "weight": _normal(generator, 4096, 128)}
    return {
        "select_topk": Case("timing", indexer, (chunk, 64)),
        "indexer_scores": Case("timing", indexer, (indices,)),
        "sparse_latent_attention": Case(
            "timing", latent, (indices,), {"scale": 0.1, "value_dim": 64}
        ),
        "dense_attention": Case(
            "timing",
            {name: _normal(generator, 512, 8, 64) for name in ("q", "k", "v")},
            (Layout.packed([200, 56, 256]),),
            {"scale": 0.125},
        ),
        "paged_attention": Case(
            "timing", paged, (tables, [300, 511, 80, 0], [1, 1, 100, 154]), {"scale": 0.125}
        ),
        "draw_tokens": Case(
            "timing",
            {"logits": _normal(generator, 16, 32768)},
            (torch.ones(16), torch.full((16,), 0.5, dtype=torch.float64)),
        ),
        "token_logprobs": Case(
            "timing",
            {"logits": _normal(generator, 16, 32768)},
            (torch.zeros(16, 1, dtype=torch.int64),),
        ),
        "grouped_matmul": Case("timing", experts, ([64] * 8,)),
        "linear_cross_entropy": Case("timing", head, (torch.arange(256),)),
        "packed_linear": Case("timing", {"x": _normal(generator, 64, 576)}, (decoder,)),
        "packed_grouped_linear": Case(
            "timing", {"x": _normal(generator, 512, 128)}, (grouped, [64] * 8)
        ),
        "rms_norm": Case(
            "timing", {"x": _normal(generator, 512, 512), "weight": torch.ones(512)}, (1e-6,)
        ),
        "rotate": Case(
            "timing",
            {"x": _normal(generator, 1, 512, 8, 64)},
            (torch.ones(1, 512, 1, 64), torch.zeros(1, 512, 1, 64)),
            {"interleaved": False},
        ),
        "swiglu": Case("timing", {"gate_up": _normal(generator, 512, 1024)}),
    }
