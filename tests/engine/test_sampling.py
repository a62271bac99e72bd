"""Draws follow the stated distribution, and only the request's own seed moves them."""

import math

import numpy as np
import pytest
import torch

from headrace.engine.sampling import SamplingBatch, uniform
from headrace.engine.types import SamplingParams


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **changes})  # type: ignore[arg-type]  # a shorthand


def reference(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """float64 distribution by the textbook: temperature, then top-k, then top-p."""
    scores = logits.double() / (p.temperature or 1.0)
    if p.temperature == 0:
        return scores.softmax(-1)
    order = scores.argsort(descending=True)
    kept = order[: p.top_k] if p.top_k else order
    mass = scores[kept].softmax(-1)
    n = int((mass.cumsum(-1) - mass < p.top_p).sum())
    result = torch.zeros_like(scores)
    result[kept[:n]] = scores[kept[:n]].softmax(-1)
    return result


MIXES = [
    params(),
    params(temperature=0.7),
    params(temperature=0.0),
    params(top_k=3),
    params(temperature=1.5, top_p=0.6),
    params(temperature=0.8, top_k=9, top_p=0.8),
    params(top_k=10_000),
    params(top_p=1e-9),
]


@pytest.mark.parametrize("vocab", [50, 700])
def test_mixed_batch_draws_each_row_from_its_own_distribution(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(MIXES), vocab) * 2
    expected = torch.stack([reference(row, p) for row, p in zip(logits, MIXES, strict=True)])
    copies, steps = 100, 30
    draws = copies * steps
    rows = torch.arange(len(MIXES)).repeat(copies)
    batch = SamplingBatch(MIXES * copies, seeds=range(len(rows)), drawn=[0] * len(rows))
    counts = torch.zeros_like(logits)
    for _ in range(steps):
        ids, logprobs = batch.sample(logits[rows])
        assert torch.allclose(logprobs.double(), expected[rows, ids].log(), atol=1e-4)
        counts.index_put_((rows, ids), torch.ones(len(rows)), accumulate=True)
    assert counts[2].argmax() == logits[2].argmax()
    assert counts[2].max() == draws
    for row in (0, 1, 3, 4, 5, 6):
        top = expected[row].topk(5).indices
        got, want = counts[row][top] / draws, expected[row][top]
        assert torch.all((got - want).abs() < 4 * (want * (1 - want) / draws).sqrt() + 2e-3)


def test_nucleus_wider_than_the_partial_sort_is_exact() -> None:
    logits = torch.linspace(0, 0.01, 1000)[None]
    p = params(top_p=0.9)
    support = int((reference(logits[0], p) > 0).sum())
    assert support > 800
    batch = SamplingBatch([p], [7], [0])
    for _ in range(200):
        ids, logprobs = batch.sample(logits)
        assert int(ids) >= 1000 - support
        assert float(logprobs) == pytest.approx(-math.log(support), abs=0.02)


def test_draws_depend_on_seed_and_count_only() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 200)
    alone = SamplingBatch([params()], [42], [0])
    want = [int(alone.sample(logits[2:3])[0]) for _ in range(20)]
    mixed = SamplingBatch(
        [params(top_k=2), params(), params(), MIXES[4]], [1, 2, 42, 4], [9, 8, 0, 7]
    )
    assert [int(mixed.sample(logits)[0][2]) for _ in range(20)] == want
    resumed = SamplingBatch([params()], [42], [12])
    assert [int(resumed.sample(logits[2:3])[0]) for _ in range(8)] == want[12:]
    other = SamplingBatch([params()], [43], [0])
    assert [int(other.sample(logits[2:3])[0]) for _ in range(20)] != want


def test_uniform_covers_the_unit_interval_and_neighbouring_seeds_are_unrelated() -> None:
    seeds = np.arange(2000, dtype=np.uint64)
    zero, one = np.zeros_like(seeds), np.ones_like(seeds)
    u, v = uniform(seeds, zero), uniform(seeds, one)
    assert u.min() >= 0
    assert max(u.max(), v.max()) < 1
    assert abs(u.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.08
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.08
    assert np.histogram(u, 10, (0, 1))[0].min() > 140


def test_zero_probability_is_never_drawn_and_nan_is_visible() -> None:
    logits = torch.full((1, 64), -torch.inf)
    logits[0, 5] = 0.0
    batch = SamplingBatch([params()], [0], [0])
    for _ in range(50):
        ids, logprobs = batch.sample(logits)
        assert int(ids) == 5
        assert float(logprobs) == 0.0
    broken = torch.full((1, 64), torch.nan)
    for p in (params(), params(temperature=0.0), params(top_p=0.5)):
        assert math.isnan(float(SamplingBatch([p], [0], [0]).sample(broken)[1]))
