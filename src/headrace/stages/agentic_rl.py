"""Agentic RL as a stage: the rollout source, the trainer's process, versions and recovery.

What must survive a crash is in the ledger before it is acted upon.
"""

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.engine.config import UpdatePolicy
from headrace.recipe import AgenticRlStage, DistillationObjective, share_limits
from headrace.rollout.choosing.curriculum import (
    Curriculum,
    CurriculumConfig,
    choices_key,
    difficulty_key,
)
from headrace.rollout.choosing.mixing import TaskMix, TaskShare
from headrace.rollout.choosing.overgeneration import OvergenerationConfig
from headrace.rollout.choosing.pausing import TaskPauses
from headrace.rollout.choosing.ratios import AdaptiveRatios, RatioRule, TaskBounds
from headrace.rollout.choosing.sharing import cursor_key, ratios_key
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.rows import Recovery
from headrace.rollout.source_config import SourceConfig
from headrace.stages.beside import EvaluationBeside, copy_checkpoint
from headrace.stages.context import (
    SAVE_TIMEOUT_S,
    StageContext,
    next_version,
    optimizer_config,
    save_weights,
)
from headrace.stages.held_out import hold_out
from headrace.stages.publishing import Publisher, open_transport
from headrace.stages.rl_observer import RlObserver, seconds_key
from headrace.stages.trainers import open_trainer
from headrace.stages.tripping import StageTripwires, Tripped
from headrace.system import System, open_side_system
from headrace.tasks.types import Returning, TaskService
from headrace.training import rl

_INSTANCES_PER_SEED = 1_000_003
"""Training instances are disjoint between recipe seeds as long as a stage uses fewer than this."""
_POLICIES: dict[str, UpdatePolicy] = {
    "continue": "continue",
    "restart": "requeue",
    "wait": "continue",  # nothing runs then
}


async def run_agentic_rl(
    context: StageContext, stage: AgenticRlStage, source: Path, target: Path
) -> dict[str, Any]:
    """Agentic RL from checkpoint `source` to `target`; goes on where a crashed process was."""
    system, ledger = context.system, context.ledger
    assert system is not None  # whoever runs this stage opened it
    recovery = ledger.recover(stage.name, usable=lambda p: Path(p).is_dir())
    begin = Path(recovery.checkpoint) if recovery.checkpoint else source
    wires = StageTripwires(ledger, stage, context.message)
    rollouts = await _open_source(context, stage, system, wires)
    rollouts.resume(recovery)
    beside = _evaluation_beside(context, stage, system)
    async with (
        open_trainer(context.cluster, stage.name, system.cores.trainer, context.run_dir) as worker,
        open_transport(
            context, system.engine, worker, _POLICIES[stage.partial_rollouts]
        ) as transport,
        contextlib.AsyncExitStack() as stack,
    ):
        await worker.request(
            "load",
            load_request(stage, begin, reference=source, run_dir=context.run_dir),
            timeout_s=SAVE_TIMEOUT_S,
        )
        progress = _progress(context, stage, recovery, begin)
        await system.engine.load_weights(str(begin), progress.version)

        def recorded(step: int, version: int, path: Path) -> None:
            if beside is not None and beside.due(step):
                beside.pin(step, version, path)

        publisher = Publisher(
            context,
            stage,
            worker=worker,
            transport=transport,
            source=rollouts,
            tokenizer=source,
            recorded=recorded,
            pinned=beside.pinned if beside is not None else set,
        )
        observer = RlObserver(
            context,
            stage,
            source=rollouts,
            engine=system.engine,
            progress=progress,
            wires=wires,
        )
        tripped: Tripped | None = None

        def stop() -> str | None:
            publisher.check()
            return beside.stop() if beside is not None else None

        if beside is not None:
            beside.resume(recovery)
            beside.start()
            stack.push_async_callback(beside.close)
        stack.push_async_callback(publisher.close)
        stack.enter_context(_returns(context.tasks, stage, rollouts))
        rollouts.start()
        try:
            await rl.train(
                stage,
                source=rollouts,
                trainer=worker,
                publish=publisher.publish,
                committed=lambda index, step: ledger.commit_batch(stage.name, index, step),
                report=observer.report,
                progress=progress,
                check=wires.check,
                stop=stop,
            )
        except Tripped as found:
            tripped = found  # what was trained so far is saved first
        finally:
            await rollouts.stop()
        await publisher.finish()
        if ledger.publications(stage.name)[-1].step < progress.step:
            await publisher.publish(progress)
            await publisher.finish()
        if tripped is not None:
            raise tripped
        best = await _measured_to_the_end(context, stage, beside)
        await publisher.prune()
        if best is None:
            await save_weights(worker, target, tokenizer=source)
        else:
            await asyncio.to_thread(copy_checkpoint, best, target)
    return _result(context, stage, progress, beside)


