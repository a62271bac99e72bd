"""What a rollout source did since somebody last looked: counts and sums, by task too.

Numbers only; who logs them and how often is not known here.
"""

from collections import Counter

import msgspec

from headrace.rollout.reasons import FailureReason


class TaskCounts(msgspec.Struct):
    """What one task did since the last look; counts and sums."""

    dispatched: int = 0
    """Groups."""
    finished: int = 0
    """Rollouts."""
    scored: int = 0
    reward_sum: float = 0.0
    trained: int = 0
    """Groups handed to the trainer."""


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
    retried: int = 0
    """Rollouts whose place was given to another session."""
    failures: Counter[FailureReason] = msgspec.field(default_factory=Counter)
    """Rollouts by everything that keeps them from being clean samples."""
    tasks: dict[str, TaskCounts] = msgspec.field(default_factory=dict)

    def of(self, task: str) -> TaskCounts:
        """The counts of one task, made on first use."""
        return self.tasks.setdefault(task, TaskCounts())
