"""What the metrics of an RL stage say about the difficulty of its problems, in words and curves.

Pure functions of metric names and values; how they come about is the rollout side's business.
"""

import re
from collections.abc import Iterable, Mapping

from headrace.observe.units import percent

_MOST_LEVELS = 4
"""Levels put in words; curves show all."""
_RATE = re.compile(r"difficulty\.(?P<task>.+)\.level(?P<level>\d+)\.pass_rate")


def pass_rate_labels(names: Iterable[str]) -> dict[str, str]:
    """Names of the metrics that are a level's pass rate, each with a label, in order."""
    found = sorted(
        (match["task"], int(match["level"]), name)
        for name in set(names)
        if (match := _RATE.fullmatch(name)) is not None
    )
    one = len({task for task, _, _ in found}) == 1
    return {
        name: f"level {level}" if one else f"{task} level {level}" for task, level, name in found
    }


def difficulty_words(metrics: Mapping[str, float]) -> str | None:
    """How much of what is generated teaches something, and pass rates by level, on one line; None
    when nothing is known of either."""
    parts = []
    if "signal_share" in metrics:
        parts.append(f"signal in {percent(metrics['signal_share'], 0)} of groups")
    if "overgeneration" in metrics:
        parts.append(f"{metrics['overgeneration']:.1f} generated per trained one")
    labels = pass_rate_labels(metrics)
    for name, label in list(labels.items())[:_MOST_LEVELS]:
        place = name.removesuffix("pass_rate")
        rate = percent(metrics[name], 0)
        if f"{place}low" in metrics and f"{place}high" in metrics:
            low, high = (100 * metrics[place + end] for end in ("low", "high"))
            rate += f" ({low:.0f}–{high:.0f}%)"
        parts.append(f"{label} passed {rate}")
    if len(labels) > _MOST_LEVELS:
        parts.append(f"{len(labels) - _MOST_LEVELS} more levels")
    return " · ".join(parts) or None
