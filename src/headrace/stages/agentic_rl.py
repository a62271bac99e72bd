"""Agentic RL as a stage: the rollout source, the trainer's process, versions and recovery.

What must survive a crash is in the ledger before it is acted upon.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.cluster.types import WorkerFailure
from headrace.engine.types import PolicyEngine
from headrace.errors import UserError
from headrace.model.shared_folder import own_folder
from headrace.recipe import AgenticRlStage
from headrace.rollout.mixing import HeldOut, TaskMix, TaskShare
from headrace.rollout.orchestrator import RolloutSource, SourceConfig, cursor_key
from headrace.rollout.window import Window
from headrace.stages.context import (
    SAVE_TIMEOUT_S,
    StageContext,
    held_out_instances,
    next_version,
    optimizer_config,
    save_weights,
)
from headrace.stages.trainers import TrainerGroup, open_trainer
from headrace.stages.tripping import StageTripwires, Tripped
from headrace.tasks.types import TaskService
from headrace.training import rl

_KEPT_VERSIONS = 2
_INSTANCES_PER_SEED = 1_000_003
"""Training instances are disjoint between recipe seeds as long as a stage uses fewer than this."""


async def run_agentic_rl(
    context: StageContext, stage: AgenticRlStage, source: Path, target: Path
) -> dict[str, Any]:
    """Agentic RL from checkpoint `source` to `target`; goes on where a crashed process was."""
    system, ledger = context.system, context.ledger
    assert system is not None  # whoever runs this stage opened it
    recovery = ledger.recover(stage.name, usable=lambda p: Path(p).is_dir())
    begin = Path(recovery.checkpoint) if recovery.checkpoint else source
    mix = TaskMix(
        [
            _share(context.tasks[name], ratio, context.recipe.seed * _INSTANCES_PER_SEED)
            for name, ratio in stage.task_ratios.items()
        ],
        state=ledger.get_state(cursor_key(stage.name)),
        held_out=await asyncio.to_thread(_held_out, context),
    )
    wires = StageTripwires(ledger, stage, context.message)
    source_of_batches = RolloutSource(
        SourceConfig(
            stage=stage.name,
            group_size=stage.group_size,
            groups_per_batch=stage.groups_per_batch,
            concurrency=stage.concurrency,
            staleness=stage.staleness,
            temperature=stage.temperature,
            max_tokens=stage.max_sequence or context.recipe.engine.max_context,
            leave_one_out=stage.baseline == "leave_one_out",
            advantage_std=stage.divides_by_std,
            synchronous=stage.mode == "sync",
            failures=stage.failures.rules,
        ),
        runner=system.runner,
        ledger=ledger,
        mix=mix,
        watch=wires.see,
    )
    source_of_batches.resume(recovery)
    cores = system.cores.trainer
    async with (
        open_trainer(context.cluster, stage.name, cores, context.run_dir) as worker,
        _open_transport(context, system.engine, worker) as transport,
    ):
        await worker.request(
            "load",
            load_request(stage, begin, reference=source),
            timeout_s=SAVE_TIMEOUT_S,
        )
        progress = rl.Progress(
            step=recovery.step,
            elapsed_s=float(ledger.get_state(f"seconds:{stage.name}", 0.0)),
        )
        if recovery.version is not None:
            # These weights were published before the crash; a new stamp would age what they made.
            progress.version = recovery.version
        else:
            progress.version = next_version(ledger)
            ledger.publish(stage.name, progress.version, progress.step, begin)
        await system.engine.load_weights(str(begin), progress.version)

        async def publish(progress: rl.Progress) -> None:
            version = next_version(ledger)
            path = context.run_dir / "weights" / f"{stage.name}-v{version:06d}"
            await save_weights(
                worker,
                path,
                tokenizer=source,
                optimizer=True,
                reset_optimizer=stage.reset_optimizer,
            )
            with ledger.transaction():
                ledger.publish(stage.name, version, progress.step, path)
                ledger.checkpointed(stage.name, progress.step, path)
            await transport.update_engine(path, version)
            progress.version = version
            _prune(context.run_dir, stage.name, keep=path)

        observer = _RlObserver(context, stage, source_of_batches, worker, system.engine, wires)
        source_of_batches.start()
        tripped: Tripped | None = None

        async def report(update: rl.Update) -> None:
            await observer.report(update)
            wires.check(update.step)

        try:
            await rl.train(
                stage,
                source=source_of_batches,
                trainer=worker,
                publish=publish,
                committed=lambda index, step: ledger.commit_batch(stage.name, index, step),
                report=report,
                progress=progress,
            )
        except Tripped as found:
            tripped = found  # what was trained so far is saved first
        finally:
            await source_of_batches.stop()
        published = ledger.publications(stage.name)[-1]
        if published.step < progress.step:
            await publish(progress)
        if tripped is not None:
            raise tripped
        await save_weights(worker, target, tokenizer=source)
    return {"updates": progress.step, "version": progress.version}


def _share(task: TaskService, ratio: float, offset: int) -> TaskShare:
    return TaskShare(task.name, ratio, lambda i: task.instance(task.train_seed(offset + i)))


def _held_out(context: StageContext) -> HeldOut:
    """Everything that the recipe measures, by content."""
    table = context.recipe.evaluation
    measured = table.task_names if table is not None else ()
    return HeldOut(
        context.tasks,
        [i for name in measured if table for i in held_out_instances(context.tasks[name], table)],
    )


def load_request(stage: AgenticRlStage, begin: Path, *, reference: Path) -> dict[str, Any]:
    """What a `TrainerWorker` is asked to load.

    Args:
        stage: its optimizer, objective and what of the model trains.
        begin: weights to go on from.
        reference: weights the stage began with, which is another checkpoint after a crash; a KL
            keeps close to these.
    """
    # Without a loss of its own nothing would reach the indexer, as selection has no gradient.
    trained: dict[str, Any] = {"trainable": "all", "losses": {"index": "sparse"}}
    if stage.freeze_indexer:
        trained = {"trainable": "all_but_indexer"}
    return {
        "path": str(begin),
        "optimizer": optimizer_config(stage),
        "rl": {**stage.objective.model_dump(), "temperature": stage.temperature},
        "reference": str(reference) if stage.objective.kl_weight > 0 else None,
        **trained,
    }


class _Transport:
    """Brings weights that the trainer has saved to the engine.

    Args:
        context: of the stage.
        engine: whose weights to change.
        worker: the trainer.
        folder: of versions in shared memory; None reads checkpoints from disk.
    """

    def __init__(
        self,
        context: StageContext,
        engine: PolicyEngine,
        worker: TrainerGroup,
        folder: Path | None,
    ) -> None:
        self._context = context
        self._engine = engine
        self._worker = worker
        self._folder = folder

    async def update_engine(self, checkpoint: Path, version: int) -> None:
        """Switch the engine to the trainer's present weights, which `checkpoint` holds, too."""
        if self._folder is not None:
            try:
                await self._share(self._folder, checkpoint, version)
                return
            except (UserError, WorkerFailure) as refusal:
                # What the engine refused it has not taken, and the checkpoint is there.
                self._folder = None
                self._context.message(f"weights go through the disk from here on: {refusal}")
        await self._engine.load_weights(str(checkpoint), version)

    async def _share(self, folder: Path, checkpoint: Path, version: int) -> None:
        path = await self._worker.request(
            "publish",
            {
                "folder": str(folder),
                "version": version,
                "dtype": self._context.recipe.engine.dtype,
            },
            timeout_s=SAVE_TIMEOUT_S,
        )
        await self._engine.load_weights(path, version, checkpoint=str(checkpoint))


