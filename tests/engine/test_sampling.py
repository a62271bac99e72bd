"""Draws follow the stated distribution, and only the request's own seed moves them."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.sampling.batch import SamplingBatch, invert_cdf, score_tokens
from headrace.engine.types import SamplingParams


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **changes})  # type: ignore[arg-type]  # a shorthand


def reference(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """float64 distribution by the textbook: temperature, then top-k, then top-p, then min-p."""
    scores = logits.double() / (p.temperature or 1.0)
    if p.temperature == 0:
        return scores.softmax(-1)
    order = scores.argsort(descending=True)
    kept = order[: p.top_k] if p.top_k else order
    mass = scores[kept].softmax(-1)
    n = int(((mass.cumsum(-1) - mass < p.top_p) & (mass >= p.min_p * mass[0])).sum())
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
    params(temperature=1.2, min_p=0.1),
    params(top_k=10_000),
    params(top_p=1e-9),
]


@pytest.mark.parametrize("vocab", [50, 1500])
def test_mixed_batch_draws_each_row_from_its_own_distribution(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(MIXES), vocab) * 2
    expected = torch.stack([reference(row, p) for row, p in zip(logits, MIXES, strict=True)])
    raw = logits.double().log_softmax(-1)
    copies, steps = 100, 30
    draws = copies * steps
    rows = torch.arange(len(MIXES)).repeat(copies)
    batch = SamplingBatch(MIXES * copies, seeds=range(len(rows)), drawn=[0] * len(rows))
    torch.testing.assert_close(
        batch.distribution(logits[rows])[: len(MIXES)].double(), expected, atol=1e-6, rtol=1e-5
    )
    counts = torch.zeros_like(logits)
    for _ in range(steps):
        draw = batch.sample(logits[rows])
        assert torch.allclose(draw.logprobs.double(), expected[rows, draw.ids].log(), atol=1e-4)
        assert torch.allclose(draw.raw_logprobs.double(), raw[rows, draw.ids], atol=1e-5)
        counts.index_put_((rows, draw.ids), torch.ones(len(rows)), accumulate=True)
    assert counts[2].argmax() == logits[2].argmax()
    assert counts[2].max() == draws
    for row in set(range(len(MIXES))) - {2}:
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
        ids, logprobs = batch.sample(logits)[:2]
        assert int(ids) >= 1000 - support
        assert float(logprobs) == pytest.approx(-math.log(support), abs=0.02)


def test_draws_depend_on_seed_and_count_only() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 200)
    alone = SamplingBatch([params()], [42], [0])
    want = [int(alone.sample(logits[2:3]).ids) for _ in range(20)]
    mixed = SamplingBatch(
        [params(top_k=2), params(), params(), MIXES[4]], [1, 2, 42, 4], [9, 8, 0, 7]
    )
    assert [int(mixed.sample(logits).ids[2]) for _ in range(20)] == want
    resumed = SamplingBatch([params()], [42], [12])
    assert [int(resumed.sample(logits[2:3]).ids) for _ in range(8)] == want[12:]
    other = SamplingBatch([params()], [43], [0])
    assert [int(other.sample(logits[2:3]).ids) for _ in range(20)] != want


KINDS = [
    *MIXES[:7],
    params(temperature=0.6, logprobs=3),
    params(temperature=0.0, logprobs=20),
    params(top_k=300, top_p=0.99, logprobs=1),
    params(top_p=0.999, min_p=0.001),
    params(repetition_penalty=1.4, temperature=1.3),
    params(presence_penalty=1.5, frequency_penalty=0.5, top_p=0.9, logprobs=5),
    params(logit_bias={3: 4.0, 5: -100.0}, temperature=0.0, frequency_penalty=1.0),
    params(min_tokens=3, stop_ids=(1, 2, 7), logit_bias={1: 6.0}, max_tokens=9),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Request:
    """One request with logits of its own; coarse ones, as bfloat16 has many equal logits."""

    STEPS = 4

    def __init__(self, seed: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params, self.seed = KINDS[seed % len(KINDS)], 1000 + seed
        self.logits = torch.randn(self.STEPS, vocab, generator=generator) * 3
        if seed % 2:
            self.logits = self.logits.bfloat16().float()
        self.prompt = torch.randint(0, vocab, (seed % 50,), generator=generator).tolist()
        self.output: list[int] = []
        self.seen: list[tuple[object, ...]] = []

    @property
    def drawn(self) -> int:
        return len(self.output)


def advance(requests: list[Request], steps: int) -> None:
    """`steps` tokens for each, in one batch."""
    batch = SamplingBatch(
        [r.params for r in requests],
        [r.seed for r in requests],
        [r.drawn for r in requests],
        [r.prompt for r in requests],
        [r.output for r in requests],
    )
    for _ in range(steps):
        logits = torch.stack([r.logits[r.drawn] for r in requests])
        dense = batch.distribution(logits)
        ids, logprobs, raw, alternatives = batch.sample(logits)
        for i, request in enumerate(requests):
            others = () if alternatives is None else alternatives[i]
            token, bits = int(ids[i]), (float(logprobs[i]), float(raw[i]))
            assert bits[0] == pytest.approx(math.log(dense[i, token]), abs=2e-6, rel=1e-6)
            request.output.append(token)
            request.seen.append((token, *bits, others))


@pytest.mark.parametrize("vocab", [31, 1025, 33_001])
@pytest.mark.usefixtures("two_threads")
def test_a_row_is_the_same_to_the_bit_in_every_batch(vocab: int) -> None:
    # Steps of 7 meet kinds and both sorts of logits in turn.
    seeds = range(2 * len(KINDS)) if vocab < 10_000 else range(0, 56, 7)
    alone = [Request(seed, vocab) for seed in seeds]
    for request in alone:
        for _ in range(Request.STEPS):
            advance([request], 1)
    generator = np.random.default_rng(vocab)
    for _ in range(4 if vocab < 10_000 else 1):
        mixed = [Request(seed, vocab) for seed in seeds]
        while pending := [r for r in mixed if r.drawn < Request.STEPS]:
            size = generator.integers(1, len(pending) + 1)
            chosen = [pending[i] for i in generator.permutation(len(pending))[:size]]
            advance(chosen, int(generator.integers(1, Request.STEPS + 1 - _furthest(chosen))))
        for one, other in zip(alone, mixed, strict=True):
            assert one.seen == other.seen, one.params


def _furthest(requests: list[Request]) -> int:
    return max(r.drawn for r in requests)


@pytest.mark.parametrize("width", [5, 1024, 1025, 5000, 12_800])
def test_two_level_search_finds_what_a_single_sum_finds(width: int) -> None:
    torch.manual_seed(2)
    probabilities = torch.softmax(torch.randn(40, width) * 4, -1)
    probabilities[:, ::3] = 0
    probabilities[7] = 0
    probabilities[7, -1] = 1
    draws = np.random.default_rng(2).random((40, 1))
    draws[:3, 0] = 0.0, 1 - 2.0**-52, 0.5
    ids = invert_cdf(probabilities, draws)
    cumulative = probabilities.double().cumsum(-1)
    cumulative /= cumulative[:, -1:]
    assert torch.all(probabilities.gather(-1, ids) > 0)
    # Sums of blocks are float32, so the two may differ by that much of the unit interval.
    upper = cumulative.gather(-1, ids)
    lower = upper - probabilities.gather(-1, ids) / probabilities.double().sum(-1, keepdim=True)
    where = torch.from_numpy(draws)
    assert torch.all((where > lower - 1e-6) & (where < upper + 1e-6))


def test_a_wide_tail_is_drawn_as_often_as_it_should() -> None:
    """Every token of a flat vocabulary, in whichever block, is as likely as any other."""
    vocab, n = 3000, 60_000
    numbers = (np.arange(n)[:, None] + 0.5) / n
    ids = torch.cat(
        [
            invert_cdf(torch.full((1, vocab), 1 / vocab).expand(6000, -1), part)
            for part in np.split(numbers, 10)
        ]
    )
    counts = ids.view(-1).bincount(minlength=vocab)
    assert counts.min() >= n // vocab - 1
    assert counts.max() <= n // vocab + 1


def test_raw_logprobs_and_alternatives_are_the_models_own() -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, 300) * 3
    raw = logits.double().log_softmax(-1)
    kinds = [
        params(temperature=3.0, logprobs=4),
        params(temperature=0.0, logit_bias={9: 100.0}, logprobs=2),
        params(top_k=2),
        params(logprobs=20),
    ]
    draw = SamplingBatch(kinds, [1, 2, 3, 4], [0] * 4).sample(logits)
    assert torch.allclose(draw.raw_logprobs.double(), raw[range(4), draw.ids], atol=1e-5)
    assert int(draw.ids[1]) == 9
    assert float(draw.logprobs[1]) == pytest.approx(0.0, abs=1e-6)
    assert float(draw.raw_logprobs[3]) == float(draw.logprobs[3])
    assert draw.alternatives is not None
    assert [len(row) for row in draw.alternatives] == [4, 2, 0, 20]
    for row, found in enumerate(draw.alternatives):
        values, ids = raw[row].topk(len(found))
        assert [i for i, _ in found] == ids.tolist()
        assert [p for _, p in found] == pytest.approx(values.tolist(), abs=1e-5)
    assert SamplingBatch(kinds[2:3], [3], [0]).sample(logits[2:3]).alternatives is None


def test_a_raw_logprob_below_what_float32_can_hold_is_exact() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 6] = -190.0
    bias = {i: 100.0 if i == 6 else -100.0 for i in range(40)}
    draw = SamplingBatch([params(logit_bias=bias)], [0], [0]).sample(logits)
    assert int(draw.ids) == 6
    assert float(draw.logprobs) == pytest.approx(-39 * math.exp(-10), rel=1e-2)
    assert float(draw.raw_logprobs) == pytest.approx(-190 - math.log(39))
    assert score_tokens(logits, [6])[0] == pytest.approx([-190 - math.log(39)])


def test_scored_tokens_have_the_logprobs_that_sampling_reports() -> None:
    torch.manual_seed(6)
    logits = torch.randn(5, 2000)
    draw = SamplingBatch([params(temperature=0.5, logprobs=3)] * 5, range(5), [0] * 5).sample(
        logits
    )
    logprobs, alternatives = score_tokens(logits, draw.ids.tolist(), alternatives=3)
    assert torch.tensor(logprobs).tolist() == draw.raw_logprobs.tolist()
    assert alternatives == draw.alternatives
    assert score_tokens(logits[:1], [4])[1] == [()]


def test_zero_probability_is_never_drawn_and_nan_is_visible() -> None:
    logits = torch.full((1, 64), -torch.inf)
    logits[0, 5] = 0.0
    batch = SamplingBatch([params()], [0], [0])
    for _ in range(50):
        ids, logprobs = batch.sample(logits)[:2]
        assert int(ids) == 5
        assert float(logprobs) == 0.0
    for vocab in (64, 2000):
        broken = torch.full((1, vocab), torch.nan)
        for p in (params(), params(temperature=0.0), params(top_p=0.5), params(temperature=2.0)):
            draw = SamplingBatch([p], [0], [0]).sample(broken)
            assert math.isnan(float(draw.logprobs))
            assert 0 <= int(draw.ids) < vocab


def test_logits_are_left_as_they_are() -> None:
    torch.manual_seed(8)
    logits = torch.randn(len(KINDS), 50)
    before: Tensor = logits.clone()
    empty: list[list[int]] = [[] for _ in KINDS]
    SamplingBatch(KINDS, range(len(KINDS)), [0] * len(KINDS), empty, empty).sample(logits)
    assert torch.equal(logits, before)