async def _open_source(
    context: StageContext, stage: AgenticRlStage, system: System, wires: StageTripwires
) -> RolloutSource:
    ledger = context.ledger
    mix = TaskMix(
        [
            _share(
                context.tasks[name],
                ratio,
                context.recipe.seed * _INSTANCES_PER_SEED,
                stage.tasks[name].concurrency if name in stage.tasks else None,
            )
            for name, ratio in stage.task_ratios.items()
        ],
        state=ledger.get_state(cursor_key(stage.name)),
        held_out=await hold_out(context.recipe, context.tasks, ledger),
        curriculum=Curriculum(
            CurriculumConfig(**stage.curriculum.constants),
            seed=context.recipe.seed,
            choices=ledger.get_state(choices_key(stage.name)),
            difficulty=ledger.get_state(difficulty_key(stage.name)),
        ),
    )
    return RolloutSource(
        SourceConfig(
            stage=stage.name,
            group_size=stage.group_size,
            groups_per_batch=stage.groups_per_batch,
            concurrency=stage.concurrency,
            staleness=stage.tau,
            temperature=stage.temperature,
            max_tokens=stage.max_sequence or context.recipe.engine.max_context,
            leave_one_out=stage.baseline == "leave_one_out",
            advantage_std=stage.divides_by_std,
            judged=isinstance(stage.objective, DistillationObjective),
            failures=stage.failures.rules,
            mode=stage.mode,
            seed=context.recipe.seed,
            ready_batches=stage.ready_batches,
            hold_back=stage.hold_back,
            whole_versions=stage.partial_rollouts == "wait",
            dynamic=OvergenerationConfig(**stage.dynamic.model_dump()),
        ),
        runner=system.runner,
        ledger=ledger,
        mix=mix,
        pauses=TaskPauses(mix.ratios, give_up_s=stage.give_up_s, report=context.message),
        ratios=_ratios(context, stage),
        report=context.message,
        watch=wires.see,
    )


@contextlib.contextmanager
def _returns(
    tasks: dict[str, TaskService], stage: AgenticRlStage, rollouts: RolloutSource
) -> Iterator[None]:
    """Tell the source when a service that was lost is there again, so that no pause has to end."""
    returning = [(n, t) for n in stage.task_ratios if isinstance(t := tasks[n], Returning)]
    before = [task.on_return for _, task in returning]
    for name, task in returning:
        task.on_return = functools.partial(rollouts.returned, name)
    try:
        yield
    finally:
        for (_, task), told in zip(returning, before, strict=True):
            task.on_return = told


def _progress(
    context: StageContext, stage: AgenticRlStage, recovery: Recovery, begin: Path
) -> rl.Progress:
    """Where to go on from; publishes the first weights of a stage that only begins."""
    ledger = context.ledger
    progress = rl.Progress(
        step=recovery.step,
        elapsed_s=float(ledger.get_state(seconds_key(stage.name), 0.0)),
        trained_tokens=ledger.conservation(stage.name).trained,
    )
    if recovery.version is not None:
        # These weights were published before the crash; a new stamp would age what they made.
        progress.version = recovery.version
    else:
        progress.version = next_version(ledger)
        ledger.publish(stage.name, progress.version, progress.step, begin)
    return progress