@contextlib.asynccontextmanager
async def _open_transport(
    context: StageContext, engine: PolicyEngine, worker: TrainerGroup
) -> AsyncIterator[_Transport]:
    """A transport for the stage, as the recipe says; nothing of it stays in shared memory."""
    if context.recipe.engine.weight_transport == "disk":
        yield _Transport(context, engine, worker, None)
        return
    # The same name after a crash, so that what was left behind is found.
    run = hashlib.blake2b(os.fsencode(context.run_dir.resolve()), digest_size=8).hexdigest()
    with own_folder(run) as folder:
        yield _Transport(context, engine, worker, folder)


class _RlObserver:
    """Turns the loop's updates into metrics: rates, windows and utilisation."""

    def __init__(
        self,
        context: StageContext,
        stage: AgenticRlStage,
        source: RolloutSource,
        worker: TrainerGroup,
        engine: PolicyEngine,
        wires: StageTripwires,
    ) -> None:
        self.context = context
        self.stage = stage
        self.wires = wires
        self.source = source
        self.worker = worker
        self.system_engine = engine
        self.last = time.monotonic()
        self.engine: dict[str, float] = {}
        self.trainer_busy = 0.0
        self.begun = time.monotonic()
        self.before = float(context.ledger.get_state(f"seconds:{stage.name}", 0.0))

    async def report(self, update: rl.Update) -> None:
        """Log one update."""
        now = time.monotonic()
        seconds = max(now - self.last, 1e-6)
        self.last = now
        engine = await self.system_engine.stats()
        sampled = engine["tokens_sampled"] - self.engine.get("tokens_sampled", 0.0)
        busy = engine["busy_s"] - self.engine.get("busy_s", 0.0)
        trainer = await self.worker.request("stats")
        trained_s = trainer["busy_s"] - self.trainer_busy
        first = not self.engine
        self.engine, self.trainer_busy = engine, trainer["busy_s"]
        window = self.source.take_window()
        metrics = {
            **update.metrics,
            "version": float(update.version),
            "trained_trajectories": float(update.trajectories),
            "wait_s": update.wait_s,
            "publish_s": update.publish_s,
            "step_s": seconds,
            "train_tokens_per_s": update.metrics["trained_tokens"] / seconds,
            "trainer_busy": min(1.0, trained_s / seconds),
            "queue_groups": float(self.source.ready_groups),
            "rollouts_in_flight": float(self.source.in_flight),
            "dropped_stale": float(window.dropped_stale),
            "dropped_no_signal": float(window.dropped_no_signal),
            "env_failed": float(window.env_failed),
            "retried": float(window.retried),
            **{f"failed.{reason}": float(n) for reason, n in window.failures.items()},
            "rollouts_per_s": window.finished / seconds,
        }
        if not first:
            engines = max(1, engine.get("serving", 1))
            metrics["engine_busy"] = min(1.0, busy / seconds / engines)
            metrics["gen_tokens_per_s"] = sampled / seconds
        metrics |= _replica_metrics(engine)
        metrics |= self.wires.measures()
        metrics |= _task_metrics(self.source.mix, window)
        if window.scored:
            metrics["reward_mean"] = window.reward_sum / window.scored
            metrics["success_rate"] = metrics["reward_mean"]
        if window.finished:
            metrics["turns_mean"] = window.turns / window.finished
        self.context.log(self.stage.name, update.step, metrics)
        elapsed = self.before + now - self.begun
        self.context.ledger.put_state(f"seconds:{self.stage.name}", elapsed)
        self.context.progress(
            rl.done_fraction(self.stage, rl.Progress(update.step, update.version, elapsed))
        )


