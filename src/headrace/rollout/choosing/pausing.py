"""Which tasks of a stage may get rollouts now: one that fails again and again rests for a while.

A circuit breaker per task: after many environment failures in a row the task is paused; when the
pause ends it may try one group, and the first rollout that its environment carries through opens it
again. Pauses double. Pure bookkeeping over a clock; it knows tasks by name only.
"""

import time
from collections.abc import Callable, Iterable

import msgspec

FAILURES_IN_A_ROW = 32
"""So many environment failures of a task without one success in between pause it."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 120.0
GIVE_UP_S = 120.0
"""When no task of a stage has worked for so long, the stage ends with an error."""


class _Task(msgspec.Struct):
    """One task: failures in a row, when its pause ends (None: not paused), whether it tries."""

    failures: int = 0
    until: float | None = None
    trying: bool = False
    pause_s: float = FIRST_PAUSE_S
    pauses: int = 0
    last: str = ""


class TaskPauses:
    """The tasks of one stage.

    Args:
        names: of the tasks.
        failures: see FAILURES_IN_A_ROW.
        first_pause_s: seconds of the first pause; each further one is twice as long.
        longest_pause_s: the longest pause.
        give_up_s: see GIVE_UP_S.
        clock: seconds, never going back.
        report: told in words when a task is paused and when it works again.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        failures: int = FAILURES_IN_A_ROW,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        give_up_s: float = GIVE_UP_S,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._failures = failures
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._give_up_s = give_up_s
        self._clock = clock
        self._report = report
        self._tasks = {name: _Task(pause_s=first_pause_s) for name in names}
        self._none_since: float | None = None
        """Since when every task is paused; None while one is not."""

    @property
    def resting(self) -> frozenset[str]:
        """Tasks that may get no new group now."""
        now = self._clock()
        return frozenset(name for name, task in self._tasks.items() if _rests(task, now))

    @property
    def paused(self) -> frozenset[str]:
        """Tasks that have not worked since their last pause began."""
        return frozenset(name for name, task in self._tasks.items() if task.until is not None)

    def pauses(self, name: str) -> int:
        """How often a task was paused."""
        return self._tasks[name].pauses

    @property
    def next_try_s(self) -> float | None:
        """Seconds until the next pause ends, 0 when one has; None when none will."""
        ends = [t.until for t in self._tasks.values() if t.until is not None and not t.trying]
        return max(0.0, min(ends) - self._clock()) if ends else None

    @property
    def patience_s(self) -> float | None:
        """Seconds until there is a verdict unless a task works; None while one does."""
        if self._none_since is None:
            return None
        return max(0.0, self._none_since + self._give_up_s - self._clock())

    @property
    def verdict(self) -> str | None:
        """Why the stage cannot go on; None while it can."""
        if self.patience_s != 0.0:
            return None
        said = "; ".join(f"{name}: {task.last}" for name, task in self._tasks.items())
        return (
            f"no task has worked for {self._give_up_s:g} s, each ended {self._failures} or more "
            f"rollouts in a row with an environment failure, the last ones: {said}"
        )

    def dispatched(self, name: str) -> None:
        """A task got a group; a paused one has one try."""
        task = self._tasks[name]
        task.trying = task.until is not None

    def succeeded(self, name: str) -> None:
        """A rollout ended otherwise than by its environment."""
        task = self._tasks.get(name)
        if task is None:
            return  # a group from before a restart, of a task the stage no longer has
        was_paused = task.until is not None
        task.failures, task.until, task.trying = 0, None, False
        task.pause_s = self._first_pause_s
        self._none_since = None
        if was_paused:
            self._report(f"task {name} works again")

    def failed(self, name: str, reason: str) -> None:
        """A rollout ended with an environment failure."""
        task = self._tasks.get(name)
        if task is None:
            return
        task.failures += 1
        task.last = reason
        # Those still in flight when the pause began say nothing new.
        if task.trying or (task.until is None and task.failures >= self._failures):
            self._pause(name, task)

    def unavailable(self, name: str, reason: str) -> None:
        """A task could not even give an instance."""
        task = self._tasks[name]
        task.last = reason
        self._pause(name, task)

    def returned(self, name: str) -> None:
        """A task's service says that it is there again: a pause ends now, and the next one, should
        it come, is short again."""
        task = self._tasks.get(name)
        if task is not None and task.until is not None and not task.trying:
            task.until = self._clock()
            task.pause_s = self._first_pause_s

    def _pause(self, name: str, task: _Task) -> None:
        task.until = self._clock() + task.pause_s
        task.trying = False
        task.pauses += 1
        self._report(f"task {name} rests for {task.pause_s:.0f} s: {task.last}")
        task.pause_s = min(2 * task.pause_s, self._longest_pause_s)
        if self._none_since is None and len(self.paused) == len(self._tasks):
            self._none_since = self._clock()


def _rests(task: _Task, now: float) -> bool:
    return task.until is not None and (task.trying or now < task.until)
