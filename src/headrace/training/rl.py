"""The RL loop: cut a batch, update, publish every K updates, until a budget is used up.

Generation goes on beside this loop, in other processes; nothing here waits for a rollout that the
next batch does not need. The loop knows batches, versions and budgets, not where they come from;
whether a mode goes in step with generation is up to the source and to whoever publishes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec

from headrace.cluster.types import Requests
from headrace.recipe import AgenticRlStage, DistillationObjective
from headrace.rollout.types import Segment
from headrace.training.batch import Sample, rollout_sample

UPDATE_TIMEOUT_S = 3600.0
"""An update that takes longer than this is an error; large models on few cores are slow."""
_PATIENCE_S = 3600.0
"""Without a budget in seconds, the loop gives up when no batch comes for so long."""


class Member(Protocol):
    """One trajectory of a batch."""

    @property
    def group_id(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def segments(self) -> tuple[Segment, ...]: ...
    @property
    def advantage(self) -> float: ...
    @property
    def multiplicity(self) -> int: ...


class Batch(Protocol):
    """One batch as the source cut it."""

    @property
    def index(self) -> int: ...
    @property
    def members(self) -> Sequence[Member]: ...


class BatchSource(Protocol):
    """Where batches come from."""

    @property
    def replaying(self) -> bool:
        """Whether batches wait that a crashed process had cut; they train whatever the budget."""
        ...

    async def cut(self, version: int, timeout_s: float) -> Batch | None:
        """A batch cut at `version`, or at a newer one that was published while it waited; None when
        none came within timeout_s seconds."""
        ...


class Update(msgspec.Struct, frozen=True):
    """What the loop reports after each update; seconds are wall clock.

    Attributes:
        step: of the trainer.
        version: newest published one.
        batch_index: what it trained on.
        trajectories: in that batch.
        tokens: sampled tokens that trained.
        wait_s: for rollouts.
        update_s: in the trainer.
        publish_s: for as much of a publication as the next update cannot do without.
        metrics: of the trainer.
    """

    step: int
    version: int
    batch_index: int
    trajectories: int
    tokens: int
    wait_s: float
    update_s: float
    publish_s: float
    metrics: dict[str, float]


class Progress(msgspec.Struct):
    """Where the loop stands; survives a resume.

    Attributes:
        step: updates made.
        version: newest published one.
        elapsed_s: of work, earlier processes included.
        trained_tokens: sampled tokens that have trained, each counted once.
        ended_by: the budget that was used up first, or what else ended the loop; "" before.
    """

    step: int = 0
    version: int = 0
    elapsed_s: float = 0.0
    trained_tokens: int = 0
    ended_by: str = ""


def shares_used(stage: AgenticRlStage, progress: Progress) -> dict[str, float]:
    """How much of each of the stage's budgets is used, by recipe key; 1 is all of it."""
    used = {
        "updates": (progress.step, stage.updates),
        "seconds": (progress.elapsed_s, stage.seconds),
        "trained_tokens": (progress.trained_tokens, stage.trained_tokens),
    }
    return {name: done / budget for name, (done, budget) in used.items() if budget is not None}


def done_fraction(stage: AgenticRlStage, progress: Progress) -> float:
    """How much of the stage's budgets is used, in [0, 1]: the largest share."""
    return min(1.0, max(shares_used(stage, progress).values(), default=0.0))


def used_up(stage: AgenticRlStage, progress: Progress) -> str | None:
    """The first budget, by recipe key, that is used up; None while none is."""
    full = [name for name, share in shares_used(stage, progress).items() if share >= 1.0]
    return full[0] if full else None


def learning_rate(stage: AgenticRlStage, progress: Progress) -> float:
    """Linear warm-up over the first updates, then a linear fall to the final share."""
    warmup = min(1.0, (progress.step + 1) / (stage.warmup_updates + 1))
    fall = 1.0 - (1.0 - stage.final_learning_rate) * done_fraction(stage, progress)
    return stage.learning_rate * warmup * fall


