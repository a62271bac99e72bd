"""The loop of every supervised stage, driven from outside the trainer's process.

A budget in steps makes a run a function of its recipe alone: the learning rate of a step and the
phase it belongs to depend on the step's number only, so an interrupted stage that goes on from its
last checkpoint ends with the same bits. A budget in seconds follows the clock.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.cluster.types import Requests
from headrace.training.batch import Sample

STEPS_PER_REQUEST = 5
STEP_TIMEOUT_S = 3600.0
_SAMPLES_PER_REQUEST = 1000


class Budget(NamedTuple):
    """How long a stage trains and at which rates.

    Attributes:
        steps: optimizer steps, or None.
        seconds: wall clock, or None; one of the two is given.
        learning_rate: peak.
        warmup_steps: of linear rise.
        final_share: of the peak that is left at the end; the fall is linear.
    """

    steps: int | None
    seconds: float | None
    learning_rate: float
    warmup_steps: int
    final_share: float

    def done(self, step: int, elapsed_s: float) -> float:
        """Used share in [0, 1] before step number `step`: steps or seconds, the larger."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.seconds is not None:
            shares.append(elapsed_s / self.seconds)
        return min(1.0, max(shares))

    def rate(self, step: int, elapsed_s: float) -> float:
        """Learning rate of step number `step` (from 0)."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        left = 1.0 - (1.0 - self.final_share) * self.done(step, elapsed_s)
        return self.learning_rate * warmup * left


class Phase(NamedTuple):
    """A part of a stage with its own data or context length.

    Attributes:
        until: share of the budget at which it ends; the last one's is 1.
        request: what the trainer is sent when it begins, see `TrainerWorker._do_phase`.
    """

    until: float
    request: dict[str, Any]


class Position(msgspec.Struct):
    """Where a stage stands. `elapsed_s` includes earlier processes."""

    step: int = 0
    elapsed_s: float = 0.0


async def train(
    budget: Budget,
    *,
    worker: Requests,
    phases: Sequence[Phase],
    checkpoint: str,
    checkpoint_every: int,
    keep: int,
    report: Callable[[Position, float, dict[str, float]], Awaitable[None]],
) -> Position:
    """Run a stage on a trainer with a model loaded and, for in-memory data, `send_data` done.

    Args:
        budget: when it ends.
        worker: a `TrainerWorker`, or several as one.
        phases: at least one.
        checkpoint: folder of resumable checkpoints; one that is there is gone on from.
        checkpoint_every: steps between them.
        keep: how many stay.
        report: called with (position, budget share, metrics) after every few steps.

    Returns:
        The final position.

    Raises:
        WorkerDied, WorkerFailure: the trainer ended or refused.
    """
    saved = await worker.request("progress", {"checkpoint": checkpoint})
    position = Position() if saved is None else msgspec.convert(saved, Position)
    current = _phase_at(phases, budget.done(position.step, position.elapsed_s))
    await worker.request("phase", phases[current].request, timeout_s=STEP_TIMEOUT_S)
    if saved is not None:
        await worker.request("restore", {"checkpoint": checkpoint}, timeout_s=STEP_TIMEOUT_S)
    before, started, saved_at = position.elapsed_s, time.monotonic(), position.step
    while (done := budget.done(position.step, position.elapsed_s)) < 1.0:
        wanted = _phase_at(phases, done)
        if wanted != current:
            current = wanted
            await worker.request("phase", phases[current].request, timeout_s=STEP_TIMEOUT_S)
        count = min(
            _steps_ahead(budget, phases[current], position.step),
            saved_at + checkpoint_every - position.step,
        )
        rates = [budget.rate(position.step + i, position.elapsed_s) for i in range(count)]
        metrics = await worker.request(
            "supervised", {"learning_rates": rates}, timeout_s=STEP_TIMEOUT_S
        )
        position.step += count
        position.elapsed_s = before + time.monotonic() - started
        if position.step == saved_at + checkpoint_every:
            saved_at = position.step
            await worker.request(
                "checkpoint",
                {
                    "checkpoint": checkpoint,
                    "position": msgspec.to_builtins(position),
                    "keep": keep,
                },
                timeout_s=STEP_TIMEOUT_S,
            )
        await report(position, budget.done(position.step, position.elapsed_s), metrics)
    return position


async def send_data(worker: Requests, samples: Sequence[Sample]) -> None:
    """Give the trainer in-memory samples, for phases with `"stream": {"kind": "samples"}`."""
    wire: list[Any] = msgspec.to_builtins(samples, builtin_types=(bytes,))
    for start in range(0, len(wire), _SAMPLES_PER_REQUEST):
        await worker.request("data", {"samples": wire[start : start + _SAMPLES_PER_REQUEST]})


def _phase_at(phases: Sequence[Phase], done: float) -> int:
    return next((i for i, phase in enumerate(phases) if done < phase.until), len(phases) - 1)


def _steps_ahead(budget: Budget, phase: Phase, step: int) -> int:
    """Steps of the next request: none may belong to the next phase or lie beyond the budget."""
    count = STEPS_PER_REQUEST
    if budget.steps is not None:
        # Where done(step) first reaches the phase's end, as `_phase_at` sees it.
        ahead = 1
        while ahead < count and (step + ahead) / budget.steps < min(1.0, phase.until):
            ahead += 1
        count = ahead
    return count
