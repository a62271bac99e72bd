"""Shares stay a distribution between their bounds, move in steps, and end where rules say."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.choosing.ratios import (
    AdaptiveRatios,
    RatioRule,
    Rule,
    TaskBounds,
    TaskInterval,
    bounded,
    learnability,
    moved,
    progress,
    survival,
    wanted_shares,
)

RULES = ("success", "progress", "shortage")
WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5)


@st.composite
def bounds_of(draw):
    """Tasks with targets and floors and ceilings around them."""
    weights = draw(WEIGHTS)
    found = {}
    for number, weight in enumerate(weights):
        target = weight / sum(weights)
        floor = target * draw(st.floats(0.0, 1.0))
        found[f"t{number}"] = TaskBounds(
            target, floor, target + draw(st.floats(0, 1)) * (1 - target)
        )
    return found


def is_within(shares, bounds) -> bool:
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    return all(b.floor - 1e-9 <= shares[n] <= b.ceiling + 1e-9 for n, b in bounds.items())


@given(bounds_of(), st.data())
def test_the_nearest_distribution_within_bounds(bounds, data):
    parts = [data.draw(st.floats(0.0, 1.0)) for _ in bounds]
    wanted = {n: p / (sum(parts) or 1.0) for n, p in zip(bounds, parts, strict=True)}
    found = bounded(wanted, bounds)
    assert is_within(found, bounds)
    # Optimal: what is not at a bound was moved by one number, those at bounds wanted to go further.
    free = [found[n] - wanted[n] for n, b in bounds.items() if b.floor < found[n] < b.ceiling]
    for number in free:
        assert number == pytest.approx(free[0], abs=1e-9)
        for name, b in bounds.items():
            if b.ceiling - b.floor < 1e-9:  # at both bounds, whatever it wants
                continue
            if found[name] <= b.floor:
                assert found[name] - wanted[name] >= number - 1e-9
            elif found[name] >= b.ceiling:
                assert found[name] - wanted[name] <= number + 1e-9
    assert bounded(found, bounds) == pytest.approx(found)  # what is within stays


@given(bounds_of(), st.floats(0.001, 1.0), st.data())
def test_shares_move_straight_and_in_steps(bounds, step, data):
    pick = st.lists(st.floats(0.0, 1.0), min_size=len(bounds), max_size=len(bounds))
    current, goal = (
        bounded(dict(zip(bounds, data.draw(pick), strict=True)), bounds) for _ in range(2)
    )
    found = moved(current, goal, step)
    assert is_within(found, bounds)
    for name, share in found.items():
        assert abs(share - current[name]) <= step + 1e-12
        # Nearer to the goal on the same side of it, never past it.
        low, high = sorted((current[name], goal[name]))
        assert low - 1e-12 <= share <= high + 1e-12


@given(bounds_of(), st.sampled_from(RULES), st.integers(0, 20), st.integers(0, 30))
def test_tasks_that_are_alike_keep_the_recipes_ratios(bounds, rule, groups, lost):
    """And so does one about which nothing is known yet."""
    interval = TaskInterval(groups, 0.3 * groups, 0, 0)
    same = {name: [interval, interval] for name in bounds}
    targets = {name: bound.target for name, bound in bounds.items()}
    assert wanted_shares(RatioRule(rule), bounds, same) == pytest.approx(targets)
    ratios = AdaptiveRatios(RatioRule(rule, every=1), bounds)
    for _ in range(3):
        ratios.decided("t0", None, lost=False)
    assert ratios.shares == pytest.approx(targets)


@settings(max_examples=60, deadline=None)
@given(bounds_of(), st.sampled_from(RULES), st.floats(0.01, 0.3), st.integers(0, 2**32))
def test_whatever_happens_floors_hold_and_a_resume_goes_on(bounds, rule, step, seed):
    draw = random.Random(seed)
    settings = RatioRule(rule, step=step, every=3, window=4)
    ratios, names = AdaptiveRatios(settings, bounds), list(bounds)
    for number in range(60):
        before = dict(ratios.shares)
        name = draw.choice(names)
        event = draw.random()
        if event < 0.6:
            mean = draw.choice([None, draw.random()])
            ratios.decided(name, mean, lost=mean is None or draw.random() < 0.5)
        elif event < 0.9:
            ratios.trained(name, draw.randrange(4))
        else:
            ratios.lost(name, 1)
        assert is_within(ratios.shares, bounds)
        assert max(abs(ratios.shares[n] - before[n]) for n in names) <= step + 1e-9
        if number % 20 == 10:
            again = AdaptiveRatios(settings, bounds, state=ratios.state)
            # A share on its bound may move by a rounding when it is put within bounds again.
            assert again.state | {"shares": 0} == ratios.state | {"shares": 0}
            assert again.shares == pytest.approx(ratios.shares, abs=1e-12)
            ratios = again


def test_success_moves_weight_to_where_there_is_most_to_learn():
    assert [learnability(p, 0.2, 0.8) for p in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0, 1.1)] == (
        pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0])
    )
    assert learnability(1.0, 0.0, 1.0) == 1.0
    bounds = {n: TaskBounds(0.25, 0.05, 1.0) for n in ("hopeless", "hard", "right", "new")}
    ratios = AdaptiveRatios(RatioRule("success", step=0.1, every=3), bounds)
    for _ in range(40):
        ratios.decided("hopeless", 0.0, lost=True)
        ratios.decided("hard", 0.1, lost=False)
        ratios.decided("right", 0.6, lost=False)
    # 0 : 0.5 : 1 : 1 of what is wanted, then the floor of the first, taken from all alike.
    assert ratios.shares["hopeless"] == pytest.approx(0.05)
    assert ratios.shares["hard"] == pytest.approx(0.2 - 0.05 / 3)
    assert ratios.shares["right"] == ratios.shares["new"] == pytest.approx(0.4 - 0.05 / 3)


def test_progress_is_a_change_in_either_direction_beyond_noise():
    def history(*means: float, groups: int = 25):
        return [TaskInterval(groups, groups * m) for m in means]

    assert progress(history(0.5)) == 0.0
    assert progress(history(0.2, 0.2, 0.6, 0.6)) == progress(history(0.6, 0.6, 0.2, 0.2)) > 0.3
    assert progress(history(0.5, 0.5, 0.55, 0.55)) == 0.0  # one standard error is 0.1
    assert progress(history(0.5, 0.5, 0.55, 0.55, groups=2500)) == pytest.approx(0.04, abs=1e-3)
    bounds = {"a": TaskBounds(0.5, 0.1), "b": TaskBounds(0.5, 0.1)}
    wanted = wanted_shares(
        RatioRule("progress"), bounds, {"a": history(0.2, 0.6), "b": history(0.5, 0.5)}
    )
    assert wanted == {"a": 1.0, "b": 0.0}


def simulated(rule: Rule, *, delays, every, groups=1500):
    """Dispatch by shares; groups end `delays` dispatches later, and one in `every` trains.

    Returns:
        Shares of trained groups over the last half, and all shares of the first task.
    """
    bounds = {n: TaskBounds(1 / len(delays), 0.05, 1.0) for n in delays}
    ratios = AdaptiveRatios(RatioRule(rule), bounds)
    owed, ends, seen = dict.fromkeys(delays, 0.0), {}, []
    trained, ended = dict.fromkeys(delays, 0), dict.fromkeys(delays, 0)
    for now in range(groups):
        for name, share in ratios.shares.items():
            owed[name] += share
        chosen = max(owed, key=owed.__getitem__)
        owed[chosen] -= 1
        ends.setdefault(now + delays[chosen], []).append(chosen)
        for name in ends.pop(now, []):
            ended[name] += 1
            kept = ended[name] % every[name] == 0
            ratios.decided(name, 0.5, lost=not kept)
            if kept:
                ratios.trained(name, 1)
                trained[name] += now >= groups / 2
        seen.append(next(iter(ratios.shares.values())))
    return {n: c / sum(trained.values()) for n, c in trained.items()}, seen


@pytest.mark.parametrize("slow", [0, 60, 300])
def test_shortage_makes_trained_groups_meet_the_ratios(slow):
    """One task loses two groups of three, and the groups of another take long to come."""
    delays, every = {"lossy": 5, "slow": slow, "plain": 5}, {"lossy": 3, "slow": 1, "plain": 1}
    fixed, _ = simulated("fixed", delays=delays, every=every)
    assert fixed["lossy"] < 0.2
    found, shares = simulated("shortage", delays=delays, every=every)
    for name, share in found.items():
        assert share == pytest.approx(1 / 3, abs=0.02), name
    # It settles: what is left, around 0.6, is of the order of a group in a window.
    late = shares[len(shares) // 2 :]
    assert max(late) - min(late) < 0.06


def test_survival_is_cautious_about_little_evidence():
    assert survival([]) == 1.0
    assert survival([TaskInterval(ended=1)]) == pytest.approx(2 / 3)
    assert survival([TaskInterval(ended=200, trained=50)]) == pytest.approx(52 / 202)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"a": TaskBounds(0.5)},
        {"a": TaskBounds(0.5, 0.6), "b": TaskBounds(0.5)},
        {"a": TaskBounds(0.5, 0.1, 0.4), "b": TaskBounds(0.5)},
    ],
)
def test_bounds_that_contradict_each_other_are_refused(bounds):
    with pytest.raises(ValueError, match="between floor and ceiling"):
        AdaptiveRatios(RatioRule(), bounds)
