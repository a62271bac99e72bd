"""What the dashboard's charts are drawn from, beside what test_dashboard asks over HTTP."""

from pathlib import Path

from headrace.observe.dashboard import curves
from headrace.observe.dashboard.timeline import _timeline, timeline
from headrace.observe.metrics import MetricRow, MetricsWriter
from headrace.observe.runs import open_run


def test_the_timeline_says_why_no_rollout_was_begun(finished_run: Path) -> None:
    with open_run(finished_run) as run:
        (stage,) = timeline(run)["stages"]
        seconds = [r.metrics["step_s"] for r in run.rows_of("rl")]
    assert set(stage["held"]) == {"ready", "concurrency"}, "what never held is no line"
    shares = [share for _, share in stage["held"]["ready"] if share is not None]
    assert 0.4 / max(seconds) - 1e-3 <= min(shares) <= max(shares) <= 0.4 / min(seconds) + 1e-3
    # Between the rows of this run nothing is known, and nothing is drawn.
    assert None in [share for _, share in stage["held"]["ready"]]
    assert stage["rates"]["queue_groups"][0][1] is not None


def test_a_metric_that_was_never_logged_is_no_curve() -> None:
    row = MetricRow(10.0, 10.0, "rl", 1, {"step_s": 2.0, "wait_s": 0.5, "gen_tokens_per_s": 7.0})
    stage = _timeline([row])
    assert stage is not None
    assert (stage["held"], stage["rates"]["queue_groups"]) == ({}, [])
    assert {value for _, value in stage["rates"]["gen_tokens_per_s"]} == {7.0}


def test_tasks_have_their_shares_beside_their_targets(finished_run: Path) -> None:
    with MetricsWriter(finished_run, resume=True, sinks=[]) as rows:
        for step in (13, 14):
            shares = {"target": 0.25, "share": 0.25 + 0.01 * step, "rollouts_per_s": 1.0}
            found = {f"task.a.b.{key}": value for key, value in shares.items()}
            rows.log("rl", step, {**found, "ratio_error": 0.01 * step})
    with open_run(finished_run) as run:
        (charts,) = [s["charts"] for s in curves.learning(run)["charts"] if s["stage"] == "rl"]
    by_title = {
        chart["title"]: {x["label"]: x["points"] for x in chart["lines"]} for chart in charts
    }
    assert by_title["Task a.b: target and actual share"] == {
        "target": [[13, 0.25], [14, 0.25]],
        "dispatched": [[13, 0.38], [14, 0.39]],
    }
    assert by_title["Largest distance of a task from its ratio"] == {
        "dispatched": [[13, 0.13], [14, 0.14]]
    }


def test_nothing_is_drawn_across_the_time_between_two_processes() -> None:
    def point(minutes: float) -> list[float]:
        return [minutes, 0.5, 0.0, 1.0, 3]

    assert curves._with_gaps([point(t) for t in (0, 1, 2, 9, 10)]) == [
        *(point(t) for t in (0, 1, 2)),
        [5.5, None, None, None, 0],
        *(point(t) for t in (9, 10)),
    ]
    sparse = [point(t) for t in (0, 5, 10, 16)]
    assert curves._with_gaps(sparse) == sparse
    assert curves._with_gaps([]) == []
