"""How reinforcement learning went, the asynchronous machinery, and where the run's time went."""

import math
from collections.abc import Sequence
from html import escape

from headrace.observe.charts import Line, Share, bar_chart, line_chart, share_bar
from headrace.observe.metrics import MetricRow
from headrace.observe.report.curves import curves
from headrace.observe.report.markup import Cell, number, section, table, text
from headrace.observe.runs import Run
from headrace.observe.units import after_words, count, duration, percent, short, stage_of


def rl_section(run: Run) -> str:
    """Learning, trust region, staleness and both sides' throughput of every RL stage."""
    parts: list[str] = []
    stages = [s for s in run.stages() if s.get("kind") == "agentic_rl"]
    for stage in stages:
        rows = run.rows_of(stage["name"])
        if not rows:
            continue
        if len(stages) > 1:
            parts.append(f"<h3>{escape(str(stage['name']))}</h3>")
        parts.append(_totals(rows))
        charts = _learning_charts(rows) + _asynchrony_charts(run, stage, rows)
        parts.append(f"<div class='grid'>{''.join(c for c in charts if c)}</div>")
    return section(
        "Reinforcement learning",
        *parts,
        intro="One point per optimizer update. Mismatch compares the log-probabilities that the "
        "trainer and the engine give the same tokens under the same weights.",
    )


def time_section(run: Run) -> str:
    """Wall clock by stage, evaluation and measurement, and how busy both sides were."""
    parts: list[Share] = []

    def add_measured(after: str) -> None:
        for e in run.evaluations:
            if stage_of(e) == after and e.get("wall_s"):
                name = f"evaluation {run.label(e)}"
                parts.append(Share("evaluation", name, float(e["wall_s"]), 5))
        seconds = sum(m.wall_s for m in run.measurements if m.after == after)
        if seconds:
            parts.append(Share("measurement", f"measurement {after_words(after)}", seconds, 5))

    add_measured("start")
    for index, stage in enumerate(run.stages()):
        name = str(stage["name"])
        if stage["wall_s"]:
            parts.append(Share(name, name, float(stage["wall_s"]), index % 5))
        add_measured(name)
    wall = run.summary.get("wall_s")
    if wall is not None:
        rest = float(wall) - sum(part.size for part in parts)
        if rest > 0.005 * float(wall):
            words = "set-up and the rest"
            parts.append(Share(words, words, rest, 6))
    if not parts:
        return ""
    bar = share_bar(parts, title="Wall clock by part of the run", write=duration)
    return section("Where the time went", bar, _busy(run))


def _busy(run: Run) -> str:
    rows: list[list[Cell]] = []
    for stage in run.stages():
        measured = [r.metrics for r in run.rows_of(stage["name"]) if "trainer_busy" in r.metrics]
        if not measured:
            continue

        def mean(name: str, measured: list[dict[str, float]] = measured) -> float | None:
            values = [m[name] for m in measured if name in m]
            return sum(values) / len(values) if values else None

        rows.append(
            [
                text(stage["name"]),
                number(percent(mean("engine_busy"), 0)),
                number(percent(mean("trainer_busy"), 0)),
                number(short(mean("gen_tokens_per_s"))),
                number(short(mean("train_tokens_per_s"))),
                number(duration(mean("step_s"))),
                number(duration(mean("wait_s"))),
            ]
        )
    if not rows:
        return ""
    head = [text("stage"), number("engine busy"), number("trainer busy"), number("generated/s")]
    head += [number("trained/s"), number("update takes"), number("trainer waits")]
    return "<h3>Both sides, mean over updates</h3>" + table(head, rows)


