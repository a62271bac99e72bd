"""Which problem comes next: tasks in their target ratios, and nothing that is held out.

Pure bookkeeping, deterministic, and small enough to be saved with every dispatch. It knows tasks by
name, a way to their instances and contents by hash; nothing of rollouts or rewards. Where ratios
come from while they change is `ratios`' business.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.errors import UserError
from headrace.rollout.choosing.curriculum import Curriculum
from headrace.tasks.types import TaskInstance, TaskService

MOST_SKIPS = 1000
"""So many held-out instances in a row end the stage with an error."""
MOST_OWED = 32
"""Groups that a task may be behind and still get later. One that cannot take its share for long,
because it is at its limit, would else fill whole batches once it can."""


Answer = TypeVar("Answer")


class TaskShare(msgspec.Struct, frozen=True):
    """One task of a stage.

    Attributes:
        name: of the task service.
        ratio: share of the groups, relative to the other tasks'; above 0.
        instance: gives the training instance of position 0, 1, 2, ...
        concurrency: most rollouts of it in flight; None for no limit of its own.
        blocking: whether an instance, or what it asks, may take a while, and is found in a thread.
    """

    name: str
    ratio: float
    instance: Callable[[int], TaskInstance]
    concurrency: int | None = None
    blocking: bool = True


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


class _Account(msgspec.Struct, array_like=True):
    """What is kept of one task.

    Attributes:
        position: of its next instance.
        groups: given so far.
        wanted: how many it should have been given, by the ratios of each time.
        owed: how many of these it can still get; the sum over all tasks is 0.
        trained: groups that went to the trainer.
    """

    position: int = 0
    groups: int = 0
    wanted: float = 0.0
    owed: float = 0.0
    trained: int = 0


class TaskMix:
    """Gives the training instances of a stage, one per group.

    With each group every task earns its ratio of one, and the group goes to the task that is owed
    most, the first named one among equals. So with constant ratios, after n groups every task is
    within one group of n times its ratio where there are two tasks, and within a few where there
    are more; with ratios that change, of the sum of its ratios. A task that was passed over is
    owed at most `MOST_OWED` groups; what it would earn beyond goes to the others.

    Args:
        shares: the stage's tasks.
        state: what `state` was when an earlier process stopped, or a number of groups, as runs of
            one task kept it; None begins.
        held_out: instances that are skipped and counted; None skips nothing.
        curriculum: chooses among a task's instances; None takes them in order.

    Raises:
        ValueError: no task, a repeated one, or a ratio that is not above 0.

    Attributes:
        targets: the ratios asked for, as shares of 1.
        ratios: those that count now, see `retarget`.
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
        self.targets = {share.name: share.ratio / total for share in shares}
        self.ratios = dict(self.targets)
        self.skipped = dict.fromkeys(names, 0)
        """Held-out instances met by this process, by task."""
        self._shares = {share.name: share for share in shares}
        self._held_out = held_out
        self.curriculum = curriculum
        self._accounts = self._opened(state)

    def _opened(self, state: Any) -> dict[str, _Account]:
        """An account for every task, as an earlier process left it."""
        if isinstance(state, int):
            state = {next(iter(self._shares)): [state, state]}
        saved = {name: (state or {}).get(name, []) for name in self._shares}
        accounts = {n: msgspec.convert(values, _Account) for n, values in saved.items()}
        groups = sum(account.groups for account in accounts.values())
        if groups and all(len(values) <= 2 for values in saved.values()):  # of an older version
            for name, account in accounts.items():
                account.wanted = self.targets[name] * groups
                account.owed = account.wanted - account.groups
        return accounts

    @property
    def state(self) -> dict[str, list[float]]:
        """What has to be saved with a dispatch: by task, an `_Account`'s numbers in order."""
        return {name: msgspec.to_builtins(account) for name, account in self._accounts.items()}

    @property
    def groups(self) -> int:
        """Instances given so far, by earlier processes too."""
        return sum(account.groups for account in self._accounts.values())

    def limit(self, name: str) -> int | None:
        """Most rollouts of a task in flight; None for no limit of its own."""
        return self._shares[name].concurrency

    def share_of(self, name: str) -> float:
        """A task's part of all groups so far; its ratio while there are none."""
        groups = self.groups
        return self._accounts[name].groups / groups if groups else self.ratios[name]

    def wanted_share_of(self, name: str) -> float:
        """The mean of a task's ratios over all groups so far; its ratio while there are none."""
        groups = self.groups
        return self._accounts[name].wanted / groups if groups else self.ratios[name]

    def trained_share_of(self, name: str) -> float | None:
        """A task's part of all groups that went to the trainer; None while there are none."""
        trained = sum(account.trained for account in self._accounts.values())
        return self._accounts[name].trained / trained if trained else None

    def retarget(self, ratios: Mapping[str, float]) -> None:
        """From the next group on these ratios count.

        Args:
            ratios: of every task, >= 0, summing to 1.
        """
        self.ratios = {name: ratios[name] for name in self._shares}

    def trained(self, name: str, groups: int) -> None:
        """Groups of a task went to the trainer."""
        self._accounts[name].trained += groups

    def choose(self, full: Collection[str] = ()) -> str | None:
        """The task of the next group, if it is not one of `full`; None when all are."""
        earned = self._earned()
        free = [name for name in self._accounts if name not in full]
        return max(free, key=lambda n: self._accounts[n].owed + earned[n], default=None)

    async def next(self, name: str | None = None) -> TaskInstance:
        """The instance of the next group. For one caller at a time.

        Args:
            name: of its task, as `choose` named it; None chooses.

        Raises:
            UserError: a task gives held-out instances only.
            TaskUnavailable: its service cannot be asked now; nothing has changed.
        """
        name = name or self.choose()
        assert name is not None  # there is a task, and none is left out
        # Nothing is booked before it is found: others may save the state meanwhile.
        positions = itertools.count(self._accounts[name].position)
        instance = await self._instance(name, positions)
        self._give(name, next(positions))
        return instance

    async def _instance(self, name: str, positions: Iterator[int]) -> TaskInstance:
        """An instance of a task that may train. Everything that is given out passes here."""

        share, held_out, curriculum = self._shares[name], self._held_out, self.curriculum
        filtered = curriculum is not None and curriculum.filters
        contents: dict[int, str] = {}

        def draw(count: int) -> list[TaskInstance]:
            drawn = [share.instance(next(positions)) for _ in range(count)]
            if held_out is not None and not filtered:
                # It will be chosen, so what it asks is found in the same hop.
                contents.update((i.seed, held_out.content(i)) for i in drawn)
            return drawn

        def ask(count: int) -> Awaitable[list[TaskInstance]]:
            return self._ask(name, lambda: draw(count))

        for _ in range(MOST_SKIPS):
            if curriculum is not None:
                instance = await curriculum.choose(name, ask)
            else:
                (instance,) = draw(1) if held_out is None else await ask(1)
            held, content = await self._look(instance, contents.get(instance.seed))
            if held:
                self.skipped[name] += 1
                if curriculum is not None:
                    curriculum.leave()
            elif curriculum is None or curriculum.take(instance, content):
                return instance
        raise UserError(
            f"task {name}: {MOST_SKIPS} training instances in a row are held out for evaluation; "
            "choose harder or more families, or fewer evaluation.instances"
        )

    async def _look(self, instance: TaskInstance, content: str | None) -> tuple[bool, str]:
        """Whether an instance is held out, and what it asks; "" where nobody says.

        Args:
            content: what it asks, if that is known.
        """
        held_out = self._held_out
        if held_out is None:
            return False, ""
        if content is None:
            content = await self._ask(instance.task, lambda: held_out.content(instance))
        return held_out.holds(instance, content), content

    async def _ask(self, name: str, question: Callable[[], Answer]) -> Answer:
        """What a task says, in a thread if it may take a while: rollouts must not stand still.

        Otherwise at once: on a busy loop every hop costs more than such an answer, and the next
        group waits for it.
        """
        share = self._shares.get(name)
        if share is not None and not share.blocking:
            return question()
        return await asyncio.to_thread(question)

    def _give(self, name: str, position: int) -> None:
        """Book a group; the task goes on at `position`."""
        for other, earned in self._earned().items():
            self._accounts[other].wanted += self.ratios[other]
            self._accounts[other].owed += earned
        self._accounts[name].position = position
        self._accounts[name].groups += 1
        self._accounts[name].owed -= 1.0

    def _earned(self) -> dict[str, float]:
        """What each task earns with the next group: 1 in all, nothing for those owed most."""
        earning = {n: r for n, r in self.ratios.items() if self._accounts[n].owed < MOST_OWED}
        total = sum(earning.values())
        if total <= 0.0:  # the only ones with a ratio are owed most
            earning, total = self.ratios, 1.0
        return {name: earning.get(name, 0.0) / total for name in self._accounts}
