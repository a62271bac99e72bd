"""The stages a recipe can list, each from a checkpoint to a checkpoint.

A stage owns its trainer process and, for RL, the rollout source; what it shares with the rest of a
run comes in a `StageContext`. What must survive a crash is in the ledger before it is acted upon.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.cluster.types import Cluster, WorkerHandle
from headrace.errors import UserError
from headrace.recipe import AgenticRlStage, Recipe, SftStage, Stage
from headrace.rollout.ledger import Ledger
from headrace.rollout.orchestrator import RolloutSource, SourceConfig, cursor_key
from headrace.system import System, trainer_spec
from headrace.tasks.types import TaskService
from headrace.tokens.messages import normalise
from headrace.tokens.renderer import ChatRenderer
from headrace.training import rl, sft
from headrace.training.batch import Sample, supervised_sample

_KEPT_VERSIONS = 2
_SAVE_TIMEOUT_S = 600.0
_INSTANCES_PER_SEED = 1_000_003
"""Training instances are disjoint between recipe seeds as long as a stage uses fewer than this."""
_VERSION = "version"


class StageContext(msgspec.Struct, frozen=True):
    """What a stage gets from the run around it.

    Attributes:
        recipe: the whole recipe.
        run_dir: where checkpoints, weights and logs go.
        ledger: the run's record.
        cluster: where trainer processes start.
        system: engine, gateway and runner.
        tasks: task services by name.
        log: called with (stage, step, metrics) after each step worth a row.
        progress: called with the share of the budget that is used.
        message: called with one line for people.
    """

    recipe: Recipe
    run_dir: Path
    ledger: Ledger
    cluster: Cluster
    system: System
    tasks: dict[str, TaskService]
    log: Callable[[str, int, dict[str, float]], None]
    progress: Callable[[float], None]
    message: Callable[[str], None]


def next_version(ledger: Ledger) -> int:
    """A weight version never used in this run, not even by a process that crashed."""
    version = int(ledger.get_state(_VERSION, 0)) + 1
    ledger.put_state(_VERSION, version)
    return version


@contextlib.asynccontextmanager
async def open_trainer(
    cluster: Cluster, name: str, cores: tuple[int, ...], threads: int, run_dir: Path
) -> AsyncIterator[WorkerHandle]:
    """A trainer process for the duration of the block."""
    handle = await cluster.start(trainer_spec(name, cores, threads, run_dir / "logs"))
    try:
        yield handle
    finally:
        await handle.stop()


async def run_sft(
    context: StageContext, stage: SftStage, source: Path, target: Path
) -> dict[str, Any]:
    """Supervised fine-tuning from checkpoint `source` to `target`; returns facts for the record.

    Restarted from the beginning after a crash: it is deterministic and short.
    """
    context.message(f"making {stage.demonstrations} demonstrations")
    data_started = time.monotonic()
    demonstrations = await demonstrations_of(
        context.tasks[stage.task], stage.demonstrations, context.recipe.seed, stage.quality
    )
    right = sum(d.right for d in demonstrations) / len(demonstrations)
    data = await asyncio.to_thread(
        _supervised_data, demonstrations, context.system.renderer, stage.prompt_loss
    )
    data_s = time.monotonic() - data_started
    threads = stage.threads or len(context.system.cores.all)
    cores = context.system.cores.all[:threads]
    async with open_trainer(
        context.cluster, stage.name, cores, min(threads, len(cores)), context.run_dir
    ) as worker:
        await worker.request("load", {"path": str(source), "optimizer": _optimizer(stage)})

        async def report(step: int, done: float, metrics: dict[str, float]) -> None:
            context.log(stage.name, step, metrics)
            context.progress(done)

        steps = await sft.train(
            stage, trainer=worker, data=data, seed=context.recipe.seed, report=report
        )
        await worker.request(
            "save",
            {
                "path": str(target),
                "tokenizer": str(source),
                "optimizer": False,
                "reset_optimizer": False,
            },
            timeout_s=_SAVE_TIMEOUT_S,
        )
    return {"steps": steps, "demonstrations_right": right, "data_s": data_s}


async def run_agentic_rl(
    context: StageContext, stage: AgenticRlStage, source: Path, target: Path
) -> dict[str, Any]:
    """Agentic RL from checkpoint `source` to `target`; goes on where a crashed process was."""
    system, ledger = context.system, context.ledger
    recovery = ledger.recover(stage.name, usable=lambda p: Path(p).is_dir())
    begin = Path(recovery.checkpoint) if recovery.checkpoint else source
    task = context.tasks[stage.task]
    offset = context.recipe.seed * _INSTANCES_PER_SEED
    source_of_batches = RolloutSource(
        SourceConfig(
            stage=stage.name,
            group_size=stage.group_size,
            groups_per_batch=stage.groups_per_batch,
            concurrency=stage.concurrency,
            staleness=stage.staleness,
            temperature=stage.temperature,
            max_tokens=stage.max_sequence or context.recipe.engine.max_context,
            advantage_std=stage.advantage_std,
            synchronous=stage.mode == "sync",
        ),
        runner=system.runner,
        ledger=ledger,
        instances=lambda cursor: task.instance(task.train_seed(offset + cursor)),
        cursor=ledger.get_state(cursor_key(stage.name), 0),
    )
    source_of_batches.resume(recovery)
    cores = system.cores.trainer
    async with open_trainer(
        context.cluster, stage.name, cores, len(cores), context.run_dir
    ) as worker:
        await worker.request(
            "load",
            {
                "path": str(begin),
                "optimizer": _optimizer(stage),
                "rl": {
                    "eps_low": stage.eps_low,
                    "eps_high": stage.eps_high,
                    "temperature": stage.temperature,
                },
            },
            timeout_s=_SAVE_TIMEOUT_S,
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
            await worker.request(
                "save",
                {
                    "path": str(path),
                    "tokenizer": str(source),
                    "optimizer": True,
                    "reset_optimizer": stage.reset_optimizer,
                },
                timeout_s=_SAVE_TIMEOUT_S,
            )
            with ledger.transaction():
                ledger.publish(stage.name, version, progress.step, path)
                ledger.checkpointed(stage.name, progress.step, path)
            await system.engine.load_weights(str(path), version)
            progress.version = version
            _prune(context.run_dir, stage.name, keep=path)

        observer = _RlObserver(context, stage, source_of_batches, worker)
        source_of_batches.start()
        try:
            await rl.train(
                stage,
                source=source_of_batches,
                trainer=worker,
                publish=publish,
                committed=lambda index, step: ledger.commit_batch(stage.name, index, step),
                report=observer.report,
                progress=progress,
            )
        finally:
            await source_of_batches.stop()
        published = ledger.publications(stage.name)[-1]
        if published.step < progress.step:
            await publish(progress)
        await worker.request(
            "save",
            {
                "path": str(target),
                "tokenizer": str(source),
                "optimizer": False,
                "reset_optimizer": False,
            },
            timeout_s=_SAVE_TIMEOUT_S,
        )
    return {"updates": progress.step, "version": progress.version}


class _RlObserver:
    """Turns the loop's updates into metrics: rates, windows and utilisation."""

    def __init__(
        self,
        context: StageContext,
        stage: AgenticRlStage,
        source: RolloutSource,
        worker: WorkerHandle,
    ) -> None:
        self.context = context
        self.stage = stage
        self.source = source
        self.worker = worker
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
        engine = await self.context.system.engine.stats()
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
            "rollouts_per_s": window.finished / seconds,
        }
        if not first:
            metrics["engine_busy"] = min(1.0, busy / seconds)
            metrics["gen_tokens_per_s"] = sampled / seconds
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


