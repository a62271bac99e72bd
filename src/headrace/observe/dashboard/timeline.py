"""Who waited for whom in an RL stage: what trainer and engine did with every second.

Pure functions from metric rows; a row says how its update's seconds were spent. Long stages are
summed into a fixed number of columns.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.observe.metrics import MetricRow
from headrace.observe.runs import Run

COLUMNS = 160
"""Columns of the timeline."""
_RATES = ("gen_tokens_per_s", "train_tokens_per_s", "queue_groups", "rollouts_in_flight")


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
        "rates": {
            name: [
                [middle, column[name] / column[f"{name} s"]]
                for middle, column in zip(middles, columns, strict=True)
                if column[f"{name} s"]
            ]
            for name in _RATES
        },
        "totals": sides(measured),
    }


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


def _measured(rows: Sequence[MetricRow]) -> list[MetricRow]:
    return [row for row in rows if "step_s" in row.metrics and "wait_s" in row.metrics]


def _share(column: Mapping[str, float], name: str, *parts: str) -> float | None:
    whole = sum(column.get(part, 0.0) for part in parts)
    return round(column.get(name, 0.0) / whole, 4) if whole else None
