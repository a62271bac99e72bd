"""What a task service may report at the end of a rollout, and what is wrong with what it may not.

Pure checks on values: whoever receives a result asks here before a reward can reach a baseline.
"""

import math
from typing import Any

import msgspec

from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult, TaskInstance

MOST_DETAIL_BYTES = 256 << 10
"""Size of a result's detail as JSON: it is kept for every rollout of a run."""
MOST_REASON = 2000
"""Characters of a reason."""
MOST_COMPONENTS = 64
"""Reward components."""
_SHOWN = 60


def storable(text: str) -> str:
    """`text` without lone surrogates: a model may spell them and file names hold them, but no
    report can."""
    return text.encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """A value as a message shows it: short, on one line, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, a list inside itself.
        text = f"a {type(value).__name__} that cannot be shown"
    text = " ".join(storable(text).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def difference(before: TaskInstance, now: TaskInstance) -> str | None:
    """The first field in which two instances of one seed differ, with both values; None if none."""
    for field in TaskInstance.__struct_fields__:
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            return f"instance.{field} of seed {before.seed} is {shown(new)}, it was {shown(old)}"
    return None


def problem_with(result: Any) -> str | None:
    """The first thing wrong with what a task service returned, or None.

    Names the field and its value: the outcome is one that a service can decide on, the rewards are
    finite numbers, "reward" lies in [0, 1] and is there when the outcome is scored, and reason and
    detail can be stored.

    Args:
        result: whatever came back; right is a `RolloutResult`.
    """
    if not isinstance(result, RolloutResult):
        return f"result is {shown(result)}; return a RolloutResult"
    outcome: Any = result.outcome
    if not isinstance(outcome, Outcome):
        return f"outcome is {shown(outcome)}; use an Outcome"
    if outcome is Outcome.CANCELLED:
        return "outcome is cancelled, which only the run decides; use env_failed"
    problem = problem_with_rewards(result.rewards)
    if problem is not None:
        return problem
    if outcome.scored and "reward" not in result.rewards:
        return f'rewards.reward is missing, but the outcome "{outcome}" is scored'
    return _problem_with_words(result)


def problem_with_rewards(rewards: Any) -> str | None:
    """The first thing wrong with reward components, or None; see `problem_with`."""
    if not isinstance(rewards, dict):
        return f"rewards is {shown(rewards)}; use numbers by name"
    if len(rewards) > MOST_COMPONENTS:
        return f"rewards has {len(rewards)} components; use at most {MOST_COMPONENTS}"
    for name, value in rewards.items():
        if not isinstance(name, str):
            return f"rewards has the key {shown(name)}; use texts"
        place = f"rewards.{name[:_SHOWN]}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{place} is {shown(value)}; use a number"
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            return f"{place} is {shown(value)}, which is not a finite number"
    reward = rewards.get("reward", 0.0)
    if not 0.0 <= reward <= 1.0:
        return f"rewards.reward is {shown(reward)}, which is not in [0, 1]"
    return None


def _problem_with_words(result: RolloutResult) -> str | None:
    """What keeps reason or detail from being stored."""
    reason: Any = result.reason
    if not isinstance(reason, str):
        return f"reason is {shown(reason)}; use a text"
    if len(reason) > MOST_REASON:
        return f"reason has {len(reason)} characters; use at most {MOST_REASON}"
    if not isinstance(result.detail, dict):
        return f"detail is {shown(result.detail)}; use a table"
    for name, value in (("reason", reason), ("detail", result.detail)):
        try:
            size = len(msgspec.json.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return f"{name} is {shown(value)}, which JSON cannot hold ({error})"
        if size > MOST_DETAIL_BYTES:
            return f"{name} has {size} bytes as JSON; use at most {MOST_DETAIL_BYTES}"
    return None