def _evaluation_beside(
    context: StageContext, stage: AgenticRlStage, system: System
) -> EvaluationBeside | None:
    table, held_out = stage.evaluation, context.recipe.evaluation
    if table is None or held_out is None:
        return None

    def open_system(
        checkpoint: Path, version: int
    ) -> contextlib.AbstractAsyncContextManager[System]:
        return open_side_system(
            context.recipe,
            system,
            cores=table.cores or system.cores.engine,
            concurrency=table.concurrency,
            checkpoint=checkpoint,
            version=version,
            tasks=context.tasks,
            ledger=context.ledger,
            log_dir=context.run_dir / "logs",
        )

    return EvaluationBeside(context, stage, table, held_out, open_system)


async def _measured_to_the_end(
    context: StageContext, stage: AgenticRlStage, beside: EvaluationBeside | None
) -> Path | None:
    """Finish what is being measured; the checkpoint that is the stage's result, None: the last."""
    if beside is None:
        return None
    last = context.ledger.publications(stage.name)[-1]
    if stage.result == "best" and last.step > 0:
        # The last weights have to be among those that are compared.
        beside.pin_last(last)
    await beside.drain()
    if stage.result == "last":
        return None
    best = beside.best()
    if best is None:
        context.message(f"stage {stage.name}: nothing was measured; its last weights count")
        return None
    return best[1]


def _result(
    context: StageContext,
    stage: AgenticRlStage,
    progress: rl.Progress,
    beside: EvaluationBeside | None,
) -> dict[str, Any]:
    """What the summary says of the stage."""
    result: dict[str, Any] = {
        "updates": progress.step,
        "version": progress.version,
        "trained_tokens": progress.trained_tokens,
        "ended_by": progress.ended_by,
    }
    words = f"stage {stage.name} ended by {progress.ended_by} after {progress.step} updates"
    best = None if beside is None else beside.best()
    if best is not None:
        score = best[0]
        result["best"] = {"step": score.step, "score": score.value, "path": str(best[1])}
        words += f"; best score {score.value:.1%} after {score.step}"
    context.message(words)
    return result


def _share(task: TaskService, ratio: float, offset: int, concurrency: int | None) -> TaskShare:
    return TaskShare(
        task.name,
        ratio,
        lambda i: task.instance(task.train_seed(offset + i)),
        concurrency,
        blocking=getattr(task, "blocking", True),
    )


def _ratios(context: StageContext, stage: AgenticRlStage) -> AdaptiveRatios | None:
    """The rule that moves the ratios, as an earlier process left it; None for one task."""
    if not stage.tasks:
        return None
    table = stage.ratios
    return AdaptiveRatios(
        RatioRule(table.rule, table.step, table.every, table.window, table.learnable),
        {name: TaskBounds(*limits) for name, limits in share_limits(table, stage.tasks).items()},
        state=context.ledger.get_state(ratios_key(stage.name)),
    )


def load_request(
    stage: AgenticRlStage, begin: Path, *, reference: Path, run_dir: Path
) -> dict[str, Any]:
    """What a `TrainerWorker` is asked to load.

    Args:
        stage: its optimizer, objective and what of the model trains.
        begin: weights to go on from.
        reference: weights the stage began with, which is another checkpoint after a crash; a KL
            keeps close to these.
        run_dir: holds the results of earlier stages, which may be teachers.
    """
    # Without a loss of its own nothing would reach the indexer, as selection has no gradient.
    trained: dict[str, Any] = {"trainable": "all", "losses": {"index": "sparse"}}
    if stage.freeze_indexer:
        trained = {"trainable": "all_but_indexer"}
    return {
        "path": str(begin),
        "optimizer": optimizer_config(stage),
        "rl": {
            **stage.objective.model_dump(exclude={"teacher", "teachers"}),
            "temperature": stage.temperature,
        },
        "teachers": [str(_teacher(name, run_dir)) for name in rl.teacher_names(stage)],
        "reference": str(reference) if stage.objective.kl_weight > 0 else None,
        **trained,
    }


def _teacher(name: str, run_dir: Path) -> Path:
    """Where a teacher is: the result of an earlier stage, or a checkpoint of its own."""
    result = run_dir / "checkpoints" / name
    return result if result.is_dir() else Path(name)
