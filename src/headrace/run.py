"""A whole run: prepare a model, go through the recipe's stages, measure, report.

This is the only module that knows both sides of the loop, the producing one (system, rollouts) and
the training one. What must survive a crash is in the ledger before it is acted upon; a resumed run
skips what the ledger says is finished.
"""

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from headrace.cluster.local import LocalCluster
from headrace.cluster.types import WorkerDied, WorkerFailure
from headrace.engine.types import EngineError
from headrace.engines import core_list, engine_words
from headrace.errors import UserError
from headrace.observe.live import LiveView
from headrace.observe.machine import describe_machine
from headrace.observe.metrics import MetricsWriter, read_metrics
from headrace.observe.report import write_report
from headrace.observe.sinks import open_sinks
from headrace.observe.summary import write_summary
from headrace.recipe import (
    AgenticRlStage,
    EvaluationTable,
    LanguageStage,
    MeasureTable,
    Recipe,
    SftStage,
    Stage,
)
from headrace.rollout.evaluation import STAGE as EVALUATION_STAGE
from headrace.rollout.evaluation import evaluate
from headrace.rollout.failures.trips import Trip, paused
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.reading import ledger_file
from headrace.rollout.record.worked import WorkedSeconds
from headrace.stages import StageContext, run_stage
from headrace.stages.checks import check_recipe
from headrace.stages.context import next_version, training_folder
from headrace.stages.evaluating import keep_evaluation
from headrace.stages.held_out import held_out_instances, hold_out
from headrace.stages.measuring import measure_model
from headrace.stages.new_model import start_checkpoint
from headrace.stages.tripping import Tripped, require_acknowledged
from headrace.system import System, open_system, placement
from headrace.task_services import check_tasks, open_tasks
from headrace.tasks.types import TaskService

START = "start"
"""Label of the model before the first stage."""
_MEASURED = "measured"
_TRAINER_DEATHS = 3
"""A trainer is replaced so often without a new checkpoint in between."""
_NOBODYS_VERSION = 0
"""Stamp of the weights that an engine starts with; nothing is sampled before it has others."""


def plan(recipe: Recipe) -> list[str]:
    """What a run of `recipe` would do, line by line; checks everything that can be checked.

    Raises:
        UserError: something in the recipe cannot work on this machine.
    """
    cores = placement(recipe)
    model = recipe.model
    if model.preset is not None:
        source = f"new {model.preset}"
    elif model.init is not None:
        shape = model.init
        source = (
            f"new {shape.family} model: hidden {shape.hidden_size}, {shape.num_layers} layers, "
            f"{shape.num_heads} heads"
        )
    else:
        source = f"checkpoint {model.path}"
        _check_model_path("model.path", str(model.path))
    check_tasks(recipe, task_names(recipe))
    check_recipe(recipe)
    lines = [
        f"recipe {recipe.name}, seed {recipe.seed}",
        f"model: {source}, renderer {recipe.model.renderer}",
        f"{engine_words(cores)}, trainer on cores {core_list(cores.trainer)}",
    ]
    for name, table in recipe.models.items():
        _check_model_path(f"models.{name}.path", table.path)
        shared = "" if table.cores else " (the engine's)"
        lines.append(f"model {name}: {table.path} on cores {core_list(cores.models[name])}{shared}")
    if recipe.cluster.trainer_ranks > 1:
        lines.append(f"language stages train with {recipe.cluster.trainer_ranks} ranks")
    if recipe.evaluation is not None:
        lines.append(
            f"evaluation: {recipe.evaluation.instances} held-out "
            f"{' and '.join(recipe.evaluation.task_names)} instances, "
            f"temperature {recipe.evaluation.temperature:g}"
        )
    if recipe.measure is not None:
        lines.append(f"measured: {', '.join(_measurements(recipe.measure)) or 'nothing'}")
    for stage in recipe.stages:
        budget = " or ".join(_budget(stage))
        if isinstance(stage, SftStage):
            what = f"{stage.demonstrations} demonstrations ({stage.quality:.0%} right)"
            if stage.conversations is not None:
                what = f"{stage.conversations} conversations"
            lines.append(f"stage {stage.name}: sft on {what}, {budget}")
        elif isinstance(stage, LanguageStage):
            what = ", ".join(stage.mix or recipe.data)
            lines.append(f"stage {stage.name}: {stage.kind} on {what}, {budget}")
        else:
            lines.append(
                f"stage {stage.name}: agentic_rl on {_ratios(stage.task_ratios)}, {stage.mode}, "
                f"groups of {stage.group_size}, {stage.groups_per_batch} groups per update, "
                f"{budget}"
            )
    return lines


