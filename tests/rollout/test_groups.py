"""Group decisions: validity before baseline, the padding rule, and no signal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.types import DropReason, Outcome

SCORED = [outcome for outcome in Outcome if outcome.scored]
UNSCORED = [outcome for outcome in Outcome if not outcome.scored]
REWARDS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1e6, 1e6))


def ok(name, reward):
    return ScoredRollout(name, Outcome.OK, reward)


def broken(name):
    return ScoredRollout(name, Outcome.ENV_FAILED)


@st.composite
def groups(draw):
    size = draw(st.integers(1, 12))
    result = []
    for i in range(size):
        if draw(st.integers(0, 3)):
            result.append(ScoredRollout(f"s{i}", draw(st.sampled_from(SCORED)), draw(REWARDS)))
        else:
            # A misreported reward on an unscored rollout must not matter.
            reward = draw(st.one_of(st.none(), REWARDS))
            result.append(ScoredRollout(f"s{i}", draw(st.sampled_from(UNSCORED)), reward))
    return result


OPTIONS = st.fixed_dictionaries({"leave_one_out": st.booleans(), "normalise_std": st.booleans()})


def test_worked_example():
    decision = advantages([ok("a", 1.0), ok("b", 0.0), ok("c", 0.0), ok("d", 1.0)])
    assert decision.drop_reason is None
    assert decision.baseline == 0.5
    assert [(m.session_id, m.advantage, m.multiplicity) for m in decision.members] == [
        ("a", 0.5, 1),
        ("b", -0.5, 1),
        ("c", -0.5, 1),
        ("d", 0.5, 1),
    ]


def test_environment_failure_is_not_a_reward_of_zero():
    decision = advantages([ok("a", 1.0), ok("b", 0.5), ok("c", 0.0), broken("d")])
    assert decision.baseline == 0.5
    assert {m.session_id: m.advantage for m in decision.members} == {"a": 0.5, "b": 0.0, "c": -0.5}
    assert sum(m.multiplicity for m in decision.members) == 4
    assert decision.dropped == (("d", DropReason.ENV_FAILED),)


@pytest.mark.parametrize(("valid", "kept"), [(2, False), (3, True), (4, True)])
def test_exactly_half_is_not_enough(valid, kept):
    group = [ok(f"s{i}", float(i)) for i in range(valid)]
    group += [broken(f"x{i}") for i in range(4 - valid)]
    decision = advantages(group)
    assert (decision.drop_reason is None) is kept
    if not kept:
        assert decision.drop_reason is DropReason.GROUP_INVALID
        assert {reason for _, reason in decision.dropped} == {
            DropReason.GROUP_INVALID,
            DropReason.ENV_FAILED,
        }


def test_missing_members_count_as_invalid():
    assert advantages([ok("a", 0.0), ok("b", 1.0)]).drop_reason is None
    decision = advantages([ok("a", 0.0), ok("b", 1.0)], group_size=4)
    assert decision.drop_reason is DropReason.GROUP_INVALID


def test_equal_rewards_that_do_not_sum_exactly_give_no_signal():
    decision = advantages([ok(name, 0.1) for name in "abc"], normalise_std=True)
    assert decision.drop_reason is DropReason.NO_SIGNAL
    assert decision.members == ()


def test_leave_one_out_and_standard_deviation():
    group = [ok("a", 1.0), ok("b", 0.0), ok("c", 0.0)]
    loo = advantages(group, leave_one_out=True)
    assert [m.advantage for m in loo.members] == pytest.approx([1.0, -0.5, -0.5])
    std = advantages(group, normalise_std=True)
    deviation = math.sqrt(2 / 9)
    assert [m.advantage for m in std.members] == pytest.approx(
        [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation]
    )


@given(groups(), OPTIONS)
def test_every_rollout_ends_in_exactly_one_place(group, options):
    decision = advantages(group, **options)
    placed = [m.session_id for m in decision.members] + [name for name, _ in decision.dropped]
    assert sorted(placed) == sorted(r.session_id for r in group)
    assert bool(decision.members) is (decision.drop_reason is None)
    scored = {r.session_id for r in group if r.outcome.scored}
    assert {m.session_id for m in decision.members} <= scored
    own = {DropReason.ENV_FAILED, DropReason.CANCELLED}
    assert {name for name, reason in decision.dropped if reason in own} == {
        r.session_id for r in group if not r.outcome.scored
    }


@given(groups(), OPTIONS)
def test_padding_fills_the_group(group, options):
    decision = advantages(group, **options)
    if decision.members:
        assert sum(m.multiplicity for m in decision.members) == len(group)
        assert {m.multiplicity for m in decision.members} <= {1, 2}


@given(groups(), OPTIONS, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(group, options, random):
    shuffled = list(group)
    random.shuffle(shuffled)
    first, second = advantages(group, **options), advantages(shuffled, **options)
    assert {m.session_id: m for m in first.members} == {m.session_id: m for m in second.members}
    assert dict(first.dropped) == dict(second.dropped)


@given(groups(), OPTIONS)
def test_unscored_rollouts_never_move_an_advantage(group, options):
    valid = [r for r in group if r.outcome.scored]
    decision = advantages(group, **options)
    if decision.members:
        alone = advantages(valid, **options)
        assert [m.advantage for m in alone.members] == [m.advantage for m in decision.members]
        rewards = {r.session_id: r.reward for r in valid}
        for member in decision.members:
            reward = rewards[member.session_id]
            assert reward is not None
            assert member.advantage == 0 or (member.advantage > 0) is (reward > decision.baseline)


@given(groups())
def test_advantages_of_the_valid_sum_to_zero(group):
    decision = advantages(group)
    scale = max((abs(r.reward or 0.0) for r in group), default=1.0) + 1.0
    assert abs(math.fsum(m.advantage for m in decision.members)) <= 1e-12 * scale * len(group)


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        ([], {}, "at least one"),
        ([ok("a", 0.0), ok("a", 1.0)], {}, "twice"),
        ([ok("a", 0.0), ok("b", 1.0)], {"group_size": 1}, "group_size 1"),
        ([ScoredRollout("a", Outcome.TIMEOUT)], {}, "reward None"),
        ([ok("a", math.nan)], {}, "reward nan"),
    ],
)
def test_bad_input_is_refused(group, options, message):
    with pytest.raises(ValueError, match=message):
        advantages(group, **options)