async def train(
    stage: AgenticRlStage,
    *,
    source: BatchSource,
    trainer: Requests,
    publish: Callable[[Progress], Awaitable[float]],
    committed: Callable[[int, int], None],
    report: Callable[[Update], Awaitable[None]],
    progress: Progress,
    check: Callable[[int], None] = lambda step: None,
    stop: Callable[[], str | None] = lambda: None,
) -> Progress:
    """Run until one of the stage's budgets is used up, or something else says stop.

    Args:
        stage: constants.
        source: batches.
        trainer: a `TrainerWorker` with a model loaded.
        publish: saves the trainer's weights and hands them to the engines as the next version, now
            or soon; sets `progress.version` then. Returns seconds that it waited for rollouts.
        committed: called with (batch index, step) when a batch is in the trainer's weights.
        report: called after each update; what it returns is awaited beside the next one, for
            which the trainer would otherwise wait. What fails there is raised after that one.
        progress: where to go on from; changed in place.
        check: called with each step when its update is made and published; may raise.
        stop: asked before each batch; a word that says why it is the last, or None.

    Returns:
        `progress`.

    Raises:
        WorkerDied, WorkerFailure: the trainer ended or refused.
    """
    before = progress.elapsed_s
    started = time.monotonic()
    ended: str | None = None
    async with _Beside() as reports:
        while source.replaying or not (ended := used_up(stage, progress) or stop()):
            waited = time.monotonic()
            left = stage.seconds - progress.elapsed_s if stage.seconds is not None else _PATIENCE_S
            batch = await source.cut(progress.version, left)
            progress.elapsed_s = before + time.monotonic() - started
            if batch is None:
                if stage.seconds is None:
                    raise TimeoutError(f"stage {stage.name}: no batch for an hour")
                ended = "seconds"
                break
            updating = time.monotonic()
            metrics = await trainer.request(
                "rl",
                {
                    "samples": samples(batch, teacher_numbers(stage)),
                    "version": progress.version,
                    "learning_rate": learning_rate(stage, progress),
                },
                timeout_s=UPDATE_TIMEOUT_S,
            )
            tokens = trained_tokens(batch)
            progress.step += 1
            progress.trained_tokens += tokens
            committed(batch.index, progress.step)
            published, settling = time.monotonic(), 0.0
            if progress.step % stage.publish_every == 0:
                settling = await publish(progress)
            now = time.monotonic()
            progress.elapsed_s = before + now - started
            await reports.begin(
                report(
                    Update(
                        step=progress.step,
                        version=progress.version,
                        batch_index=batch.index,
                        trajectories=len(batch.members),
                        tokens=tokens,
                        wait_s=updating - waited + settling,
                        update_s=published - updating,
                        publish_s=now - published - settling,
                        metrics=metrics,
                    )
                )
            )
            check(progress.step)
    progress.ended_by = ended or ""
    return progress


class _Beside:
    """One piece of work at a time beside the block; the last one is awaited when it ends."""

    def __init__(self) -> None:
        self._running: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._running is None:
            return
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            self._running.cancel()
        if kind is None:
            await self._running
        else:
            await asyncio.gather(self._running, return_exceptions=True)

    async def begin(self, work: Awaitable[None]) -> None:
        """Go on with `work` once what was begun before is done, whose exception this raises."""
        running, self._running = self._running, asyncio.ensure_future(work)
        if running is not None:
            await running


def teacher_names(stage: AgenticRlStage) -> list[str]:
    """Every teacher of a stage once, in the order in which the trainer numbers them."""
    objective = stage.objective
    if not isinstance(objective, DistillationObjective):
        return []
    found = (objective.teacher_of(task) for task in stage.task_ratios)
    return list(dict.fromkeys(filter(None, found)))


def teacher_numbers(stage: AgenticRlStage) -> dict[str, int]:
    """Which of the trainer's teachers judges each task; empty where none does."""
    objective = stage.objective
    if not isinstance(objective, DistillationObjective):
        return {}
    names = teacher_names(stage)
    return {task: names.index(objective.teacher_of(task) or "") for task in stage.task_ratios}


def trained_tokens(batch: Batch) -> int:
    """Sampled tokens of a batch, each once however often its trajectory counts."""
    return sum(sum(s.train_mask) for member in batch.members for s in member.segments)


def samples(batch: Batch, teachers: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """A batch on the wire: which segments are one trajectory, and which trajectories one group.

    Args:
        batch: as the source cut it.
        teachers: the number of each task's teacher, for distillation.
    """
    teachers = teachers or {}
    groups: dict[str, int] = {}
    found: list[Sample] = [
        rollout_sample(
            segment,
            member.advantage,
            member.multiplicity,
            trajectory=number,
            group=groups.setdefault(member.group_id, len(groups)),
            teacher=teachers.get(member.task, 0),
        )
        for number, member in enumerate(batch.members)
        for segment in member.segments
    ]
    return msgspec.to_builtins(found, builtin_types=(bytes,))