def _prune(run_dir: Path, stage: str, keep: Path) -> None:
    """Delete published weights that no engine and no resume needs any more."""
    folders = sorted((run_dir / "weights").glob(f"{stage}-v*"))
    for folder in folders[:-_KEPT_VERSIONS]:
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)


async def demonstrations_of(task: TaskService, count: int, seed: int, quality: float) -> list[Any]:
    """Demonstrations of a task that can make them.

    Raises:
        UserError: the task has none.
    """
    make = getattr(task, "demonstrations", None)
    if make is None:
        raise UserError(f"task {task.name} has no demonstrations; an sft stage cannot use it")
    return await make(count, seed, quality)


def _supervised_data(
    demonstrations: list[Any], renderer: ChatRenderer, prompt_loss: float
) -> list[Sample]:
    """Demonstrations as weighted token sequences."""
    samples = []
    for demonstration in demonstrations:
        messages = normalise(
            [
                {**message, "train": train} if message["role"] == "assistant" else message
                for message, train in zip(demonstration.messages, demonstration.train, strict=True)
            ]
        )
        ids, mask = renderer.render_training(messages, demonstration.tools)
        samples.append(supervised_sample(ids, [1.0 if m else prompt_loss for m in mask]))
    return samples


def _optimizer(stage: Stage) -> dict[str, Any]:
    """Keyword arguments of `OptimizerConfig`."""
    return {
        "learning_rate": stage.learning_rate,
        "weight_decay": stage.weight_decay,
        "beta2": stage.adam_beta2 if isinstance(stage, AgenticRlStage) else 0.95,
        "grad_clip": stage.grad_clip,
        "micro_tokens": stage.micro_tokens,
        "bfloat16": stage.dtype == "bfloat16",
        "muon": stage.optimizer == "muon",
    }
