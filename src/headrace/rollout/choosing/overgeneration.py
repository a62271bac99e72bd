"""How many groups a batch may cost, and what becomes of a stage whose problems teach nothing.

Groups without signal are generated and dropped; this counts them against a bound. Pure
bookkeeping: it knows tasks by name and how their groups ended.
"""

from collections import deque
from typing import Literal

import msgspec

_REMEMBERED = 256


class OvergenerationConfig(msgspec.Struct, frozen=True):
    """Constants; see `headrace.recipe.DynamicTable`."""

    max_overgeneration: float | None = None
    when_exceeded: Literal["shrink", "fail"] = "shrink"


class Overgeneration:
    """Counts the groups that were generated for the batch to come.

    Args:
        config: constants.
        groups_per_batch: groups with signal a batch should have.
    """

    def __init__(self, config: OvergenerationConfig, groups_per_batch: int) -> None:
        self._limit = config.max_overgeneration
        self._shrinks = config.when_exceeded == "shrink"
        self._per_batch = groups_per_batch
        self._since_cut = 0
        # (task, signal, mean reward) of the last groups, for words.
        self._last: deque[tuple[str, bool, float]] = deque(maxlen=_REMEMBERED)

    def decided(self, task: str, signal: bool, mean_reward: float) -> None:
        """A group of valid rollouts was decided."""
        self._since_cut += 1
        self._last.append((task, signal, mean_reward))

    def cut(self) -> None:
        """A batch was cut; the next one may cost as much again."""
        self._since_cut = 0

    @property
    def exceeded(self) -> bool:
        """Whether the batch to come has cost as many groups as it may."""
        return self._limit is not None and self._since_cut >= self._limit * self._per_batch

    @property
    def shrunk(self) -> bool:
        """Whether a batch has to do with the groups that there are."""
        return self.exceeded and self._shrinks

    @property
    def failed(self) -> bool:
        """Whether the stage has to end."""
        return self.exceeded and not self._shrinks

    def explanation(self, stage: str, ready: int) -> str:
        """What is wrong and what helps, on one line; for when the bound is exceeded.

        Args:
            stage: name of the stage.
            ready: groups with signal that wait.
        """
        tasks: dict[str, list[tuple[bool, float]]] = {}
        for task, signal, mean in self._last:
            tasks.setdefault(task, []).append((signal, mean))
        words = []
        for task, groups in sorted(tasks.items(), key=lambda item: _share(item[1])):
            rate = sum(mean for _, mean in groups) / len(groups)
            told = sum(signal for signal, _ in groups)
            words.append(f"{task} {told} of {len(groups)} at a pass rate of {rate:.1%}")
        worst = min(tasks, key=lambda task: _share(tasks[task]), default="")
        rate = sum(mean for _, mean in tasks.get(worst, [])) / max(1, len(tasks.get(worst, [])))
        direction = "easier" if rate < 0.5 else "harder"
        return (
            f"stage {stage}: {self._since_cut} groups were generated and {ready} with signal wait "
            f"for a batch of {self._per_batch} (dynamic.max_overgeneration = "
            f"{self._limit or 0:g}); groups with signal among the last: {', '.join(words)}; make "
            f"{worst} {direction} ([tasks.{worst}], or levels and window in [stages.curriculum]), "
            "raise group_size, or lower groups_per_batch"
        )


def _share(groups: list[tuple[bool, float]]) -> float:
    return sum(signal for signal, _ in groups) / len(groups)
