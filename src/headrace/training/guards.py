"""What to do with a step whose numbers look wrong: pure policy, no tensors.

A step is judged after its gradients are known and before they touch the weights, so a bad one can
be left out as if it had never been drawn.
"""

import math
import statistics
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from headrace.errors import UserError

_MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""
_SMALLEST_SHARE = 0.01
"""Least deviation as a share of the median: a loss that hardly moves must not make every wiggle a
spike."""
_SMALLEST_DEVIATION = 1e-4
"""The same for losses near zero."""


class GuardConfig(NamedTuple):
    """Limits of one stage.

    Attributes:
        bad_steps: skipped steps in a row after which training stops.
        spike: what a loss spike does: nothing, skip the step, or stop training.
        deviations: a loss above the window's median by more robust standard deviations is a spike.
        window: applied steps the median is taken over.
        warmup: applied steps before spikes are looked for; losses fall too fast at first.
    """

    bad_steps: int = 3
    spike: Literal["off", "skip", "stop"] = "skip"
    deviations: float = 8.0
    window: int = 64
    warmup: int = 20


class GuardState(msgspec.Struct, frozen=True):
    """What a guard remembers; part of a checkpoint.

    Attributes:
        losses: of the last applied steps, oldest first.
        applied: steps applied so far.
        bad_in_row: steps skipped since the last applied one.
        skipped: steps skipped so far.
    """

    losses: tuple[float, ...] = ()
    applied: int = 0
    bad_in_row: int = 0
    skipped: int = 0


class Verdict(Enum):
    """What to do with a step."""

    APPLY = "apply"
    SKIP = "skip"
    STOP = "stop"


class Judgement(NamedTuple):
    """A verdict, its reason in words ("" when applied), and the state after it."""

    verdict: Verdict
    reason: str
    state: GuardState


class TrainingStopped(UserError):
    """A guard ended training; the weights are those of the last good step."""


def judge(config: GuardConfig, state: GuardState, loss: float, gradient_norm: float) -> Judgement:
    """Look at a step's loss and gradient norm."""
    reason = _problem(config, state, loss, gradient_norm)
    if not reason:
        losses = (*state.losses, loss)[-config.window :]
        return Judgement(Verdict.APPLY, "", GuardState(losses, state.applied + 1, 0, state.skipped))
    after = msgspec.structs.replace(
        state, bad_in_row=state.bad_in_row + 1, skipped=state.skipped + 1
    )
    spike = math.isfinite(loss) and math.isfinite(gradient_norm)
    if after.bad_in_row >= config.bad_steps:
        remedy = "lower the learning rate or look at the data"
        if spike:  # What stays after several batches is the weights' own and may be trained away.
            remedy += ', or train on with spike = "off"'
        return Judgement(
            Verdict.STOP,
            f"{after.bad_in_row} bad steps in a row, the last: {reason}; {remedy}",
            after,
        )
    if spike and config.spike == "stop":
        return Judgement(
            Verdict.STOP, f'{reason}; spike = "skip" would leave such steps out', after
        )
    return Judgement(Verdict.SKIP, reason, after)


def _problem(config: GuardConfig, state: GuardState, loss: float, gradient_norm: float) -> str:
    """What is wrong, or ""."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        return f"loss {loss:g}, gradient norm {gradient_norm:g}"
    if config.spike == "off" or state.applied < config.warmup or len(state.losses) < 2:
        return ""
    median = statistics.median(state.losses)
    spread = statistics.median(abs(x - median) for x in state.losses)
    deviation = max(_MAD_TO_DEVIATION * spread, _SMALLEST_SHARE * abs(median), _SMALLEST_DEVIATION)
    if loss <= median + config.deviations * deviation:
        return ""
    return (
        f"loss {loss:.4g} is {(loss - median) / deviation:.3g} deviations above the recent "
        f"median {median:.4g}"
    )
