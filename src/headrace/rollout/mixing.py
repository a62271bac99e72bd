"""Which problem comes next: tasks in their target ratios, and nothing that is held out.

Pure bookkeeping, deterministic, and small enough to be saved with every dispatch. It knows tasks by
name, a way to their instances and contents by hash; nothing of rollouts or rewards.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.rollout.curriculum import Curriculum
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

    What a task service says of contents is believed; that it names the same problem differently
    from one time to the next does not help it, as measured seeds are held out, too.

    Args:
        tasks: services by name.
        instances: what is measured, of any of these tasks.
    """

    def __init__(
        self, tasks: Mapping[str, TaskService], instances: Sequence[TaskInstance] = ()
    ) -> None:
        self._tasks = tasks
        self._seeds = frozenset((i.task, i.seed) for i in instances)
        self._contents = frozenset(map(self.content, instances))

    def __contains__(self, instance: TaskInstance) -> bool:
        """Whether the same problem is measured. May block while the problem is made."""
        return self.holds(instance, self.content(instance))

    def holds(self, instance: TaskInstance, content: str) -> bool:
        """Whether the problem is measured, when it is known what it asks."""
        # Contents count whatever the task: two tasks may well be one service with other options.
        return (instance.task, instance.seed) in self._seeds or self.shows(content)

    def shows(self, content: str) -> bool:
        """Whether a problem with this content is measured."""
        return content in self._contents

    def content(self, instance: TaskInstance) -> str:
        """Names what an instance asks. May block while the problem is made."""
        return self._tasks[instance.task].content_id(instance)

    def __len__(self) -> int:
        """Different problems."""
        return len(self._contents)

    @property
    def saved(self) -> dict[str, Any]:
        """What a later process needs of this set, as plain JSON-compatible values."""
        return {"seeds": sorted(self._seeds), "contents": sorted(self._contents)}

    def together_with(self, saved: Mapping[str, Any]) -> "HeldOut":
        """This set and one that was `saved`."""
        both = HeldOut(self._tasks)
        both._seeds = self._seeds | {(task, seed) for task, seed in saved["seeds"]}
        both._contents = self._contents | set(saved["contents"])
        return both


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
        curriculum: chooses among a task's instances; None takes them in order.

    Raises:
        ValueError: no task, a repeated one, or a ratio that is not above 0.
    """

    def __init__(
        self,
        shares: Sequence[TaskShare],
        *,
        state: Any = None,
        held_out: HeldOut | None = None,
        curriculum: Curriculum | None = None,
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
        self.curriculum = curriculum
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

    async def next(self) -> TaskInstance:
        """The instance of the next group. For one caller at a time.

        Raises:
            UserError: a task gives held-out instances only.
        """
        ahead = self.groups + 1
        name = max(self.ratios, key=lambda n: self.ratios[n] * ahead - self._groups[n])
        # Nothing is booked before it is found: others may save the state meanwhile.
        positions = itertools.count(self._positions[name])
        instance = await self._instance(name, positions)
        self._positions[name] = next(positions)
        self._groups[name] += 1
        return instance

    async def _instance(self, name: str, positions: Iterator[int]) -> TaskInstance:
        """An instance of a task that may train. Everything that is given out passes here."""

        def draw() -> TaskInstance:
            return self._shares[name].instance(next(positions))

        for _ in range(MOST_SKIPS):
            if self.curriculum is None:
                instance = draw()
            else:
                # Looking at many takes a while, and rollouts must not stand still for it.
                instance = await self.curriculum.choose(name, lambda: asyncio.to_thread(draw))
            held, content = await self._look(instance)
            if held:
                self.skipped[name] += 1
                if self.curriculum is not None:
                    self.curriculum.leave()
            elif self.curriculum is None or self.curriculum.take(instance, content):
                return instance
        raise UserError(
            f"task {name}: {MOST_SKIPS} training instances in a row are held out for evaluation; "
            "choose harder or more families, or fewer evaluation.instances"
        )

    async def _look(self, instance: TaskInstance) -> tuple[bool, str]:
        """Whether an instance is held out, and what it asks; "" where nobody says."""
        if self._held_out is None:
            return False, ""
        content = await asyncio.to_thread(self._held_out.content, instance)
        return self._held_out.holds(instance, content), content
