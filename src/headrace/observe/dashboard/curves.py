"""Series of a run for the dashboard's charts: rewards per task, metrics, histograms, failures.

Pure functions from a `Run` to JSON-compatible values; every series is thinned to what a screen can
show, so that a long run costs no more than a short one.
"""

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.observe.charts import thin
from headrace.observe.dashboard.overview import evaluations
from headrace.observe.difficulty import pass_rate_labels
from headrace.observe.fates import rule_words, rules_of
from headrace.observe.metrics import MetricRow
from headrace.observe.runs import Run
from headrace.observe.statistics import mean_interval
from headrace.rollout.record.browsing import BrowsingReader

Chart = tuple[str, str, Mapping[str, str], bool]
"""Title, unit, label of every metric in it, whether its axis begins at zero."""

_RL_CHARTS: tuple[Chart, ...] = (
    ("Reward of finished rollouts", "mean", {"reward_mean": "reward"}, True),
    ("Groups with signal", "share", {"signal_share": "share"}, True),
    ("Turns per rollout", "turns", {"turns_mean": "turns"}, True),
    ("Entropy of sampled tokens", "nats", {"entropy": "entropy"}, True),
    ("Loss", "loss", {"loss": "loss"}, False),
    ("Gradient norm before clipping", "norm", {"grad_norm": "norm"}, True),
    ("KL of rollout to new policy, estimated", "nats", {"kl_rollout": "KL"}, False),
    (
        "Trained tokens without gradient (trust region)",
        "share",
        {"masked_low": "ratio too low", "masked_high": "ratio too high"},
        True,
    ),
    ("Effective sample share", "share", {"effective_sample_share": "share"}, True),
    ("Groups generated for each that trained", "groups", {"overgeneration": "groups"}, True),
    (
        "One and the same output",
        "share",
        {"identical_output": "for different problems", "identical_in_group": "within a group"},
        True,
    ),
    ("Learning rate", "rate", {"learning_rate": "rate"}, True),
)
_SUPERVISED_CHARTS: tuple[Chart, ...] = (
    (
        "Loss",
        "loss",
        {"loss": "loss", "language_loss": "language", "mtp_loss": "MTP", "index_loss": "indexer"},
        False,
    ),
    ("Throughput", "tokens/s", {"tokens_per_s": "tokens/s"}, True),
    ("Gradient norm", "norm", {"grad_norm": "norm"}, True),
    ("Learning rate", "rate", {"learning_rate": "rate"}, True),
)
_TARGET = re.compile(r"task\.(.+)\.target")
_MOST_TASKS = 24
"""Tasks of a stage that have a chart of their own."""
_GAP = 4.5
"""Time without a point, in usual distances of points, over which a curve is not drawn."""
_PLACES = range(-9 * 3, 2 * 3)
"""Bars of the mismatch histogram, three for each power of ten."""


def learning(run: Run) -> dict[str, Any]:
    """Reward and evaluation curves per task, then the curves of every stage."""
    return {
        "tasks": _rewards(run),
        "evaluations": evaluations(run),
        "stages": [
            {"stage": s.stage, "start": s.start / 60, "end": s.end / 60} for s in run.spans()
        ],
        "charts": [
            {"stage": str(stage["name"]), "kind": str(stage.get("kind", "")), "charts": charts}
            for stage in run.stages()
            if (charts := _charts(run.rows_of(stage["name"]), str(stage.get("kind", ""))))
        ],
    }


def distributions(run: Run) -> dict[str, Any]:
    """For every RL stage the staleness of trained tokens and how far the two sides disagree."""
    found: list[dict[str, Any]] = []
    for stage in run.stages():
        name, rows = str(stage["name"]), run.rows_of(stage["name"])
        if stage.get("kind") != "agentic_rl":
            continue
        histogram = {} if run.ledger is None else run.ledger.staleness_histogram(name)
        mismatch = {"mismatch_max_abs": "largest", "mismatch_mean_abs": "mean"}
        ratios = {
            "ratio_p99": "99th percentile",
            "ratio_p50": "median",
            "ratio_mean": "mean",
            "ratio_p01": "1st percentile",
        }
        found.append(
            {
                "stage": name,
                "bound": stage.get("staleness"),
                "staleness": [[lag, tokens] for lag, tokens in histogram.items()],
                "mismatch": {
                    label: _magnitudes(r.metrics[key] for r in rows if key in r.metrics)
                    for key, label in mismatch.items()
                },
                "ratio": _series(rows, ratios),
                "mismatch_curve": _series(rows, mismatch),
                "lag": _series(rows, {"lag_max": "largest", "lag_mean": "mean"}),
            }
        )
    return {"stages": found}


