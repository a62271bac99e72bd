"""Which problem comes next: tasks in their target ratios, and nothing that is held out.

Pure bookkeeping, deterministic, and small enough to be saved with every dispatch. It knows tasks by
name, a way to their instances and contents by hash; nothing of rollouts or rewards.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.tasks.types import TaskInstance, TaskService

MOST_SKIPS = 1000
"""So many held-out instances in a row end the stage with an error."""


class TaskShare(msgspec.Struct, frozen=True):
    """One task of a stage.

    Attributes:
        name: of the task service.
        ratio: share of the groups, relative to the other tasks'; above 0.
        instance: gives the training instance of position 0, 1, 2, ...
    """

    name: str
    ratio: float
    instance: Callable[[int], TaskInstance]


class HeldOut:
    """Problems that are measured on and therefore never trained on, whatever their seeds.

    Args:
        tasks: services by name.
        instances: what is measured, of any of these tasks.
    """

    def __init__(
        self, tasks: Mapping[str, TaskService], instances: Sequence[TaskInstance] = ()
    ) -> None:
        self._tasks = tasks
        self._contents = frozenset(map(self._content, instances))

    def __contains__(self, instance: TaskInstance) -> bool:
        """Whether the same problem is measured. May block while the problem is made."""
        return bool(self._contents) and self._content(instance) in self._contents

    def _content(self, instance: TaskInstance) -> str:
        return self._tasks[instance.task].content_id(instance)


class TaskMix:
    """Gives the training instances of a stage, one per group.

    The next group goes to the task that is furthest behind its ratio of all groups so far, the
    first named one among equals. So after n groups every task is within one group of n times its
    ratio where there are two tasks, and within a few where there are more.

    Args:
        shares: the stage's tasks.
        state: what `state` was when an earlier process stopped, or a number of groups, as runs of
            one task kept it; None begins.
        held_out: instances that are skipped and counted; None skips nothing.

    Raises:
        ValueError: no task, a repeated one, or a ratio that is not above 0.
    """

    def __init__(
        self,
        shares: Sequence[TaskShare],
        *,
        state: Any = None,
        held_out: HeldOut | None = None,
    ) -> None:
        names = [share.name for share in shares]
        if not names or len(set(names)) != len(names) or any(s.ratio <= 0 for s in shares):
            raise ValueError(f"TaskMix: tasks {names} need different names and ratios above 0")
        total = sum(share.ratio for share in shares)
        self.ratios = {share.name: share.ratio / total for share in shares}
        self.skipped = dict.fromkeys(names, 0)
        """Held-out instances met by this process, by task."""
        self._shares = {share.name: share for share in shares}
        self._held_out = held_out
        if isinstance(state, int):
            state = {names[0]: [state, state]}
        saved = state or {}
        self._positions = {name: saved.get(name, (0, 0))[0] for name in names}
        self._groups = {name: saved.get(name, (0, 0))[1] for name in names}

    @property
    def state(self) -> dict[str, list[int]]:
        """What has to be saved with a dispatch: by task, its next position and its groups."""
        return {name: [self._positions[name], self._groups[name]] for name in self._shares}

    @property
    def groups(self) -> int:
        """Instances given so far, by earlier processes too."""
        return sum(self._groups.values())

    def share_of(self, name: str) -> float:
        """A task's part of all groups so far; its ratio while there are none."""
        return self._groups[name] / self.groups if self.groups else self.ratios[name]

    def due(self, without: Collection[str] = ()) -> str | None:
        """The task of the next group among those not in `without`; None when there is none."""
        ahead = self.groups + 1
        names = [name for name in self.ratios if name not in without]
        return max(names, key=lambda n: self.ratios[n] * ahead - self._groups[n], default=None)

    async def next(self, name: str | None = None) -> TaskInstance:
        """The instance of the next group. For one caller at a time.

        Args:
            name: of its task; by default the one that is due.

        Raises:
            UserError: a task gives held-out instances only.
            TaskUnavailable: its service cannot be asked now; nothing has changed.
        """
        name = name or self.due()
        assert name is not None, "there is a task"
        for _ in range(MOST_SKIPS):
            if self._held_out is None:
                instance, held_out = self._look(name)
            else:
                # Making a problem may take a while, and rollouts must not stand still for it.
                instance, held_out = await asyncio.to_thread(self._look, name)
            self._positions[name] += 1
            if not held_out:
                self._groups[name] += 1
                return instance
            self.skipped[name] += 1
        raise UserError(
            f"task {name}: {MOST_SKIPS} training instances in a row are held out for evaluation; "
            "choose harder or more families, or fewer evaluation.instances"
        )

    def _look(self, name: str) -> tuple[TaskInstance, bool]:
        """The next instance of a task, and whether it is held out."""
        instance = self._shares[name].instance(self._positions[name])
        return instance, self._held_out is not None and instance in self._held_out
