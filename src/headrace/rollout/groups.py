"""From the rewards of one group to advantages: who counts, against what baseline, how often.

Pure functions, no I/O. Validity is decided first, so that an environment failure can never move the
baseline (law L6); padding comes last and is a weight per rollout, never a copy of its tokens.
"""

import hashlib
import math
from collections.abc import Sequence

import msgspec

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import FailureRules, Rule, end_reason
from headrace.rollout.naming import first_name
from headrace.rollout.types import DropReason, Outcome


class ScoredRollout(msgspec.Struct, frozen=True):
    """What a group decision needs to know of one finished rollout.

    Attributes:
        session_id: which rollout.
        outcome: how it ended.
        reward: total reward; a finite number when `outcome.scored`, else ignored.
        failure: how it failed, if that was named.
    """

    session_id: str
    outcome: Outcome
    reward: float | None = None
    failure: FailureReason | None = None


class WeightedRollout(msgspec.Struct, frozen=True):
    """A rollout that trains.

    Attributes:
        session_id: which rollout.
        advantage: reward minus baseline, possibly normalised.
        multiplicity: how often it counts in the batch, >= 1; above 1 it pads for invalid siblings.
    """

    session_id: str
    advantage: float
    multiplicity: int


class GroupDecision(msgspec.Struct, frozen=True):
    """What becomes of a group. Every rollout is in exactly one of `members` and `dropped`.

    Attributes:
        members: rollouts that train, in the order given; empty when the group is dropped.
        dropped: rollouts that do not, with their reason, in the order given.
        drop_reason: why the whole group is dropped; None when it trains.
        baseline: mean reward of the valid rollouts; None when none is valid.
    """

    members: tuple[WeightedRollout, ...]
    dropped: tuple[tuple[str, DropReason], ...]
    drop_reason: DropReason | None
    baseline: float | None


def advantages(
    group: Sequence[ScoredRollout],
    *,
    group_size: int | None = None,
    leave_one_out: bool = False,
    normalise_std: bool = False,
    rules: FailureRules | None = None,
) -> GroupDecision:
    """Decide a finished group.

    1. Valid are the rollouts whose outcome is scored, unless a rule says otherwise; the others
       leave with their own reason. Those that a rule excludes make the group smaller, the others
       are padded for.
    2. If at most half of `group_size`, so reduced, is valid, the group is dropped (GROUP_INVALID).
    3. If all valid rewards are equal there is nothing to learn (NO_SIGNAL).
    4. Otherwise advantage = reward - mean of the valid rewards, and valid rollouts are repeated
       until the multiplicities sum to that size. Since more than half are valid none counts more
       than twice. Who repeats depends on session ids alone, neither on rewards nor on who finished
       first.

    Args:
        group: the rollouts of one instance, any order.
        group_size: how many rollouts the group was meant to have; default `len(group)`.
        leave_one_out: each rollout's baseline is the mean of the other valid ones (RLOO).
        normalise_std: divide by the population standard deviation of the valid rewards (GRPO).
        rules: what to do about failed rollouts; None is the default of each reason.

    Raises:
        ValueError: empty group, repeated session id, group_size below len(group), or a scored
            rollout without a finite reward.

    Source: GLM-5 (arXiv 2602.15763), section 4.1 (padding rule).
    """
    size = len(group) if group_size is None else group_size
    _check(group, size)
    standing = {r.session_id: _rule(r, rules or FailureRules()) for r in group}
    valid = [r for r in group if standing[r.session_id] is Rule.PENALISE]
    invalid = {
        r.session_id: _left_out(r) for r in group if standing[r.session_id] is not Rule.PENALISE
    }
    size -= sum(rule is Rule.EXCLUDE for rule in standing.values())

    def drop(reason: DropReason, baseline: float | None) -> GroupDecision:
        reasons = tuple((r.session_id, invalid.get(r.session_id, reason)) for r in group)
        return GroupDecision((), reasons, reason, baseline)

    rewards = [_reward(rollout) for rollout in valid]
    baseline = math.fsum(rewards) / len(rewards) if rewards else None
    if baseline is None or 2 * len(valid) <= size:
        return drop(DropReason.GROUP_INVALID, baseline)
    # Equality of rewards, not of advantages: rounding makes 0.1 differ from the mean of three 0.1.
    if min(rewards) == max(rewards):
        return drop(DropReason.NO_SIGNAL, baseline)

    centred = [reward - baseline for reward in rewards]
    if leave_one_out:
        # r - mean(others) = (r - mean(all)) * n / (n - 1); n >= 2 because two rewards differ.
        centred = [value * len(valid) / (len(valid) - 1) for value in centred]
    if normalise_std:
        deviation = math.sqrt(math.fsum((r - baseline) ** 2 for r in rewards) / len(rewards))
        if deviation == 0.0:  # squares of differences below 1e-162 vanish
            return drop(DropReason.NO_SIGNAL, baseline)
        centred = [value / deviation for value in centred]

    repeated = set(sorted((r.session_id for r in valid), key=_lot)[: size - len(valid)])
    members = tuple(
        WeightedRollout(rollout.session_id, value, 2 if rollout.session_id in repeated else 1)
        for rollout, value in zip(valid, centred, strict=True)
    )
    return GroupDecision(members, tuple(invalid.items()), None, baseline)