def _totals(rows: Sequence[MetricRow]) -> str:
    """What an RL stage did in all: counts summed over its updates."""
    facts = [("updates", count(rows[-1].step))]
    for label, name in (
        ("trajectories trained", "trained_trajectories"),
        ("tokens trained", "trained_tokens"),
        ("dropped as stale", "dropped_stale"),
        ("dropped without signal", "dropped_no_signal"),
        ("environment failures", "env_failed"),
    ):
        values = [r.metrics[name] for r in rows if name in r.metrics]
        if values:
            facts.append((label, count(sum(values))))
    versions = [r.metrics["version"] for r in rows if "version" in r.metrics]
    if versions:
        facts.append(("last weight version", count(versions[-1])))
    items = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts)
    return f"<dl class='facts'>{items}</dl>"


def _learning_charts(rows: Sequence[MetricRow]) -> list[str]:
    return [
        _mismatch_chart(rows),
        curves(rows, {"entropy": "entropy"}, "Entropy of sampled tokens", "nats"),
        curves(
            rows,
            {"masked_low": "ratio too low", "masked_high": "ratio too high"},
            "Trained tokens masked by the trust region",
            "share of tokens",
            write=lambda v: percent(v, 1 if v < 0.1 else 0),
        ),
        curves(
            rows,
            {"ratio_mean": "mean", "ratio_p99": "99th percentile", "ratio_p01": "1st percentile"},
            "Importance ratio, new over rollout policy",
            "ratio",
            zero=False,
        ),
        curves(rows, {"kl_rollout": "KL"}, "KL of rollout to new policy, estimated", "nats"),
        curves(rows, {"grad_norm": "norm"}, "Gradient norm before clipping", "norm"),
        curves(rows, {"turns_mean": "turns"}, "Turns per rollout", "turns"),
    ]


def _mismatch_chart(rows: Sequence[MetricRow]) -> str:
    """Mean and largest |train - rollout| logprob, on a logarithmic axis: they are decades apart."""
    lines: list[Line] = []
    for i, (key, label) in enumerate(
        (("mismatch_mean_abs", "mean"), ("mismatch_max_abs", "largest"))
    ):
        values = [(float(r.step), r.metrics[key]) for r in rows if r.metrics.get(key, 0.0) > 0]
        lines.append(Line(label, [(x, math.log10(y)) for x, y in values], i))
    logs = [y for line in lines for _, y in line.points]
    if not logs:
        # All zero (bit-equal kernels), or not measured at all.
        return curves(
            rows, {"mismatch_max_abs": "largest"}, "Train/rollout log-probability mismatch", "nats"
        )
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return line_chart(
        lines,
        title="Train/rollout log-probability mismatch",
        x_label="update",
        y_label="nats, logarithmic",
        y_range=(low, high if high > low else low + 1),
        y_format=lambda v: f"1e{v:.0f}",
    )


def _asynchrony_charts(run: Run, stage: dict[str, object], rows: Sequence[MetricRow]) -> list[str]:
    tau = stage.get("staleness")
    name = str(stage["name"])
    histogram = run.ledger.staleness_histogram(name) if run.ledger is not None else {}
    lags = range(max(histogram, default=-1) + 1)
    bound = f" (bound {tau})" if tau is not None else ""
    return [
        bar_chart(
            [(str(lag), float(histogram.get(lag, 0))) for lag in lags],
            title=f"Staleness of trained tokens{bound}",
            x_label="publications between sampling and training",
            y_label="tokens",
            highlight=lambda lag: isinstance(tau, int) and lag > tau,
        )
        if histogram
        else "",
        curves(
            rows, {"lag_mean": "mean", "lag_max": "largest"}, "Staleness at the cut", "versions"
        ),
        curves(
            rows,
            {"gen_tokens_per_s": "generated", "train_tokens_per_s": "trained"},
            "Throughput of both sides",
            "tokens/s",
        ),
        curves(
            rows,
            {"engine_busy": "engine", "trainer_busy": "trainer"},
            "Utilisation",
            "share of time busy",
            y_range=(0.0, 1.0),
            write=lambda v: percent(v, 0),
        ),
        curves(rows, {"queue_groups": "groups"}, "Finished groups waiting", "groups"),
        curves(rows, {"rollouts_in_flight": "rollouts"}, "Rollouts in flight", "rollouts"),
    ]
