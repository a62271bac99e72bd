"""What the dashboard says about a run as a whole: how far it is and what it measured.

Pure functions from a `Run` to JSON-compatible values of bounded size. What numbers mean is decided
in `observe.runs`, `observe.units` and the ledger; this only arranges them.
"""

import time
from typing import Any

from headrace.observe.dashboard.timeline import sides
from headrace.observe.laws import LAWS, laws_of
from headrace.observe.runs import Comparison, Run
from headrace.observe.units import label_of, stage_of
from headrace.rollout.failures.trips import paused, tripped

SILENT_S = 120.0
"""Seconds without a write after which a run that says "running" may have died."""
_EVALUATED = ("n", "success", "low", "high")
_NEWEST = (
    "reward_mean",
    "loss",
    "lag_mean",
    "queue_groups",
    "rollouts_in_flight",
    "gen_tokens_per_s",
    "train_tokens_per_s",
    "tokens_per_s",
)


def overview(run: Run, last_change: float | None) -> dict[str, Any]:
    """Head, stages, evaluations, token accounting and laws.

    Args:
        run: what to describe.
        last_change: unix time of the newest write to it, if any.
    """
    going = run.status in ("running", "unfinished")
    silent = going and last_change is not None and time.time() - last_change > SILENT_S
    headline = run.headline()
    return {
        "name": run.name,
        "description": str(run.recipe.get("description") or ""),
        "directory": run.path.resolve().name,
        "status": run.status,
        "going": going,
        "silent": silent,
        "last_change": last_change,
        "seed": run.summary.get("seed", run.recipe.get("seed")),
        "wall_s": run.summary.get("wall_s") or (run.rows[-1].elapsed if run.rows else None),
        "stages": [_stage(run, stage) for stage in run.stages()],
        "evaluations": evaluations(run),
        "comparisons": [_comparison(run, c) for c in run.comparisons()],
        "headline": None if headline is None else _comparison(run, headline),
        "measurements": [
            {
                "after": m.after,
                "task": m.task,
                "words": m.words,
                "n": m.n,
                "low": None if m.bounds is None else m.bounds[0],
                "high": None if m.bounds is None else m.bounds[1],
            }
            for m in run.measurements
        ],
        "tokens": _tokens(run),
        "outcomes": {} if run.ledger is None else run.ledger.outcome_counts(),
        "forks": {} if run.ledger is None else run.ledger.fork_counts(),
        "laws": [
            {"law": law, "held": held, "detail": detail, "says": LAWS.get(law, "")}
            for law, held, detail in laws_of(run.summary)
        ],
        "problem": run.missing_rollouts,
        "paused": _pause(run),
    }


def evaluations(run: Run) -> list[dict[str, Any]]:
    """Evaluations by rollouts in order, each with its interval and its moment in minutes."""
    moments = run.measured_at()
    found: list[dict[str, Any]] = []
    for record in run.evaluations:
        at = moments.get(stage_of(record))
        found.append(
            {
                "label": label_of(record),
                "task": str(record.get("task", "?")),
                **{key: record.get(key) for key in _EVALUATED},
                "greedy": record.get("temperature") == 0,
                "minutes": None if at is None else at / 60,
            }
        )
    return found


def _comparison(run: Run, c: Comparison) -> dict[str, Any]:
    return {
        "after": {"label": run.label(c.after), **{k: c.after.get(k) for k in _EVALUATED}},
        "stage": c.stage,
        "against": f"stage {c.rival} (same start)" if c.rival else run.label(c.before),
        "difference": c.change.difference,
        "low": c.change.low,
        "high": c.change.high,
        "n": c.change.n,
        "gained": c.change.gained,
        "lost": c.change.lost,
    }


def _stage(run: Run, stage: dict[str, Any]) -> dict[str, Any]:
    rows = run.rows_of(stage["name"])
    newest = rows[-1].metrics if rows else {}
    return {
        "name": str(stage["name"]),
        "kind": str(stage.get("kind", "")),
        "wall_s": stage["wall_s"],
        "step": rows[-1].step if rows else None,
        "sides": sides(rows),
        "newest": {key: newest[key] for key in _NEWEST if key in newest},
    }


def _pause(run: Run) -> str:
    """What the run waits for; "" when it waits for nobody."""
    trip = None if run.ledger is None else tripped(run.ledger)
    return "" if trip is None else f"Run {paused(trip, run.path)}"


def _tokens(run: Run) -> dict[str, Any] | None:
    if run.ledger is None or not run.has_rollouts:
        return None
    account = run.ledger.conservation()
    return {
        "sampled": account.sampled,
        "trained": account.trained,
        "pending": account.pending,
        "dropped": {reason.value: n for reason, n in sorted(account.dropped.items())},
        "closes": account.closes,
    }
