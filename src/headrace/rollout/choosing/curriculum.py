"""Which problems of a task are worth attempting now, by what is known of their difficulty.

A group without signal is generated for nothing, so problems that the model surely solves, or surely
does not, are passed over, except for a share that keeps estimates fresh. Pure policy: problems come
from a function, rewards are told, and all that is remembered can be saved. It knows nothing of
rollouts, and what is held out is kept from training elsewhere.
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, Literal

import msgspec

from headrace.rollout.choosing.difficulty import Beta, Difficulty, DifficultyState
from headrace.tasks.types import TaskInstance

MOST_LOOKS = 256
"""Problems looked at for one group; when none is worth it, the first of them is attempted."""
MOST_REFUSALS = 32
"""Problems in a row refused for their own estimate, which ends small tasks' choice."""
MOST_WAITING = 256
"""Unsolved problems kept for another try; the oldest is given up when there are more."""
MOST_TRIES = 4
"""Groups that an unsolved problem gets in all."""
_MOST_OPEN = 4096

Draw = Callable[[int], Awaitable[Sequence[TaskInstance]]]
"""Gives the next problems of a task, so many, in the task's own order."""


class CurriculumConfig(msgspec.Struct, frozen=True):
    """Constants; see `headrace.recipe.CurriculumTable`, whose keys these are."""

    sampling: Literal["uniform", "window", "thompson"] = "uniform"
    window: tuple[float, float] = (0.1, 0.9)
    confidence: float = 0.9
    target: float = 0.5
    candidates: int = 8
    explore: float = 0.05
    half_life: float = 200.0
    start_level: int | None = None
    promote_at: float = 0.7
    repeat_share: float = 0.0
    repeat_after: int = 64


class _Waiting(msgspec.Struct):
    """An unsolved problem and the group of its task from which it may be tried again."""

    instance: TaskInstance
    content: str
    due: int


class CurriculumState(msgspec.Struct):
    """What has to be saved when a problem is given out, JSON-compatible through msgspec.

    Attributes:
        choices: problems given out, by task; the randomness of the next choice is made of it.
        level: highest level unlocked, by task with levels.
        top: highest level met, by task.
        waiting: unsolved problems.
        open: content ids of problems given out and not yet decided, by `_name`.
    """

    choices: dict[str, int] = {}
    level: dict[str, int] = {}
    top: dict[str, int] = {}
    waiting: list[_Waiting] = []
    open: dict[str, str] = {}


