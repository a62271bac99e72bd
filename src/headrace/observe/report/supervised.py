"""How the supervised stages went: losses and their parts, gradients, speed and memory."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from headrace.observe.charts import Band, Line, line_chart
from headrace.observe.metrics import MetricRow
from headrace.observe.report.curves import curves
from headrace.observe.report.markup import Cell, number, section, table, text
from headrace.observe.runs import Run
from headrace.observe.units import count, duration, loss_name, memory, percent, short

_WIDTH, _HEIGHT = 340, 220
_SKIPS = 8
"""Places of skipped steps that are named."""


def supervised_section(run: Run) -> str:
    """Totals, losses and gradients by stage, then speed and memory over the run."""
    stages = [s for s in run.stages() if s.get("kind") != "agentic_rl"]
    stages = [s for s in stages if run.rows_of(s["name"])]
    if not stages:
        return ""
    parts = [_totals(run, stages)]
    for stage in stages:
        rows = run.rows_of(stage["name"])
        charts = "".join(_stage_charts(stage, rows))
        if charts:
            name = escape(str(stage["name"]))
            parts.append(f"<h3>{name}</h3>{_skips(rows)}<div class='grid three'>{charts}</div>")
    names = {str(s["name"]) for s in stages}
    machine = "".join(_machine_charts(run, names))
    if machine:
        parts.append(f"<h3>Speed and memory</h3><div class='grid three'>{machine}</div>")
    return section("Supervised stages", *parts)


def _totals(run: Run, stages: Sequence[dict[str, Any]]) -> str:
    columns: list[tuple[str, Callable[[Sequence[MetricRow]], str | None]]] = [
        ("steps", lambda rows: count(rows[-1].step)),
        ("tokens", lambda rows: _present(_sum(rows, "tokens"), short)),
        ("last loss", lambda rows: _present(rows[-1].metrics.get("loss"), lambda v: f"{v:.3f}")),
        ("tokens/s", lambda rows: _present(_rate(rows), short)),
        ("MFU", lambda rows: _present(_mean(rows, "mfu"), percent)),
        ("peak memory", lambda rows: _present(_peak(rows), memory)),
        ("skipped steps", lambda rows: _present(_sum(rows, "skipped"), count)),
    ]
    logged = [run.rows_of(stage["name"]) for stage in stages]
    shown = [(name, write) for name, write in columns if any(write(rows) for rows in logged)]
    head = [text("stage"), text("kind"), *(number(name) for name, _ in shown), number("took")]
    body: list[list[Cell]] = []
    for stage, rows in zip(stages, logged, strict=True):
        numbers = [number(write(rows) or "–") for _, write in shown]
        took = number(duration(stage["wall_s"]))
        body.append([text(stage["name"]), text(stage.get("kind", "–"), "dim"), *numbers, took])
    return table(head, body)


def _present(value: float | None, write: Callable[[float], str]) -> str | None:
    return None if value is None else write(value)


def _values(rows: Sequence[MetricRow], name: str) -> list[float]:
    return [row.metrics[name] for row in rows if name in row.metrics]


def _sum(rows: Sequence[MetricRow], name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) if values else None


def _mean(rows: Sequence[MetricRow], name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) / len(values) if values else None


def _rate(rows: Sequence[MetricRow]) -> float | None:
    """Tokens per second of training, weighted by time where that is known."""
    spent = [
        (r.metrics["tokens"], r.metrics["tokens_per_s"])
        for r in rows
        if r.metrics.get("tokens") and r.metrics.get("tokens_per_s")
    ]
    if not spent:
        return _mean(rows, "tokens_per_s")
    return sum(tokens for tokens, _ in spent) / sum(tokens / rate for tokens, rate in spent)


def _peak(rows: Sequence[MetricRow]) -> float | None:
    """Bytes at most: of the accelerator where there is one, else of the process."""
    for name in ("device_peak_memory_mb", "peak_memory_mb", "memory_mb"):
        values = _values(rows, name)
        if values:
            return max(values) * 2**20
    return None


def _skips(rows: Sequence[MetricRow]) -> str:
    """Which steps were left out because their numbers looked wrong; rows hold several steps."""
    found = [(row.step, row.metrics["skipped"]) for row in rows if row.metrics.get("skipped")]
    if not found:
        return ""
    places = [f"{count(skipped)} by step {count(step)}" for step, skipped in found]
    rest = f" and {len(places) - _SKIPS} later rows" if len(places) > _SKIPS else ""
    return f"<p class='dim'>Steps skipped: {', '.join(places[:_SKIPS])}{rest}.</p>"


def _stage_charts(stage: dict[str, Any], rows: Sequence[MetricRow]) -> list[str]:
    def chart(
        names: dict[str, str], title: str, y_label: str, *, zero: bool = False, write: Any = short
    ) -> str:
        return curves(
            rows,
            names,
            title,
            y_label,
            "step",
            write=write,
            zero=zero,
            width=_WIDTH,
            height=_HEIGHT,
        )

    whole = loss_name(str(stage.get("kind", "")))
    parts = {"language_loss": "language", "mtp_loss": "MTP"}
    has_parts = any(_values(rows, name) for name in parts)
    losses = {"loss": "all, weighted", **parts} if has_parts else {"loss": whole}
    title = "Loss and its parts" if has_parts else whole.capitalize()
    unit = "nats" if whole != "loss" else "nats per token"
    charts = [
        chart(losses, title, unit),
        chart({"index_loss": "KL"}, "Indexer loss", "nats"),
        chart({"grad_norm": "norm"}, "Gradient norm before clipping", "norm", zero=True),
        chart({"balance_loss": "balance"}, "Expert balance loss, 1 is even", "loss"),
    ]
    return [c for c in charts if c]


def _machine_charts(run: Run, stages: set[str]) -> list[str]:
    """Over the whole run, so that stages compare."""
    spans = [span for span in run.spans() if span.stage in stages]
    bands = [Band(s.start / 60, s.end / 60, s.stage) for s in spans]

    def chart(
        names: dict[str, str],
        title: str,
        y_label: str,
        *,
        scale: float = 1.0,
        write: Callable[[float], str] = short,
    ) -> str:
        lines = [
            Line(
                label,
                [
                    (row.elapsed / 60, row.metrics[key] * scale)
                    for row in run.rows_of(span.stage)
                    if key in row.metrics
                ],
                colour,
            )
            for colour, (key, label) in enumerate(names.items())
            for span in spans
        ]
        if not any(line.points for line in lines):
            return ""
        return line_chart(
            lines,
            title=title,
            x_label="minutes since the run started",
            y_label=y_label,
            bands=bands,
            y_format=write,
            width=_WIDTH,
            height=_HEIGHT,
        )

    memories = {
        "memory_mb": "process",
        "peak_memory_mb": "process, at most",
        "device_peak_memory_mb": "accelerator, at most",
    }
    charts = [
        chart({"tokens_per_s": "tokens/s"}, "Throughput", "tokens/s"),
        chart(
            {"mfu": "MFU"},
            "MFU, of this machine's matmul rate",
            "share",
            write=lambda v: percent(v, 0),
        ),
        chart(memories, "Memory of the trainer", "GiB", scale=1 / 1024),
    ]
    return [c for c in charts if c]
