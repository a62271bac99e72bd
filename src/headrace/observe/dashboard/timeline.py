"""Who waited for whom in an RL stage: what trainer and engine did with every second.

Pure functions from metric rows; a row says how its update's seconds were spent. Long stages are
summed into a fixed number of columns.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.observe.metrics import MetricRow
from headrace.observe.runs import Run

COLUMNS = 160
"""Columns of the timeline."""
_RATES = ("gen_tokens_per_s", "train_tokens_per_s", "queue_groups", "rollouts_in_flight")
_HELD = re.compile(r"held\.(\w+)_s")
"""Metrics that say for how many seconds no rollout was begun, by reason."""


def timeline(run: Run) -> dict[str, Any]:
    """For every RL stage what both sides did over time, in at most COLUMNS columns."""
    return {
        "stages": [
            {"stage": str(stage["name"]), **found}
            for stage in run.stages()
            if (found := _timeline(run.rows_of(stage["name"]))) is not None
        ]
    }


def sides(rows: Sequence[MetricRow]) -> dict[str, float] | None:
    """Who waited for whom in an RL stage, in seconds; None where it was not logged.

    Returns:
        "seconds" observed, of which the trainer spent "update", "publish" and "wait" (for
        rollouts), the rest being "other"; and, where that was logged, the engine was "generating"
        or "idle".
    """
    total: dict[str, float] = defaultdict(float)
    for row in _measured(rows):
        for name, value in _split(row.metrics).items():
            total[name] += value
    return dict(total) or None


def _split(metrics: Mapping[str, float]) -> dict[str, float]:
    """One update's seconds by what both sides did; keys as in `sides`."""
    seconds = metrics["step_s"]
    wait = min(metrics["wait_s"], seconds)
    publish = min(metrics.get("publish_s", 0.0), seconds - wait)
    rest = seconds - wait - publish
    update = min(metrics.get("update_s", rest), rest)
    split = {
        "seconds": seconds,
        "wait": wait,
        "publish": publish,
        "update": update,
        "other": rest - update,
    }
    if "engine_busy" in metrics:
        split["generating"] = metrics["engine_busy"] * seconds
        split["idle"] = seconds - split["generating"]
    return split


def _timeline(rows: Sequence[MetricRow]) -> dict[str, Any] | None:
    measured = _measured(rows)
    if not measured:
        return None
    start = max(measured[0].elapsed - measured[0].metrics["step_s"], 0.0)
    end = measured[-1].elapsed
    width = max((end - start) / COLUMNS, 1e-6)
    columns: list[dict[str, float]] = [defaultdict(float) for _ in range(COLUMNS)]
    for row in measured:
        _spread(row, columns, start, width)
    middles = [(start + (i + 0.5) * width) / 60 for i in range(COLUMNS)]
    return {
        "start": start / 60,
        "end": end / 60,
        # Shares of the column's time: update, publish, wait, generating; None: nothing observed.
        "columns": [
            [
                *(_share(column, name, "seconds") for name in ("update", "publish", "wait")),
                _share(column, "generating", "generating", "idle"),
            ]
            for column in columns
        ],
        # Points; where nothing was observed, the value is None.
        "rates": {name: _curve(middles, columns, name, f"{name} s") for name in _RATES},
        "held": {
            reason: _curve(middles, columns, f"held {reason}", "held") for reason in _held(measured)
        },
        "totals": sides(measured),
    }


def _curve(
    middles: Sequence[float], columns: Sequence[Mapping[str, float]], name: str, weight: str
) -> list[list[float | None]]:
    """The weighted mean of something in every column; nothing where it never was logged."""
    points: list[list[float | None]] = [
        [middle, round(column[name] / column[weight], 4) if column.get(weight) else None]
        for middle, column in zip(middles, columns, strict=True)
    ]
    return points if any(value is not None for _, value in points) else []


def _held(rows: Sequence[MetricRow]) -> list[str]:
    """Reasons for which rollouts were held back at some time."""
    found = {
        match[1]
        for row in rows
        for name, value in row.metrics.items()
        if value > 0 and (match := _HELD.fullmatch(name)) is not None
    }
    return sorted(found)


def _spread(
    row: MetricRow, columns: Sequence[dict[str, float]], start: float, width: float
) -> None:
    """Add one update's seconds to the columns that it ran in, and its rates weighted by them."""
    split = _split(row.metrics)
    seconds = split["seconds"]
    if seconds <= 0:
        return
    begin, newest = row.elapsed - seconds, len(columns) - 1
    first = min(max(int((begin - start) / width), 0), newest)
    last = min(max(int((row.elapsed - start) / width), first), newest)
    for index in range(first, last + 1):
        left = start + index * width
        share = (min(row.elapsed, left + width) - max(begin, left)) / seconds
        if share <= 0:
            continue
        column = columns[index]
        for name, value in split.items():
            column[name] += value * share
        for name in _RATES:
            if name in row.metrics:
                column[name] += row.metrics[name] * seconds * share
                column[f"{name} s"] += seconds * share
        for name, value in row.metrics.items():
            if (match := _HELD.fullmatch(name)) is not None:
                # A hold that began before the row's own seconds is still reported in it.
                column[f"held {match[1]}"] += min(value, seconds) * share
        if "held_s" in row.metrics:
            column["held"] += seconds * share


def _measured(rows: Sequence[MetricRow]) -> list[MetricRow]:
    return [row for row in rows if "step_s" in row.metrics and "wait_s" in row.metrics]


def _share(column: Mapping[str, float], name: str, *parts: str) -> float | None:
    whole = sum(column.get(part, 0.0) for part in parts)
    return round(column.get(name, 0.0) / whole, 4) if whole else None