def failures(run: Run) -> dict[str, Any]:
    """How rollouts ended, why tokens do not train, where histories forked; with counts."""
    ledger = run.ledger
    if not isinstance(ledger, BrowsingReader):
        return {
            "outcomes": {}, "ends": [], "reasons": [], "drops": {}, "tokens": {}, "forks": {}
        }  # fmt: skip
    with ledger.snapshot():
        return {
            "outcomes": ledger.outcome_counts(),
            "reasons": _reasons(run, ledger),
            "ends": [
                {
                    "stage": f.stage,
                    "task": f.task,
                    "outcome": f.outcome,
                    "reason": f.reason,
                    "count": f.count,
                    "newest": f.newest_id,
                }
                for f in (*ledger.failures(), *ledger.verdicts())
            ],
            "drops": {reason.value: n for reason, n in ledger.drop_counts().items()},
            "tokens": {r.value: n for r, n in ledger.conservation().dropped.items()},
            "forks": ledger.fork_counts(),
        }


def _reasons(run: Run, ledger: BrowsingReader) -> list[dict[str, Any]]:
    """Rollouts that are no clean samples, by RL stage and reason, most frequent first."""
    found: list[dict[str, Any]] = []
    for stage in run.recipe.get("stages") or ():
        if stage.get("kind") != "agentic_rl":
            continue
        name, rules = str(stage["name"]), rules_of(stage)
        for reason, number in ledger.failure_counts(name).items():
            found.append(
                {
                    "stage": name,
                    "reason": reason.value,
                    "whose": reason.fault.value,
                    "count": number,
                    "rule": rule_words(reason, rules),
                }
            )
    return found


def _rewards(run: Run) -> list[dict[str, Any]]:
    """One curve per stage and task: [minutes, mean, low or None, high or None, n] each point; a
    mean of None where nothing finished for long, as between two processes of a run."""
    if not isinstance(run.ledger, BrowsingReader):
        return []
    buckets = run.ledger.reward_buckets()
    if not buckets:
        return []
    started = run.rows[0].time - run.rows[0].elapsed if run.rows else min(b.start for b in buckets)
    curves: dict[tuple[str, str], list[list[Any]]] = {}
    for bucket in buckets:
        interval = mean_interval(bucket.n, bucket.total, bucket.squares)
        low, high = interval if interval is not None else (None, None)
        middle = ((bucket.start + bucket.end) / 2 - started) / 60
        curves.setdefault((bucket.stage, bucket.task), []).append(
            [middle, bucket.total / bucket.n, low, high, bucket.n]
        )
    return [
        {"stage": stage, "task": task, "points": _with_gaps(points)}
        for (stage, task), points in curves.items()
    ]


def _with_gaps(points: Sequence[list[Any]]) -> list[list[Any]]:
    """The points of a curve, and one without a value wherever the next is far away."""
    steps = [after[0] - before[0] for before, after in itertools.pairwise(points)]
    if not steps:
        return list(points)
    far = _GAP * statistics.median(steps)
    found = [points[0]]
    for step, point in zip(steps, points[1:], strict=True):
        if step > far:
            found.append([point[0] - step / 2, None, None, None, 0])
        found.append(point)
    return found


def _charts(rows: Sequence[MetricRow], kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    charts = _SUPERVISED_CHARTS
    if kind == "agentic_rl":
        levels = pass_rate_labels(name for row in rows for name in row.metrics)
        charts = (
            *_RL_CHARTS,
            ("Estimated pass rate by level", "share", levels, True),
            *_ratio_charts(rows),
        )
    for title, unit, names, zero in charts:
        lines = _series(rows, names)
        if lines:
            found.append({"title": title, "unit": unit, "zero": zero, "lines": lines})
    return found


def _ratio_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """What part of the groups each task was to have and had; of stages with several tasks."""
    named = {m[1] for row in rows for name in row.metrics if (m := _TARGET.fullmatch(name))}
    if not named:
        return []
    errors = {"ratio_error": "dispatched", "trained_ratio_error": "trained"}
    charts: list[Chart] = [
        ("Largest distance of a task from its ratio", "share of groups", errors, True)
    ]
    for task in sorted(named)[:_MOST_TASKS]:
        lines = {"target": "target", "share": "dispatched", "trained_share": "trained"}
        names = {f"task.{task}.{key}": label for key, label in lines.items()}
        charts.append((f"Task {task}: target and actual share", "share of groups", names, True))
    return charts


def _series(rows: Sequence[MetricRow], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Those metrics that were logged, over steps."""
    found: list[dict[str, Any]] = []
    for key, label in names.items():
        points = [(float(row.step), row.metrics[key]) for row in rows if key in row.metrics]
        if points:
            found.append({"label": label, "points": [list(point) for point in thin(points)]})
    return found


def _magnitudes(values: Iterable[float]) -> list[list[Any]]:
    """Values counted in steps of 1, 2, 5 times powers of ten: [label, count]; zeros first."""
    zeros, counts = 0, Counter[int]()
    for value in values:
        if value <= 0:
            zeros += 1
            continue
        power = math.floor(math.log10(value))
        lead = value / 10.0**power
        place = 3 * power + (2 if lead >= 5 else 1 if lead >= 2 else 0)
        counts[min(max(place, _PLACES[0]), _PLACES[-1])] += 1
    found: list[list[Any]] = [["0", zeros]] if zeros else []
    if counts:
        found += [
            [f"{(1, 2, 5)[place % 3]}e{place // 3}", counts[place]]
            for place in range(min(counts), max(counts) + 1)
        ]
    return found