def run_recipe(
    recipe: Recipe,
    run_dir: Path,
    *,
    resume: bool,
    no_isolation: bool,
    acknowledged: Collection[str] = (),
) -> int:
    """Run `recipe` in `run_dir`; returns the process's exit code.

    Args:
        acknowledged: tripwires that somebody has looked at; with `resume`.

    Raises:
        UserError: anything a person can mend.
        RunPaused: a tripwire stopped it; `resume` goes on.
    """
    plan(recipe)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)
        if not resume:
            # Written first: it is what makes a directory a run that can be resumed.
            text = json.dumps(recipe.model_dump(mode="json"), indent=1)
            (run_dir / "recipe.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--run-dir {run_dir}: cannot be written ({error.strerror})") from error
    run = _Run(recipe, run_dir, resume=resume, no_isolation=no_isolation)
    run.acknowledged = acknowledged
    _event_loop_runner()(run.main())
    if run.trip is not None:
        raise paused(run.trip, run_dir)
    return 0


def _event_loop_runner() -> Any:
    """uvloop where it exists: the gateway and its clients spend most of their time in the loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


class _Run:
    """State of one run in this process."""

    def __init__(self, recipe: Recipe, run_dir: Path, *, resume: bool, no_isolation: bool) -> None:
        self.recipe = recipe
        self.dir = run_dir
        self.resume = resume
        self.no_isolation = no_isolation
        self.started = time.monotonic()
        self.cluster = LocalCluster()
        self.evaluations: list[dict[str, Any]] = []
        self.measured: list[dict[str, Any]] = []
        self.acknowledged: Collection[str] = ()
        self.trip: Trip | None = None
        self.ledger: Ledger
        self.worked: WorkedSeconds
        self.metrics: MetricsWriter
        self.view: LiveView
        self.tasks: dict[str, TaskService]

    # -- the run ----------------------------------------------------------------------------

    async def main(self) -> None:
        recipe = self.recipe
        async with contextlib.AsyncExitStack() as stack:
            # A process may have died between making the directory a run and making its ledger.
            begun = self.resume and ledger_file(self.dir).exists()
            opener = Ledger.resume if begun else Ledger.create
            self.ledger = stack.enter_context(opener(self.dir))
            require_acknowledged(self.ledger, recipe, self.acknowledged, self.dir)
            self.metrics = stack.enter_context(
                MetricsWriter(self.dir, resume=self.resume, sinks=open_sinks(recipe, self.dir))
            )
            stack.push_async_callback(self.cluster.close)
            self.view = stack.enter_context(
                LiveView(
                    recipe.name,
                    [s.name for s in recipe.stages],
                    self.dir,
                    budgets={s.name: s.seconds for s in recipe.stages if s.seconds},
                    tasks=recipe.evaluation.task_names if recipe.evaluation else (),
                )
            )
            self.tasks = {}
            if names := task_names(recipe):
                # A run without tasks needs no sandbox, which not every machine has.
                _, self.tasks = await stack.enter_async_context(
                    open_tasks(
                        recipe,
                        names,
                        no_isolation=self.no_isolation,
                        log_dir=self.dir / "logs",
                        report=self.view.message,
                    )
                )
            self.evaluations = [
                {"after": e.label, "low": e.low, "high": e.high, **e.detail}
                for e in self.ledger.evaluations()
            ]
            self.measured = self.ledger.get_state(_MEASURED, [])
            rows = read_metrics(self.dir)
            self.worked = WorkedSeconds(
                self.ledger, logged_at=rows[-1].time if rows else None, started=self.started
            )
            self.ledger.recover(EVALUATION_STAGE)
            self._summarise("running")
            status = "failed"
            try:
                await self._stages()
                status = "finished"
            except Tripped as tripped:
                status, self.trip = "paused", tripped.trip
            except (asyncio.CancelledError, KeyboardInterrupt):
                status = "interrupted"
                raise
            finally:
                self._summarise(status)
        with contextlib.suppress(UserError):
            write_report(self.dir)

    async def _stages(self) -> None:
        recipe = self.recipe
        await hold_out(recipe, self.tasks, self.ledger)
        with self._explained("new model: the process that makes it"):
            start = await start_checkpoint(
                recipe,
                self.dir,
                self.dir / "checkpoints" / START,
                cluster=self.cluster,
                tasks=self.tasks,
                message=self.view.message,
            )
        checkpoints = {START: start}
        async with contextlib.AsyncExitStack() as stack:
            system = None
            if recipe.evaluation or any(isinstance(s, AgenticRlStage) for s in recipe.stages):
                system = await stack.enter_async_context(
                    open_system(
                        recipe,
                        cluster=self.cluster,
                        checkpoint=start,
                        version=_NOBODYS_VERSION,
                        tasks=self.tasks,
                        ledger=self.ledger,
                        log_dir=self.dir / "logs",
                        report=self.view.message,
                    )
                )
            if recipe.evaluation is not None and recipe.evaluation.before:
                await self._evaluate(system, START, start)
            if recipe.measure is not None and recipe.measure.before:
                await self._measure(START, start, chat=False)
            finished = {s.name for s in self.ledger.stages() if s.finished_at is not None}
            previous = START
            for stage in recipe.stages:
                source = checkpoints[stage.start_from or previous]
                target = self.dir / "checkpoints" / stage.name
                if stage.name not in finished:
                    await self._stage(system, stage, source, target)
                # Here, and for stages finished before: the last process may have died before this.
                shutil.rmtree(training_folder(self.dir, stage), ignore_errors=True)
                checkpoints[stage.name] = target
                previous = stage.name
                if stage.evaluate and not isinstance(stage, LanguageStage):
                    await self._evaluate(system, stage.name, target)
                if stage.evaluate:
                    await self._measure(stage.name, target, chat=isinstance(stage, SftStage))

    async def _stage(self, system: System | None, stage: Stage, source: Path, target: Path) -> None:
        self.ledger.stage_started(stage.name)
        total, unit = stage.seconds, "s"
        if total is None:
            if isinstance(stage, AgenticRlStage):
                total, unit = stage.updates, "updates"
                if total is None:
                    total, unit = stage.trained_tokens, "tokens"
            else:
                total, unit = stage.steps, "steps"
        self.view.stage_started(stage.name, stage.kind, total, unit)
        started = time.monotonic()
        before = float(self.ledger.get_state(f"seconds:{stage.name}", 0.0))
        context = StageContext(
            recipe=self.recipe,
            run_dir=self.dir,
            ledger=self.ledger,
            cluster=self.cluster,
            cores=placement(self.recipe),
            system=system,
            tasks=self.tasks,
            log=self._log,
            progress=self.view.progress,
            message=self.view.message,
            evaluated=self._evaluated_beside,
        )
        with self._explained(f"stage {stage.name}: the trainer"):
            result = await self._work(context, stage, source, target)
        seconds = before + time.monotonic() - started
        self.ledger.stage_finished(stage.name, seconds, {"checkpoint": str(target), **result})
        self.view.stage_finished()
        self._summarise("running")

    async def _work(
        self, context: StageContext, stage: Stage, source: Path, target: Path
    ) -> dict[str, Any]:
        """Go through a stage. When its trainer's process dies, another one goes on from the newest
        checkpoint, as a resumed run would; only one that gets nowhere again and again is an error.

        Raises:
            WorkerDied: of the last attempt.
        """
        deaths, reached = 0, self._durable(stage)
        while True:
            try:
                return await run_stage(context, stage, source, target)
            except WorkerDied as died:
                before, reached = reached, self._durable(stage)
                deaths = deaths + 1 if reached == before else 1
                if deaths > _TRAINER_DEATHS:
                    raise
                self.view.message(
                    f"stage {stage.name}: the trainer died ({died}; see {self.dir / 'logs'}); "
                    f"another one goes on from the newest checkpoint (death {deaths} there, the "
                    f"run ends after {_TRAINER_DEATHS})"
                )

    def _durable(self, stage: Stage) -> list[str]:
        """Names of what a stage could go on from; it changes whenever it gets further."""
        folder = training_folder(self.dir, stage)
        saved = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted([*saved, *(p.path for p in self.ledger.publications(stage.name))])

    @contextlib.contextmanager
    def _explained(self, who: str) -> Iterator[None]:
        """What ends a process, or its patience, in words; `who` is what was asked."""
        remedy = f"see {self.dir / 'logs'}, then continue with --resume {self.dir}"
        try:
            yield
        except WorkerFailure as failure:
            raise UserError(f"{who} stopped: {failure.message}") from None
        except WorkerDied as died:
            raise UserError(f"{who} died ({died}); {remedy}") from died
        except EngineError as error:
            raise UserError(f"the engine failed ({error}); {remedy}") from error
        except TimeoutError as error:
            raise UserError(f"{who} did not answer in time; {remedy}") from error

    # -- measuring --------------------------------------------------------------------------

    async def _measure(self, label: str, checkpoint: Path, *, chat: bool) -> None:
        """Measure a language model, once per label."""
        if self.recipe.measure is None or any(m["after"] == label for m in self.measured):
            return
        self.view.stage_started(f"measure {label}", "evaluation", None, "examples")
        with self._explained(f"measure {label}: the process"):
            found = await measure_model(
                self.cluster,
                self.recipe,
                checkpoint,
                self.dir,
                chat=chat,
                progress=self.view.progress,
            )
        records = [{"after": label, **record} for record in found]
        self.measured = [*self.measured, *records]
        self.ledger.put_state(_MEASURED, self.measured)
        values = {record["task"]: record["value"] for record in records}
        self.metrics.log(f"measure {label}", 0, values)
        for record in records:
            self.view.measurement(record)
        self.view.stage_finished()
        self._summarise("running")

    async def _evaluate(self, system: System | None, label: str, checkpoint: Path) -> None:
        table = self.recipe.evaluation
        if table is None or system is None:
            return
        for task in table.task_names:
            await self._evaluate_at(
                system, table, task, label, label, checkpoint, table.temperature
            )
            if table.greedy_too:
                await self._evaluate_at(
                    system, table, task, f"{label} greedy", label, checkpoint, 0.0
                )

    async def _evaluate_at(
        self,
        system: System,
        table: EvaluationTable,
        task: str,
        label: str,
        after: str,
        checkpoint: Path,
        temperature: float,
    ) -> None:
        if any(e["after"] == label and e["task"] == task for e in self.evaluations):
            return
        title = f"evaluate {label}" if len(table.task_names) == 1 else f"evaluate {label} {task}"
        self.view.stage_started(title, "evaluation", table.instances, "instances")
        await system.engine.load_weights(str(checkpoint), next_version(self.ledger))
        result = await evaluate(
            label,
            held_out_instances(self.tasks[task], table),
            runner=system.runner,
            ledger=self.ledger,
            temperature=temperature,
            concurrency=table.concurrency,
            progress=self.view.progress,
            seed=self.recipe.seed,
        )
        record = keep_evaluation(self.ledger, label, after, result)
        self.metrics.log(title, 0, {"success": result["success"]})
        self.view.stage_finished()
        self._evaluated(record)

    def _evaluated_beside(self, record: dict[str, Any]) -> None:
        """An RL stage measured its weights while it went on."""
        stage = record["after"].partition("@")[0]
        row = {"success": record["success"], "version": float(record["version"])}
        self.metrics.log(f"evaluate {stage} {record['task']}", record["step"], row)
        self._evaluated(record)

    def _evaluated(self, record: dict[str, Any]) -> None:
        self.evaluations.append(record)
        self.view.evaluation(record)
        self._summarise("running")

    # -- record -----------------------------------------------------------------------------

    def _log(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self.metrics.log(stage, step, metrics)
        self.view.metrics(stage, step, metrics)
        self.worked.keep()

    def _summarise(self, status: str) -> None:
        """Rewrite summary.json. Seconds of earlier processes of a resumed run count."""
        wall_s = self.worked.keep()
        laws = {}
        if status != "running":
            laws = {
                law: "held" if held else "broken" for law, (held, _) in audit(self.ledger).items()
            }
        stages = self.ledger.stages()
        write_summary(
            self.dir,
            {
                "recipe": self.recipe.name,
                "seed": self.recipe.seed,
                "status": status,
                "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "wall_s": wall_s,
                "machine": describe_machine(),
                "stages": [
                    {"name": s.name, "wall_s": s.seconds, "result": s.result} for s in stages
                ],
                "evaluations": [*self.evaluations, *self.measured],
                "laws": laws,
            },
        )


# -- small pure parts --------------------------------------------------------------------------


def task_names(recipe: Recipe) -> set[str]:
    """Task services that a recipe's stages and evaluation use."""
    names: set[str | None] = set()
    for stage in recipe.stages:
        if isinstance(stage, AgenticRlStage):
            names |= stage.task_ratios.keys()
    names |= {s.demonstrated_task for s in recipe.stages if isinstance(s, SftStage)} - {None}
    if recipe.evaluation is not None:
        names |= set(recipe.evaluation.task_names)
    return {str(name) for name in names}


