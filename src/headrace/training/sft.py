"""Supervised fine-tuning, driven step by step from outside the trainer's process.

The learning rate rises over the warm-up and falls linearly with the budget, whichever of steps and
seconds is used up first.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.cluster.types import WorkerHandle
from headrace.recipe import SftStage
from headrace.training.batch import Sample

STEPS_PER_REQUEST = 5
FINAL_SHARE = 0.05
STEP_TIMEOUT_S = 3600.0


def done_fraction(stage: SftStage, step: int, elapsed_s: float) -> float:
    """How much of the budget is used, in [0, 1]."""
    shares = [0.0]
    if stage.steps is not None:
        shares.append(step / stage.steps)
    if stage.seconds is not None:
        shares.append(elapsed_s / stage.seconds)
    return min(1.0, max(shares))


def learning_rate(stage: SftStage, step: int, done: float) -> float:
    """Rate of the step after `step` at budget share `done`."""
    warmup = min(1.0, (step + 1) / (stage.warmup_steps + 1))
    return stage.learning_rate * warmup * max(FINAL_SHARE, 1.0 - done)


async def train(
    stage: SftStage,
    *,
    trainer: WorkerHandle,
    data: list[Sample],
    seed: int,
    report: Callable[[int, float, dict[str, float]], Awaitable[None]],
) -> int:
    """Run the stage on a `TrainerWorker` with a model loaded.

    Args:
        report: called with (step, budget share, metrics) after every few steps.

    Returns:
        Steps done.

    Raises:
        WorkerDied, WorkerFailure: the trainer ended or refused.
    """
    wire: list[Any] = msgspec.to_builtins(data, builtin_types=(bytes,))
    for start in range(0, len(wire), 1000):
        await trainer.request("data", {"samples": wire[start : start + 1000], "seed": seed})
    started = time.monotonic()
    step = 0
    while (done := done_fraction(stage, step, time.monotonic() - started)) < 1.0:
        count = STEPS_PER_REQUEST
        if stage.steps is not None:
            count = min(count, stage.steps - step)
        rates = [learning_rate(stage, step + i, done) for i in range(count)]
        metrics = await trainer.request(
            "supervised",
            {"batch_tokens": stage.batch_tokens, "learning_rates": rates},
            timeout_s=STEP_TIMEOUT_S,
        )
        step += count
        await report(step, done_fraction(stage, step, time.monotonic() - started), metrics)
    return step
