"""A whole run: prepare a model, go through the recipe's stages, measure, report.

This is the only module that knows both sides of the loop, the producing one (system, rollouts) and
the training one. What must survive a crash is in the ledger before it is acted upon; a resumed run
skips what the ledger says is finished.
"""

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from headrace.cluster.local import LocalCluster, available_cores
from headrace.cluster.types import WorkerDied, WorkerFailure
from headrace.errors import UserError
from headrace.observe.live import LiveView
from headrace.observe.machine import describe_machine
from headrace.observe.metrics import MetricsWriter
from headrace.observe.report import write_report
from headrace.observe.statistics import wilson
from headrace.observe.summary import write_summary
from headrace.recipe import Recipe, SftStage, Stage
from headrace.rollout.audit import audit
from headrace.rollout.evaluation import STAGE as EVALUATION_STAGE
from headrace.rollout.evaluation import evaluate
from headrace.rollout.ledger import Ledger
from headrace.rollout.records import Evaluation
from headrace.stages import (
    StageContext,
    demonstrations_of,
    next_version,
    open_trainer,
    run_agentic_rl,
    run_sft,
)
from headrace.system import System, open_system, open_tasks, placement
from headrace.tasks.types import TaskInstance, TaskService

START = "start"
"""Label of the model before the first stage."""


def plan(recipe: Recipe) -> list[str]:
    """What a run of `recipe` would do, line by line; checks everything that can be checked.

    Raises:
        UserError: something in the recipe cannot work on this machine.
    """
    from headrace.tasks.registry import create_task

    cores = placement(recipe)
    model = recipe.model
    if model.init is not None:
        shape = model.init
        source = (
            f"new {shape.family} model: hidden {shape.hidden_size}, {shape.num_layers} layers, "
            f"{shape.num_heads} heads"
        )
    else:
        source = f"checkpoint {model.path}"
        _check_model_path(str(model.path))
    for name in {recipe.evaluation.task, *(s.task for s in recipe.stages)} | set(recipe.tasks):
        create_task(name, recipe.tasks.get(name, {}), None)
    lines = [
        f"recipe {recipe.name}, seed {recipe.seed}",
        f"model: {source}, renderer {recipe.model.renderer}",
        f"engine on cores {_list(cores.engine)}, trainer on cores {_list(cores.trainer)}",
        f"evaluation: {recipe.evaluation.instances} held-out {recipe.evaluation.task} instances, "
        f"temperature {recipe.evaluation.temperature:g}",
    ]
    for stage in recipe.stages:
        budget = " or ".join(_budget(stage))
        if isinstance(stage, SftStage):
            lines.append(
                f"stage {stage.name}: sft on {stage.demonstrations} demonstrations "
                f"({stage.quality:.0%} right), {budget}"
            )
        else:
            lines.append(
                f"stage {stage.name}: agentic_rl, {stage.mode}, groups of {stage.group_size}, "
                f"{stage.groups_per_batch} groups per update, {budget}"
            )
    return lines


