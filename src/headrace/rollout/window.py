"""What a rollout source did since somebody last looked: counts and sums, by task too.

Numbers only; who logs them and how often is not known here.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.groups import GroupDecision
from headrace.rollout.types import DropReason, Outcome, Session

_MOST_TIMES = 4096
"""Wall clocks kept of one task between two looks, the newest."""
_TOLD_BEFORE = (DropReason.ENV_FAILED, DropReason.CANCELLED)
"""Why rollouts leave a group that were counted as failed when they ended."""


class Hold(StrEnum):
    """Why a source dispatches nothing although it could."""

    CONCURRENCY = "concurrency"
    """As many rollouts as may be are in flight."""
    READY = "ready"
    """As many finished groups as may be wait for the trainer."""
    BATCH = "batch"
    """The groups of the coming batch are dispatched, and the mode goes no further ahead."""
    TASKS = "tasks"
    """Every task is at its limit, or rests because its environment fails."""
    STALENESS = "staleness"
    """So many groups are on their way that another would be too old when its turn came."""
    PUBLICATION = "publication"
    """Rollouts in flight have to end before new weights come."""


class HoldTimer:
    """Adds up how long a source was held back, by reason, and how many rollouts it kept back.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reason: Hold | None = None
        self._since = clock()
        self._slots = 0
        self._held: dict[Hold, float] = {}
        self._slot_s = 0.0

    def switch(self, reason: Hold | None, slots: int = 0) -> None:
        """From now on it is held for `reason`, and keeps so many rollouts back; None: it is not."""
        now = self._clock()
        if self._reason is not None:
            self._held[self._reason] = self._held.get(self._reason, 0.0) + now - self._since
            self._slot_s += self._slots * (now - self._since)
        self._reason, self._slots, self._since = reason, slots, now

    def take(self) -> dict[Hold, float]:
        """What was added up since the last call."""
        self.switch(self._reason, self._slots)
        held, self._held = self._held, {}
        return held

    def take_slot_s(self) -> float:
        """Rollouts kept back, times seconds, since the last call."""
        self.switch(self._reason, self._slots)
        slot_s, self._slot_s = self._slot_s, 0.0
        return slot_s


class TaskCounts(msgspec.Struct):
    """What one task did since the last look; counts and sums."""

    dispatched: int = 0
    """Groups."""
    finished: int = 0
    """Rollouts."""
    scored: int = 0
    reward_sum: float = 0.0
    env_failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    dropped: int = 0
    """Groups that will not train: without signal, invalid, or too old."""
    decided: int = 0
    """Groups with enough valid rollouts."""
    with_signal: int = 0
    """Those of them whose rewards differ."""
    trained: int = 0
    """Groups handed to the trainer."""
    seconds: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    """Wall clock of each rollout that finished."""

    def seconds_at(self, quantile: float) -> float | None:
        """Wall clock that this share of the rollouts did not exceed; None when none finished."""
        ordered = sorted(self.seconds)
        return ordered[round(quantile * (len(ordered) - 1))] if ordered else None


class Window(msgspec.Struct):
    """What happened since the last look; counts and sums."""

    finished: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    env_failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    groups: int = 0
    dropped_no_signal: int = 0
    dropped_invalid: int = 0
    dropped_stale: int = 0
    small_batches: int = 0
    """Batches with fewer groups than they should have, as others would have cost too much."""
    held: dict[Hold, float] = msgspec.field(default_factory=dict)
    """Seconds for which nothing was dispatched, by reason."""
    held_slot_s: float = 0.0
    """Rollouts that were kept back as they would have become too old, times seconds."""
    retried: int = 0
    """Rollouts whose place was given to another session."""
    failures: Counter[FailureReason] = msgspec.field(default_factory=Counter)
    """Rollouts by everything that keeps them from being clean samples."""
    tasks: dict[str, TaskCounts] = msgspec.field(default_factory=dict)

    def of(self, task: str) -> TaskCounts:
        """The counts of one task, made on first use."""
        return self.tasks.setdefault(task, TaskCounts())

    def decided(self, task: str, decision: GroupDecision) -> None:
        """A group is decided."""
        counts = self.of(task)
        self.groups += 1
        counts.dropped += not decision.members
        if decision.drop_reason is DropReason.NO_SIGNAL:
            self.dropped_no_signal += 1
        elif decision.drop_reason is DropReason.GROUP_INVALID:
            self.dropped_invalid += 1
        if decision.drop_reason is not DropReason.GROUP_INVALID:
            counts.decided += 1
            counts.with_signal += bool(decision.members)
        self.failures.update(
            FailureReason(why.value) for _, why in decision.dropped if why not in _TOLD_BEFORE
        )

    def stale(self, trajectories: int, groups: Mapping[str, int]) -> None:
        """So many trajectories, and of each task so many whole groups, became too old."""
        self.dropped_stale += trajectories
        self.failures[FailureReason.STALE] += trajectories
        for task, count in groups.items():
            self.of(task).dropped += count

    def count(self, session: Session, reward: float | None, wall_s: float) -> None:
        """A rollout finished."""
        turns = len(session.policy_calls)
        tokens = sum(len(call.output_ids) for call in session.policy_calls)
        task = self.of(session.task)
        task.seconds.append(wall_s)
        for counts in (self, task):
            counts.finished += 1
            counts.turns += turns
            counts.sampled_tokens += tokens
            counts.env_failed += session.outcome is Outcome.ENV_FAILED
            if reward is not None:
                counts.scored += 1
                counts.reward_sum += reward