def _check_model_path(field: str, path: str) -> None:
    """Raises UserError when a checkpoint is named that does not exist."""
    if path != "smollm2-135m-instruct" and not os.path.isdir(path):
        raise UserError(
            f"{field} {path}: no such directory; give a checkpoint directory or "
            '"smollm2-135m-instruct"'
        )


def _budget(stage: Stage) -> list[str]:
    parts = []
    if isinstance(stage, AgenticRlStage):
        count, unit = stage.updates, "updates"
    else:
        count, unit = stage.steps, "steps"
    if count is not None:
        parts.append(f"{count} {unit}")
    if stage.seconds is not None:
        parts.append(f"{stage.seconds:g} s")
    if isinstance(stage, AgenticRlStage) and stage.trained_tokens is not None:
        parts.append(f"{stage.trained_tokens:,} trained tokens")
    return parts


def _measurements(table: MeasureTable) -> list[str]:
    parts = []
    if table.text_bytes:
        parts.append(f"bits per byte of {table.text_bytes:,} bytes")
    if table.retrieval_lengths:
        lengths = ", ".join(map(str, table.retrieval_lengths))
        parts.append(f"retrieval at {lengths} tokens")
    if table.format_examples:
        parts.append(f"chat format of {table.format_examples} turns")
    return parts


def _ratios(tasks: dict[str, float]) -> str:
    """Tasks with their target shares, in words."""
    total = sum(tasks.values())
    if len(tasks) == 1:
        return next(iter(tasks))
    return " and ".join(f"{name} ({ratio / total:.0%})" for name, ratio in tasks.items())
