"""Pass rates: right distributions, honest uncertainty, and evidence that fades."""

import math
import statistics
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.rollout.choosing.difficulty import (
    FIRST_CORRELATION,
    MOST_INSTANCES,
    Beta,
    Difficulty,
    DifficultyState,
    kind_key,
    split_key,
)

HALF = 200.0


def brute_force(a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Grid and distribution function of a Beta, by summing its density."""
    x = (np.arange(200_000) + 0.5) / 200_000
    log = (a - 1) * np.log(x) + (b - 1) * np.log1p(-x)
    density = np.exp(log - log.max())
    return x, np.cumsum(density) / density.sum()


@pytest.mark.parametrize(
    ("a", "b"), [(1, 1), (1, 9), (9.5, 1), (3.3, 4.7), (40, 2.2), (250, 700), (1.01, 500)]
)
def test_distribution_and_quantiles_equal_brute_force(a, b):
    x, below = brute_force(a, b)
    rate = Beta(a, b)
    for q in (0.001, 0.05, 0.1, 0.5, 0.9, 0.95, 0.999):
        expected = float(x[np.searchsorted(below, q)])
        assert rate.quantile(q) == pytest.approx(expected, abs=2e-5)
        assert rate.below(expected) == pytest.approx(q, abs=2e-3)
    assert rate.mean == pytest.approx(a / (a + b))
    low, high = rate.interval(0.9)
    assert rate.below(high) - rate.below(low) == pytest.approx(0.9, abs=1e-9)


@given(st.floats(1.0, 3000.0), st.floats(1.0, 3000.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@example(1.0, 3000.0, 1.0, 0.0)
@example(3000.0, 1.0, 1e-300, 1.0)
def test_distribution_is_monotonic_within_bounds_and_mirrors(a, b, x, y):
    rate = Beta(a, b)
    low, high = sorted((x, y))
    assert 0.0 <= rate.below(low) <= rate.below(high) + 1e-12 <= 1.0 + 1e-12
    assert rate.below(x) == pytest.approx(1.0 - Beta(b, a).below(1.0 - x), abs=1e-9)


def test_nothing_is_known_at_first():
    difficulty = Difficulty(HALF)
    assert difficulty.of_kind("t", "f", 1) == Beta(1.0, 1.0)
    assert difficulty.of_level("t", 1) is None
    assert difficulty.of_instance("t", "f", 1, "c") is None
    assert difficulty.correlation("t") == FIRST_CORRELATION
    difficulty.observe("t", "f", 1, [])  # a group without a valid rollout tells nothing
    assert difficulty.of_kind("t", "f", 1) == Beta(1.0, 1.0)
    with pytest.raises(ValueError, match="half_life"):
        Difficulty(0.0)


def test_evidence_fades_by_half_and_returns_to_not_knowing():
    difficulty = Difficulty(10.0)
    difficulty.observe("t", "hard", 3, [0.0])
    fresh = difficulty.of_kind("t", "hard", 3)
    for _ in range(10):
        difficulty.observe("t", "easy", 1, [1.0])
    later = difficulty.of_kind("t", "hard", 3)
    assert later.b - 1.0 == pytest.approx((fresh.b - 1.0) / 2)
    # Another task's groups are no time that passes for this one.
    difficulty.observe("other", "f", 1, [1.0])
    assert difficulty.of_kind("t", "hard", 3) == later
    for _ in range(20_000):  # until nothing is left that a number could tell from 0
        difficulty.observe("t", "easy", 1, [1.0])
    assert difficulty.of_kind("t", "hard", 3) == Beta(1.0, 1.0)
    difficulty.observe("t", "hard", 3, [1.0] * 8)
    assert difficulty.of_kind("t", "hard", 3).mean > 0.6


def test_estimates_follow_a_model_that_learns():
    rng, difficulty = Random(3), Difficulty(20.0)
    for p in (0.1, 0.9):
        for _ in range(120):
            difficulty.observe("t", "f", 1, [float(rng.random() < p) for _ in range(8)])
        low, high = difficulty.of_kind("t", "f", 1).interval(0.99)
        assert low < p < high
        assert high - low < 0.3


@pytest.mark.parametrize(("correlation", "tolerance"), [(0.0, 0.06), (0.3, 0.12), (0.8, 0.12)])
def test_likeness_of_a_groups_rollouts_is_found(correlation, tolerance):
    """Problems' pass rates are drawn from the Beta that gives this intraclass correlation."""
    rng, found = Random(5), []
    for _ in range(5):
        difficulty = Difficulty(300.0)
        for group in range(400):
            mean = (0.3, 0.6)[group % 2]
            p = mean
            if correlation:
                total = (1 - correlation) / correlation
                p = rng.betavariate(mean * total, (1 - mean) * total)
            rewards = [float(rng.random() < p) for _ in range(8)]
            difficulty.observe("t", f"f{group % 2}", 1, rewards)
        found.append(difficulty.correlation("t"))
    assert statistics.mean(found) == pytest.approx(correlation, abs=tolerance)


def test_intervals_hold_what_they_promise_where_problems_differ():
    """Coverage of the 90% interval of a kind's pass rate; eight rollouts of one problem that
    counted as eight problems would give far less."""
    rng, covered, naive, trials = Random(11), 0, 0, 120
    for _ in range(trials):
        mean, total = rng.uniform(0.2, 0.8), 1.5
        difficulty = Difficulty(1e9)
        hits = count = 0.0
        for _ in range(40):
            p = rng.betavariate(mean * total, (1 - mean) * total)
            rewards = [float(rng.random() < p) for _ in range(8)]
            difficulty.observe("t", "f", 1, rewards)
            hits, count = hits + sum(rewards), count + 8
        low, high = difficulty.of_kind("t", "f", 1).interval(0.9)
        covered += low <= mean <= high
        low, high = Beta(1 + hits, 1 + count - hits).interval(0.9)
        naive += low <= mean <= high
    assert covered / trials > 0.83
    assert naive / trials < 0.7


def test_a_problem_begins_at_its_kind_and_leaves_it_with_its_own_evidence():
    difficulty = Difficulty(1e9)
    for number in range(20):
        difficulty.observe("t", "f", 1, [1.0, 0.0] * 4, f"other {number}")
    difficulty.observe("t", "f", 1, [0.0] * 8, "c")
    once = difficulty.of_instance("t", "f", 1, "c")
    assert once is not None
    assert once.mean < difficulty.of_kind("t", "f", 1).mean
    for _ in range(4):
        difficulty.observe("t", "f", 1, [0.0] * 8, "c")
    often = difficulty.of_instance("t", "f", 1, "c")
    assert often is not None
    assert often.mean < once.mean
    assert often.below(0.4) > once.below(0.4)


def test_a_level_weighs_its_families_alike_however_often_they_came():
    difficulty = Difficulty(1e9)
    for _ in range(30):
        difficulty.observe("t", "often", 1, [1.0] * 8)
    difficulty.observe("t", "rare", 1, [0.0] * 8)
    level = difficulty.of_level("t", 1)
    assert level is not None
    often, rare = (difficulty.of_kind("t", f, 1) for f in ("often", "rare"))
    assert level.mean == pytest.approx((often.mean + rare.mean) / 2)
    assert level.variance == pytest.approx((often.variance + rare.variance) / 4)
    assert difficulty.levels("t") == [1]


def test_rewards_outside_the_unit_interval_count_as_its_edges():
    difficulty = Difficulty(HALF)
    difficulty.observe("t", "f", 1, [7.0, -3.0])
    assert difficulty.of_kind("t", "f", 1).mean == pytest.approx(0.5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b\u00e9"]),
            st.sampled_from(["f", "g\th"]),
            st.integers(0, 3),
            st.lists(st.sampled_from([0.0, 0.25, 1.0]), max_size=4),
            st.sampled_from(["", "c", "d"]),
        ),
        max_size=30,
    ),
    st.integers(0, 30),
)
def test_a_saved_state_goes_on_to_the_bit(events, cut):
    whole, first = Difficulty(7.0), Difficulty(7.0)
    for event in events:
        whole.observe(*event)
    for event in events[:cut]:
        first.observe(*event)
    text = msgspec.json.encode(first.state)
    second = Difficulty(7.0, msgspec.json.decode(text, type=DifficultyState))
    for event in events[cut:]:
        second.observe(*event)
    assert second.state == whole.state
    for evidence in whole.state.kinds.values():
        for value in (evidence.successes, evidence.failures):
            assert 0 <= value < math.inf


def test_single_problems_are_remembered_up_to_a_bound_newest_last():
    difficulty = Difficulty(HALF)
    for number in range(MOST_INSTANCES + 5):
        difficulty.observe("t", "f", 1, [1.0], f"c{number}")
        difficulty.observe("t", "f", 1, [1.0], "kept alive")
    assert len(difficulty.state.instances) == MOST_INSTANCES
    assert difficulty.of_instance("t", "f", 1, "kept alive") is not None
    assert difficulty.of_instance("t", "f", 1, "c0") is None
    assert split_key(kind_key("t", "a\tb", 2)) == ("t", 2, "a\tb")