class Curriculum:
    """Chooses problems and learns from how they went. For one caller at a time.

    Args:
        config: constants.
        seed: of the recipe; equal histories and seeds choose the same.
        choices: what `save` kept under `choices_key`; None begins.
        difficulty: what it kept under `difficulty_key`.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        *,
        seed: int = 0,
        choices: Any = None,
        difficulty: Any = None,
    ) -> None:
        self.config = config
        self._seed = seed
        # Estimates of single problems are kept where something asks for them.
        self._remembers = config.sampling != "uniform" or config.repeat_share > 0.0
        self.state = msgspec.convert(choices or {}, CurriculumState)
        self.difficulty = Difficulty(
            config.half_life, msgspec.convert(difficulty or {}, DifficultyState)
        )
        self.counts: dict[str, Counter[str]] = {}
        """What happened since `metrics` looked, by task; see there."""
        self._repeating: _Waiting | None = None
        self._how = ""  # the last choice came about, as it is counted
        self._attempt = 0
        self._refused = 0

    # -- choosing ---------------------------------------------------------------------------

    async def choose(self, task: str, draw: Draw) -> TaskInstance:
        """A problem of `task` to attempt next.

        Args:
            task: its name.
            draw: asked for no more problems than are looked at.
        """
        # Nothing but what is idempotent is remembered before `take`, as a crash may come first.
        number = self.state.choices.get(task, 0)
        rng = Random(f"curriculum {self._seed} {task} {number} {self._attempt}")
        self._attempt += 1
        self._repeating = None
        if rng.random() < self.config.repeat_share and (waiting := self._due(task)):
            self._repeating, self._how = waiting, "repeated"
            return waiting.instance
        if not self.filters or rng.random() < self.config.explore:
            self._how = "explored" if self.filters else "in_order"
            (instance,) = await draw(1)
            return self._met(instance)
        return await self._filtered(task, draw, rng)

    @property
    def filters(self) -> bool:
        """Whether problems that are drawn may be passed over for their kind."""
        return self.config.sampling != "uniform" or self.config.start_level is not None

    async def _filtered(self, task: str, draw: Draw, rng: Random) -> TaskInstance:
        wanted = self.config.candidates if self.config.sampling == "thompson" else 1
        first: TaskInstance | None = None
        admitted: list[TaskInstance] = []
        levels: set[int] = set()
        looks = 0
        while len(admitted) < wanted and looks < MOST_LOOKS:
            drawn = await draw(min(wanted - len(admitted), MOST_LOOKS - looks))
            looks += len(drawn)
            for instance in map(self._met, drawn):
                levels.add(instance.level)
                reason = self._reason(instance)
                if reason is None:
                    admitted.append(instance)
                else:
                    first = first or instance
                    self._count(task, f"skipped.{reason}")
        if not admitted:
            assert first is not None  # at least one was looked at
            self._how = "none_suitable"
            if self.config.start_level is not None and min(levels) > self._level(task):
                # The task has none that easy; a level that nothing is of would lock for ever.
                self.state.level[task] = min(levels)
            return first
        chosen = self._nearest(admitted, rng)
        if len(admitted) > 1:
            self._count(task, "skipped.passed_over", len(admitted) - 1)
        self._how = "chosen"
        return chosen

    def _met(self, instance: TaskInstance) -> TaskInstance:
        top = self.state.top.get(instance.task, instance.level)
        self.state.top[instance.task] = max(top, instance.level)
        return instance

    def _level(self, task: str) -> int:
        start = self.config.start_level
        assert start is not None
        return self.state.level.get(task, start)

    def _reason(self, instance: TaskInstance) -> str | None:
        """Why a problem is skipped for its kind; None when it is not."""
        config = self.config
        if config.start_level is not None and instance.level > self._level(instance.task):
            return "locked"
        if config.sampling == "uniform":
            return None
        return self._outside(
            self.difficulty.of_kind(instance.task, instance.family, instance.level)
        )

    def _outside(self, rate: Beta) -> str | None:
        """Which side of the window a pass rate surely is on, if any."""
        low, high = self.config.window
        if rate.below(low) >= self.config.confidence:
            return "too_hard"
        if 1.0 - rate.below(high) >= self.config.confidence:
            return "too_easy"
        return None

    def _nearest(self, admitted: Sequence[TaskInstance], rng: Random) -> TaskInstance:
        """The candidate whose kind's pass rate, drawn from what is known, is nearest the target.

        Kinds of which little is known are drawn from all over the place and therefore get tried;
        the better they are known the more often the useful ones win (Thompson 1933).
        """
        drawn: dict[tuple[str, int], float] = {}
        for instance in admitted:
            kind = (instance.family, instance.level)
            if kind not in drawn:
                rate = self.difficulty.of_kind(instance.task, *kind)
                drawn[kind] = abs(rng.betavariate(rate.a, rate.b) - self.config.target)
        return min(admitted, key=lambda i: drawn[(i.family, i.level)])

    def _due(self, task: str) -> _Waiting | None:
        now = self.difficulty.state.decided.get(task, 0)
        ready = (w for w in self.state.waiting if w.instance.task == task and w.due <= now)
        return next(ready, None)

    def take(self, instance: TaskInstance, content: str) -> bool:
        """Whether a chosen problem is really given out, now that it is known what it asks.

        Args:
            instance: what `choose` returned last.
            content: names what is asked; problems of different seeds may share it.
        """
        task = instance.task
        if self._repeating is None and (reason := self._known(instance, content)) is not None:
            self._refused += 1
            self._count(task, f"skipped.seen_{reason}")
            return False
        self.leave()
        self._attempt = self._refused = 0
        self._count(task, self._how)
        self.state.choices[task] = self.state.choices.get(task, 0) + 1
        if self._remembers:
            self.state.open[_name(instance)] = content
        while len(self.state.open) > _MOST_OPEN:  # of groups that were never decided
            self.state.open.pop(next(iter(self.state.open)))
        return True

    def leave(self) -> None:
        """The last choice is not to be made again, e.g. because it must not train."""
        if self._repeating is not None:
            self.state.waiting = [w for w in self.state.waiting if w is not self._repeating]
            self._repeating = None

    def _known(self, instance: TaskInstance, content: str) -> str | None:
        """Why a problem is skipped for what is known of itself, if it is."""
        if self.config.sampling == "uniform" or self._refused >= MOST_REFUSALS:
            return None
        rate = self.difficulty.of_instance(instance.task, instance.family, instance.level, content)
        return None if rate is None else self._outside(rate)

    # -- learning ---------------------------------------------------------------------------

    def observe(self, instance: TaskInstance, rewards: Sequence[float]) -> None:
        """A group was decided.

        Args:
            instance: what it attempted.
            rewards: of its valid rollouts, any number.
        """
        task = instance.task
        content = self.state.open.pop(_name(instance), "")
        self.difficulty.observe(task, instance.family, instance.level, rewards, content)
        if rewards and max(rewards) <= 0.0:
            self._keep(instance, content)
        if self.config.start_level is not None:
            self._promote(task)

    def _keep(self, instance: TaskInstance, content: str) -> None:
        """Remember an unsolved problem for later."""
        if not content or self.config.repeat_share == 0.0:
            return
        waiting = self.state.waiting
        own = self.difficulty.state.instances[content]
        if own.groups >= MOST_TRIES:
            self._count(instance.task, "given_up")
        elif all(w.content != content for w in waiting):
            due = self.difficulty.state.decided[instance.task] + self.config.repeat_after
            waiting.append(_Waiting(instance, content, due))
            if len(waiting) > MOST_WAITING:
                self._count(waiting.pop(0).instance.task, "given_up")

    def _promote(self, task: str) -> None:
        """Unlock the next level once the pass rate of the highest open one is surely high."""
        level = self._level(task)
        rate = self.difficulty.of_level(task, level)
        if rate is None or level >= self.state.top.get(task, level):
            return
        if 1.0 - rate.below(self.config.promote_at) >= self.config.confidence:
            self.state.level[task] = level + 1
            self._count(task, "promoted")

    # -- telling ----------------------------------------------------------------------------

    @property
    def choices(self) -> dict[str, Any]:
        """What a dispatch changes, as plain JSON-compatible values."""
        return msgspec.to_builtins(self.state)

    def save(self, stage: str, put_state: Callable[[str, Any], None]) -> None:
        """Keep everything in a ledger, under names of the stage; belongs to a group's decision."""
        put_state(choices_key(stage), self.choices)
        put_state(difficulty_key(stage), msgspec.to_builtins(self.difficulty.state))

    def metrics(self) -> dict[str, float]:
        """Estimates now, and counts since the last call.

        `difficulty.TASK.levelN.pass_rate`, `.low` and `.high` (90% credible);
        `curriculum.TASK.COUNT`, where COUNT is `chosen`, `in_order`, `explored`, `repeated`,
        `none_suitable`, `promoted`, `given_up` or `skipped.REASON`; `.waiting` and `.level`.
        """
        found: dict[str, float] = {}
        for task in self.difficulty.state.decided:
            for level in self.difficulty.levels(task):
                rate = self.difficulty.of_level(task, level)
                assert rate is not None
                place = f"difficulty.{task}.level{level}"
                found[f"{place}.pass_rate"] = rate.mean
                found[f"{place}.low"], found[f"{place}.high"] = rate.interval(0.9)
        for task in self.state.choices:
            place = f"curriculum.{task}"
            if self.config.start_level is not None:
                found[f"{place}.level"] = float(self._level(task))
            if self.config.repeat_share:
                waiting = sum(w.instance.task == task for w in self.state.waiting)
                found[f"{place}.waiting"] = float(waiting)
            for name, count in sorted(self.counts.get(task, Counter()).items()):
                found[f"{place}.{name}"] = float(count)
        self.counts = {}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _count(self, task: str, what: str, by: int = 1) -> None:
        self.counts.setdefault(task, Counter())[what] += by


def _name(instance: TaskInstance) -> str:
    return f"{instance.task} {instance.seed}"


def choices_key(stage: str) -> str:
    """Name under which the ledger keeps what a stage has chosen and means to choose."""
    return f"curriculum:{stage}"


def difficulty_key(stage: str) -> str:
    """Name under which the ledger keeps what a stage knows of pass rates; a `DifficultyState`."""
    return f"difficulty:{stage}"
