"""Held-out measurement of an RL stage's weights while it goes on training.

An engine of its own holds the weights of one published version for as long as they are measured, so
every token of an evaluation comes from exactly that version. What is still to be measured is in the
ledger: a run that was killed goes on with it.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from headrace.model.directory_swap import replaced_directory
from headrace.recipe import AgenticRlStage, EvaluationTable, StageEvaluationTable
from headrace.rollout.evaluation import STAGE as EVALUATION_STAGE
from headrace.rollout.evaluation import evaluate
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import Publication, Recovery
from headrace.stages.context import StageContext
from headrace.stages.evaluating import keep_evaluation
from headrace.stages.held_out import held_out_instances
from headrace.system import System
from headrace.training.early_stop import Score, best_score, early_stop

OpenSystem = Callable[[Path, int], AbstractAsyncContextManager[System]]
"""Starts a system of its own over a checkpoint, stamped with a version."""


class Pin(msgspec.Struct, frozen=True):
    """Published weights that are to be measured; their checkpoint stays until they are."""

    step: int
    version: int
    path: str


class EvaluationBeside:
    """Measures pinned versions, one after the other. Start it, then `close` it.

    One version is measured and one waits; a newer one takes the place of the one that waits, which
    is passed over. So measurements never pile up behind training.

    Args:
        context, stage: what for.
        table: of the stage.
        held_out: the recipe's, whose instances and temperature count.
        open_system: starts what generates, with the first weights that are measured.
    """

    def __init__(
        self,
        context: StageContext,
        stage: AgenticRlStage,
        table: StageEvaluationTable,
        held_out: EvaluationTable,
        open_system: OpenSystem,
    ) -> None:
        self._context = context
        self._stage = stage
        self._table = table
        self._held_out = held_out
        self._open_system = open_system
        self._best = context.run_dir / "checkpoints" / f"{stage.name}-best"
        self._pins: list[Pin] = []
        self._pins_key = f"evaluate:{stage.name}"
        self._best_key = f"best:{stage.name}"
        self._pinned = asyncio.Event()
        self._measured = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._stop = early_stop(stage.stop, self.scores())

    def resume(self, recovery: Recovery) -> None:
        """Take up what a crashed process was to measure, as far as its weights are there."""
        ledger = self._context.ledger
        known = msgspec.convert(ledger.get_state(self._pins_key, []), list[Pin])
        self._pins = [p for p in known if p.step <= recovery.step and Path(p.path).is_dir()]
        if self._pins:
            ledger.recover(EVALUATION_STAGE)

    def start(self) -> None:
        """Begin to measure."""
        self._running = asyncio.create_task(self._run(), name=f"evaluation of {self._stage.name}")
        self._running.add_done_callback(lambda _: self._measured.set())
        self._pinned.set()

    async def close(self) -> None:
        """Give up what is being measured; the ledger says where to go on."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    # -- what is measured -------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the weights after `step` updates are to be measured."""
        return step % self._table.every == 0

    def pin(self, step: int, version: int, path: Path) -> None:
        """Have a published version measured. Part of the transaction that records it."""
        if len(self._pins) > 1:
            passed = self._pins.pop()
            self._context.message(
                f"stage {self._stage.name}: update {passed.step} is not measured, as measuring "
                f"takes longer than {self._table.every} updates"
            )
        self._pins.append(Pin(step, version, str(path)))
        self._save_pins()
        self._pinned.set()

    def pin_last(self, last: Publication) -> None:
        """Have the last version measured, too, whatever its step; nothing is passed over for it."""
        measured = {score.step for score in self.scores()} | {pin.step for pin in self._pins}
        if last.step not in measured:
            self._pins.append(Pin(last.step, last.version, last.path))
            self._save_pins()
            self._pinned.set()

    def pinned(self) -> set[Path]:
        """Checkpoints that must stay."""
        return {Path(pin.path) for pin in self._pins}

    def _save_pins(self) -> None:
        self._context.ledger.put_state(self._pins_key, msgspec.to_builtins(self._pins))

    # -- what comes of it -------------------------------------------------------------------

    def scores(self) -> list[Score]:
        """Everything measured so far, in order of steps."""
        tasks = self._held_out.task_names
        return measured_scores(self._context.ledger, self._stage.name, tasks, self._table.score)

    def stop(self) -> str | None:
        """Why the stage ends early, or None.

        Raises:
            Exception: what a measurement failed with.
        """
        if self._running is not None and self._running.done():
            self._running.result()
        return self._stop

    async def drain(self) -> None:
        """Wait until everything pinned is measured.

        Raises:
            Exception: what a measurement failed with.
        """
        while self._pins:
            self.stop()
            self._measured.clear()
            await self._measured.wait()

    def best(self) -> tuple[Score, Path] | None:
        """The best weights measured, with their score; None when none were kept."""
        kept = self._context.ledger.get_state(self._best_key)
        if kept is None or not self._best.is_dir():
            return None
        return Score(*kept), self._best

    async def _run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            system: System | None = None
            while True:
                self._pinned.clear()
                if not self._pins:
                    await self._pinned.wait()
                    continue
                pin = self._pins[0]
                if system is None:
                    opened = self._open_system(Path(pin.path), pin.version)
                    system = await stack.enter_async_context(opened)
                else:  # nothing runs on it now
                    await system.engine.load_weights(pin.path, pin.version)
                await self._measure(system, pin)
                await self._keep_best(pin)
                self._pins.remove(pin)
                self._save_pins()
                self._stop = early_stop(self._stage.stop, self.scores())
                self._measured.set()

    async def _measure(self, system: System, pin: Pin) -> None:
        context, label = self._context, f"{self._stage.name}@{pin.step}"
        done = {(e.label, e.task) for e in context.ledger.evaluations()}
        for task in self._held_out.task_names:
            if (label, task) in done:
                continue
            instances = held_out_instances(context.tasks[task], self._held_out)
            result = await evaluate(
                label,
                instances[: self._table.instances],
                runner=system.runner,
                ledger=context.ledger,
                temperature=self._held_out.temperature,
                concurrency=self._table.concurrency,
                progress=lambda _: None,
                seed=context.recipe.seed,
            )
            result |= {"step": pin.step, "version": pin.version}
            context.evaluated(keep_evaluation(context.ledger, label, self._stage.name, result))

    async def _keep_best(self, pin: Pin) -> None:
        best = best_score(self.scores())
        if not self._stage.keeps_best or best is None or best.step != pin.step:
            return
        await asyncio.to_thread(copy_checkpoint, Path(pin.path), self._best)
        self._context.ledger.put_state(self._best_key, list(best))


def measured_scores(ledger: Ledger, stage: str, tasks: tuple[str, ...], which: str) -> list[Score]:
    """Scores of a stage's weights, in order of steps.

    Args:
        ledger: of the run.
        stage: name of the recipe stage.
        tasks: that are measured; a step counts once all of them were.
        which: the task that counts, or "mean" of all.
    """
    found: dict[int, dict[str, float]] = {}
    for e in ledger.evaluations():
        # An environment that always failed says nothing of the weights.
        if e.stage == stage and "step" in e.detail and e.n > 0:
            found.setdefault(e.detail["step"], {})[e.task] = e.success
    return [
        Score(step, sum(rates.values()) / len(rates) if which == "mean" else rates[which])
        for step, rates in sorted(found.items())
        if rates.keys() >= set(tasks)
    ]


def copy_checkpoint(source: Path, target: Path) -> None:
    """Replace `target` by a checkpoint's weights and tokenizer, without optimizer state."""
    with replaced_directory(target) as draft:
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns("*.pt"), dirs_exist_ok=True)