def run_recipe(recipe: Recipe, run_dir: Path, *, resume: bool, no_isolation: bool) -> int:
    """Run `recipe` in `run_dir`; returns the process's exit code.

    Raises:
        UserError: anything a person can mend.
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
    _event_loop_runner()(_Run(recipe, run_dir, resume=resume, no_isolation=no_isolation).main())
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
        self.ledger: Ledger
        self.metrics: MetricsWriter
        self.view: LiveView
        self.tasks: dict[str, TaskService]

    # -- the run ----------------------------------------------------------------------------

    async def main(self) -> None:
        recipe = self.recipe
        names = {recipe.evaluation.task, *(stage.task for stage in recipe.stages)}
        async with contextlib.AsyncExitStack() as stack:
            opener = Ledger.resume if self.resume else Ledger.create
            self.ledger = stack.enter_context(opener(self.dir))
            self.metrics = stack.enter_context(MetricsWriter(self.dir, resume=self.resume))
            stack.push_async_callback(self.cluster.close)
            _, self.tasks = await stack.enter_async_context(
                open_tasks(recipe, names, no_isolation=self.no_isolation)
            )
            self.view = stack.enter_context(
                LiveView(
                    recipe.name,
                    [s.name for s in recipe.stages],
                    self.dir,
                    budgets={s.name: s.seconds for s in recipe.stages if s.seconds},
                )
            )
            self.evaluations = [
                {"after": e.label, "low": e.low, "high": e.high, **e.detail}
                for e in self.ledger.evaluations()
            ]
            self.ledger.recover(EVALUATION_STAGE)
            self._summarise("running")
            status = "failed"
            try:
                await self._stages()
                status = "finished"
            except (asyncio.CancelledError, KeyboardInterrupt):
                status = "interrupted"
                raise
            finally:
                self._summarise(status)
        with contextlib.suppress(UserError):
            write_report(self.dir)

    async def _stages(self) -> None:
        recipe = self.recipe
        start = await self._start_checkpoint()
        checkpoints = {START: start}
        async with open_system(
            recipe,
            cluster=self.cluster,
            checkpoint=start,
            version=next_version(self.ledger),
            tasks=self.tasks,
            ledger=self.ledger,
            log_dir=self.dir / "logs",
        ) as system:
            if recipe.evaluation.before:
                await self._evaluate(system, START, start)
            finished = {s.name for s in self.ledger.stages() if s.finished_at is not None}
            previous = START
            for stage in recipe.stages:
                source = checkpoints[stage.start_from or previous]
                target = self.dir / "checkpoints" / stage.name
                if stage.name not in finished:
                    await self._stage(system, stage, source, target)
                checkpoints[stage.name] = target
                previous = stage.name
                if stage.evaluate:
                    await self._evaluate(system, stage.name, target)

    async def _stage(self, system: System, stage: Stage, source: Path, target: Path) -> None:
        self.ledger.stage_started(stage.name)
        unit = "s" if stage.seconds is not None else "updates"
        total = stage.seconds
        if total is None:
            total = stage.steps if isinstance(stage, SftStage) else stage.updates
        self.view.stage_started(stage.name, stage.kind, total, unit)
        started = time.monotonic()
        before = float(self.ledger.get_state(f"seconds:{stage.name}", 0.0))
        try:
            context = StageContext(
                recipe=self.recipe,
                run_dir=self.dir,
                ledger=self.ledger,
                cluster=self.cluster,
                system=system,
                tasks=self.tasks,
                log=self._log,
                progress=self.view.progress,
                message=self.view.message,
            )
            if isinstance(stage, SftStage):
                result = await run_sft(context, stage, source, target)
            else:
                result = await run_agentic_rl(context, stage, source, target)
        except WorkerFailure as failure:
            raise UserError(f"stage {stage.name}: the trainer stopped: {failure.message}") from None
        except WorkerDied as died:
            raise UserError(
                f"stage {stage.name}: {died}; see {self.dir / 'logs'}, then continue with "
                f"--resume {self.dir}"
            ) from died
        seconds = before + time.monotonic() - started
        self.ledger.stage_finished(stage.name, seconds, {"checkpoint": str(target), **result})
        self.view.stage_finished()
        self._summarise("running")

    # -- preparation ------------------------------------------------------------------------

    async def _start_checkpoint(self) -> Path:
        """The checkpoint the first stage starts from, made on the first start."""
        model = self.recipe.model
        if model.init is None:
            from headrace.model.gguf_import import resolve_model

            self.view.message(f"loading {model.path}")
            return await asyncio.to_thread(resolve_model, str(model.path))
        target = self.dir / "checkpoints" / START
        if (target / "config.json").is_file():
            return target
        assert self.recipe.tokenizer is not None  # the recipe's validator saw to it
        from headrace.tokens.training import train_tokenizer

        self.view.message("training the tokenizer")
        task = self.tasks[self.recipe.stages[0].task]
        demonstrations = await demonstrations_of(
            task, self.recipe.tokenizer.demonstrations, self.recipe.seed, 0.5
        )
        texts = [text for d in demonstrations for text in _texts(d.messages)]
        tokenizer = await asyncio.to_thread(
            train_tokenizer, texts, self.recipe.tokenizer.vocab_size
        )
        folder = self.dir / "tokenizer"
        tokenizer.save(folder)
        init = model.init
        config = {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": init.hidden_size,
            "intermediate_size": init.intermediate_size,
            "num_layers": init.num_layers,
            "num_heads": init.num_heads,
            "num_kv_heads": init.num_kv_heads,
            "head_dim": init.hidden_size // init.num_heads,
            "max_positions": init.max_positions,
            "rope_theta": init.rope_theta,
            "tie_embeddings": True,
            "qk_norm": init.family == "qwen3",
            "family": init.family,
        }
        cores = available_cores()
        async with open_trainer(self.cluster, "initialiser", cores, len(cores), self.dir) as worker:
            parameters = await worker.request(
                "create",
                {
                    "config": config,
                    "seed": self.recipe.seed,
                    "path": str(target),
                    "tokenizer": str(folder),
                },
            )
        self.view.message(f"new model: {parameters:,} parameters, {tokenizer.vocab_size} tokens")
        return target

    # -- measuring --------------------------------------------------------------------------

    async def _evaluate(self, system: System, label: str, checkpoint: Path) -> None:
        table = self.recipe.evaluation
        await self._evaluate_at(system, label, label, checkpoint, table.temperature)
        if table.greedy_too:
            await self._evaluate_at(system, f"{label} greedy", label, checkpoint, 0.0)

    async def _evaluate_at(
        self, system: System, label: str, after: str, checkpoint: Path, temperature: float
    ) -> None:
        if any(e["after"] == label for e in self.evaluations):
            return
        table = self.recipe.evaluation
        self.view.stage_started(f"evaluate {label}", "evaluation", table.instances, "instances")
        await system.engine.load_weights(str(checkpoint), next_version(self.ledger))
        result = await evaluate(
            label,
            self._held_out(),
            runner=system.runner,
            ledger=self.ledger,
            temperature=temperature,
            concurrency=table.concurrency,
            progress=self.view.progress,
        )
        low, high = wilson(result["ok"], result["n"])
        record = {"after": label, "low": low, "high": high, **result}
        self.ledger.put_evaluation(
            Evaluation(
                label=label,
                task=table.task,
                stage=after,
                n=result["n"],
                success=result["success"],
                low=low,
                high=high,
                detail=result,
            )
        )
        self.evaluations.append(record)
        self.metrics.log(f"evaluate {label}", 0, {"success": result["success"]})
        self.view.evaluation(record)
        self.view.stage_finished()
        self._summarise("running")

    def _held_out(self) -> list[TaskInstance]:
        """The same instances at every measurement and for every seed of the recipe."""
        table = self.recipe.evaluation
        task = self.tasks[table.task]
        return [task.instance(task.evaluation_seed(i)) for i in range(table.instances)]

    # -- record -----------------------------------------------------------------------------

    def _log(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self.metrics.log(stage, step, metrics)
        self.view.metrics(stage, step, metrics)

    def _summarise(self, status: str) -> None:
        """Rewrite summary.json."""
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
                "wall_s": time.monotonic() - self.started,
                "machine": describe_machine(),
                "stages": [
                    {"name": s.name, "wall_s": s.seconds, "result": s.result} for s in stages
                ],
                "evaluations": self.evaluations,
                "laws": laws,
            },
        )


# -- small pure parts --------------------------------------------------------------------------


def _texts(messages: Any) -> list[str]:
    """Everything readable in a conversation, for tokenizer training."""
    texts = []
    for message in messages:
        if message.get("content"):
            texts.append(message["content"])
        for call in message.get("tool_calls") or []:
            texts += [str(v) for v in json.loads(call["function"]["arguments"]).values()]
    return texts


def _check_model_path(path: str) -> None:
    """Raises UserError when a checkpoint is named that does not exist."""
    if path != "smollm2-135m-instruct" and not os.path.isdir(path):
        raise UserError(
            f"model.path {path}: no such directory; give a checkpoint directory or "
            '"smollm2-135m-instruct"'
        )


def _budget(stage: Stage) -> list[str]:
    parts = []
    count = stage.steps if isinstance(stage, SftStage) else stage.updates
    if count is not None:
        parts.append(f"{count} {'steps' if isinstance(stage, SftStage) else 'updates'}")
    if stage.seconds is not None:
        parts.append(f"{stage.seconds:g} s")
    return parts


def _list(cores: tuple[int, ...]) -> str:
    return ", ".join(map(str, cores))
