"""The asynchronous RL loop: cut a batch, update, publish every K updates.

Generation goes on beside this loop, in other processes; nothing here waits for a rollout that the
next batch does not need. The loop knows batches, versions and budgets, not where they come from.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.cluster.types import Requests
from headrace.recipe import AgenticRlStage, DistillationObjective
from headrace.rollout.types import Segment
from headrace.training.batch import Sample, rollout_sample

UPDATE_TIMEOUT_S = 3600.0
"""An update that takes longer than this is an error; large models on few cores are slow."""


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
        """A batch cut at `version`; None when none came within timeout_s seconds."""
        ...


class Update(msgspec.Struct, frozen=True):
    """What the loop reports after each update; seconds are wall clock."""

    step: int
    version: int
    batch_index: int
    trajectories: int
    wait_s: float
    update_s: float
    publish_s: float
    metrics: dict[str, float]


class Progress(msgspec.Struct):
    """Where the loop stands; survives a resume. `elapsed_s` includes earlier processes."""

    step: int = 0
    version: int = 0
    elapsed_s: float = 0.0


def done_fraction(stage: AgenticRlStage, progress: Progress) -> float:
    """How much of the stage's budget is used, in [0, 1]: updates or seconds, the larger share."""
    shares = [0.0]
    if stage.updates is not None:
        shares.append(progress.step / stage.updates)
    if stage.seconds is not None:
        shares.append(progress.elapsed_s / stage.seconds)
    return min(1.0, max(shares))


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
    publish: Callable[[Progress], Awaitable[None]],
    committed: Callable[[int, int], None],
    report: Callable[[Update], Awaitable[None]],
    progress: Progress,
) -> Progress:
    """Run until the stage's budget is used up.

    Args:
        stage: constants.
        source: batches.
        trainer: a `TrainerWorker` with a model loaded.
        publish: saves the trainer's weights and hands them to the engines as the next version;
            sets `progress.version`.
        committed: called with (batch index, step) when a batch is in the trainer's weights.
        report: called after each update.
        progress: where to go on from; changed in place.

    Returns:
        `progress`.

    Raises:
        WorkerDied, WorkerFailure: the trainer ended or refused.
    """
    before = progress.elapsed_s
    started = time.monotonic()
    while source.replaying or done_fraction(stage, progress) < 1.0:
        waited = time.monotonic()
        left = stage.seconds - progress.elapsed_s if stage.seconds is not None else 3600.0
        batch = await source.cut(progress.version, left)
        progress.elapsed_s = before + time.monotonic() - started
        if batch is None:
            if stage.seconds is None:
                raise TimeoutError(f"stage {stage.name}: no batch for an hour")
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
        progress.step += 1
        committed(batch.index, progress.step)
        published = time.monotonic()
        if progress.step % stage.publish_every == 0:
            await publish(progress)
        now = time.monotonic()
        progress.elapsed_s = before + now - started
        await report(
            Update(
                step=progress.step,
                version=progress.version,
                batch_index=batch.index,
                trajectories=len(batch.members),
                wait_s=updating - waited,
                update_s=published - updating,
                publish_s=now - published,
                metrics=metrics,
            )
        )
    return progress


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