def _task_metrics(mix: TaskMix, window: Window) -> dict[str, float]:
    """How each task of several is doing, and how far the groups are from the target ratios."""
    found = {"held_out_skipped": float(sum(mix.skipped.values()))}
    if len(mix.ratios) == 1:
        return found
    found["ratio_error"] = max(abs(mix.share_of(n) - ratio) for n, ratio in mix.ratios.items())
    for name in mix.ratios:
        counts, place = window.of(name), f"task.{name}"
        found[f"{place}.share"] = mix.share_of(name)
        found[f"{place}.groups_dispatched"] = float(counts.dispatched)
        found[f"{place}.rollouts_finished"] = float(counts.finished)
        found[f"{place}.groups_trained"] = float(counts.trained)
        if counts.scored:
            found[f"{place}.reward_mean"] = counts.reward_sum / counts.scored
    return found


def _replica_metrics(stats: dict[str, Any]) -> dict[str, float]:
    """How replicas are, all together and each; nothing of an engine that has none."""
    replicas = stats.get("replicas")
    if replicas is None:
        return {}
    found = {
        "replicas_serving": float(stats["serving"]),
        "replica_restarts": float(sum(replica["restarts"] for replica in replicas)),
        "replica_imbalance": float(stats["imbalance"]),
    }
    for replica in replicas:
        place = f"replica.{replica['name']}"
        found[f"{place}.serving"] = float(replica["state"] == "serving")
        for name in ("version", "sessions", "requests", "restarts"):
            found[f"{place}.{name}"] = float(replica[name])
    return found


def _prune(run_dir: Path, stage: str, keep: Path) -> None:
    """Delete published weights that no engine and no resume needs any more."""
    folders = sorted((run_dir / "weights").glob(f"{stage}-v*"))
    for folder in folders[:-_KEPT_VERSIONS]:
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