def judged(group: Sequence[ScoredRollout], *, rules: FailureRules | None = None) -> GroupDecision:
    """Decide a finished group whose tokens a teacher will judge: every valid rollout trains.

    Rewards play no part, so there is no baseline, no advantage (0) and nothing to pad.

    Args:
        group: as for `advantages`.
        rules: as for `advantages`.

    Raises:
        ValueError: empty group, or repeated session id.

    Source: GLM-5 (arXiv 2602.15763), section 3.5.
    """
    _check(group, len(group))
    counts = {r.session_id for r in group if _rule(r, rules or FailureRules()) is Rule.PENALISE}
    members = tuple(WeightedRollout(r.session_id, 0.0, 1) for r in group if r.session_id in counts)
    dropped = tuple((r.session_id, _left_out(r)) for r in group if r.session_id not in counts)
    return GroupDecision(members, dropped, None if members else DropReason.GROUP_INVALID, None)


def _rule(rollout: ScoredRollout, rules: FailureRules) -> Rule:
    """What is done about a rollout that is not attempted again; PENALISE for all that count."""
    reason = end_reason(rollout.outcome, rollout.failure)
    if rollout.outcome.scored:
        # Decided by what the record says, not by the rules alone: without a reward nothing counts.
        return Rule.PENALISE if reason is None else rules.last_rule(reason)
    rule = Rule.PAD if reason is None else rules.last_rule(reason)
    return Rule.PAD if rule is Rule.PENALISE else rule


def _left_out(rollout: ScoredRollout) -> DropReason:
    if rollout.outcome.scored:
        return DropReason.EXCLUDED
    return DropReason.ENV_FAILED if rollout.outcome is Outcome.ENV_FAILED else DropReason.CANCELLED


def _check(group: Sequence[ScoredRollout], size: int) -> None:
    if not group:
        raise ValueError("a group decision needs at least one rollout")
    if len({rollout.session_id for rollout in group}) != len(group):
        raise ValueError("a session id appears twice in one group")
    if size < len(group):
        raise ValueError(f"group_size {size} is below the {len(group)} rollouts of the group")


def _reward(rollout: ScoredRollout) -> float:
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise ValueError(
            f"rollout {rollout.session_id} ended {rollout.outcome} but has reward {rollout.reward}"
        )
    return rollout.reward


def _lot(session_id: str) -> tuple[bytes, str]:
    """A fixed pseudo-random rank, so that padding favours no position in the group."""
    # Of all its attempts: a crash must not change which one is padded with.
    name = first_name(session_id)
    return hashlib.blake2b(name.encode(), digest_size=8).digest(), session_id
