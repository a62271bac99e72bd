"""When measured scores end a stage, and which of them is the best. Pure functions.

A score is a success rate in [0, 1] of weights at one step; how it was measured is not known here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.recipe import StopTable


class Score(NamedTuple):
    """What the weights after `step` updates reached."""

    step: int
    value: float


def best_score(scores: Sequence[Score]) -> Score | None:
    """The highest score, of equal ones the earliest; None without any."""
    return max(scores, key=lambda score: (score.value, -score.step), default=None)


def without_improvement(scores: Sequence[Score], min_gain: float) -> int:
    """How many scores at the end brought no improvement.

    A score improves when it exceeds the last one that did by more than `min_gain`; the first one
    always does.

    | scores, in order of steps | min_gain | count |
    |---------------------------|----------|-------|
    | 0.1 0.3 0.2 0.3           | 0        | 2     |
    | 0.1 0.3 0.2 0.4           | 0        | 0     |
    | 0.10 0.14 0.18            | 0.05     | 0     |
    | 0.10 0.14 0.15            | 0.05     | 2     |
    """
    count, held = 0, None
    for score in sorted(scores):
        if held is None or score.value > held + min_gain:
            count, held = 0, score.value
        else:
            count += 1
    return count


def early_stop(table: StopTable | None, scores: Sequence[Score]) -> str | None:
    """The rule, by recipe key, that ends the stage now; None: it goes on."""
    if table is None:
        return None
    if table.score is not None and any(score.value >= table.score for score in scores):
        return "score"
    if table.patience is not None and without_improvement(scores, table.min_gain) >= table.patience:
        return "patience"
    return None
