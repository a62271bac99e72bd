"""What came out: the headline change, every evaluation with its interval, and rates by family."""

from collections.abc import Mapping
from html import escape
from typing import Any

from headrace.observe.charts import Band, Dot, Line, line_chart, rate_bar
from headrace.observe.report.markup import Cell, number, section, table, text
from headrace.observe.runs import Comparison, Run
from headrace.observe.statistics import wilson
from headrace.observe.units import duration, interval, label_of, percent, points, stage_of


def headline_section(run: Run) -> str:
    """Before and after, large, with the paired difference."""
    best = run.headline()
    if best is not None:
        change = best.change
        tone = "good" if change.low > 0 else "bad" if change.high < 0 else "open"
        reading = (
            f"Held-out success changed by <b>{points(change.difference)} points</b> "
            f"(95% interval {points(change.low)} to {points(change.high)}) over the stage "
            f"<b>{escape(best.stage)}</b>, measured on the same {change.n} instances before and "
            f"after: {change.gained} learned, {change.lost} lost."
        )
        cards = (
            _card(label_of(best.before), best.before, "")
            + "<div class='arrow' aria-hidden='true'>→</div>"
            + _card(label_of(best.after), best.after, tone)
            + f"<div class='card {tone}'><p>paired difference</p>"
            f"<p class='big'>{points(change.difference)}</p>"
            f"<p class='small'>{points(change.low)} to {points(change.high)} points</p></div>"
        )
        return (
            f"<section class='headline'><div class='cards'>{cards}</div><p>{reading}</p></section>"
        )
    if run.evaluations:
        last = run.evaluations[-1]
        cards = _card(label_of(last), last, "")
        return (
            f"<section class='headline'><div class='cards'>{cards}</div>"
            "<p>Only one measurement exists so far, so there is no change to report.</p></section>"
        )
    return (
        "<section class='headline'><p>No evaluation has finished in this run. What exists is "
        "below.</p></section>"
    )


def results_section(run: Run) -> str:
    """Timeline, comparisons, evaluations and families."""
    parts = [_timeline(run)]
    if run.evaluations:
        parts.append(_evaluation_table(run))
    comparisons = run.comparisons()
    if comparisons:
        parts += ["<h3>Paired comparisons</h3>", _comparison_table(comparisons)]
    parts.append(_family_table(run))
    return section(
        "Held-out success",
        *parts,
        intro="Evaluations use instances that no stage trains on, the same ones every time.",
    )


def _card(label: str, record: Mapping[str, Any], tone: str) -> str:
    low, high = record.get("low", 0.0), record.get("high", 1.0)
    return (
        f"<div class='card {tone}'><p>{escape(label)}</p>"
        f"<p class='big'>{percent(record.get('success'))}</p>"
        f"<p class='small'>{interval(low, high)}, n = {record.get('n')}</p></div>"
    )


def _timeline(run: Run) -> str:
    """Training reward as a curve, evaluations as dots where their stage ended, stages shaded."""
    bands: list[Band] = []
    ends = {"start": 0.0}
    lines: list[Line] = []
    for stage in run.stages():
        rows = run.rows_of(stage["name"])
        if not rows:
            continue
        # A first row is logged after its step, so the stage began about one step earlier.
        lead = (rows[-1].elapsed - rows[0].elapsed) / max(len(rows) - 1, 1)
        start = max(rows[0].elapsed - lead, max(ends.values()), 0.0)
        ends[stage["name"]] = rows[-1].elapsed
        bands.append(Band(start / 60, rows[-1].elapsed / 60, stage["name"]))
        rewards = [
            (r.elapsed / 60, r.metrics["reward_mean"]) for r in rows if "reward_mean" in r.metrics
        ]
        success = [
            (r.elapsed / 60, r.metrics["success_rate"]) for r in rows if "success_rate" in r.metrics
        ]
        first = not any(line.label.startswith("mean reward") for line in lines)
        suffix = "" if first else f" ({stage['name']})"
        if rewards:
            lines.append(Line(f"mean reward of rollouts{suffix}", rewards, 0, faint=True))
        if success:
            lines.append(Line(f"success of finished rollouts{suffix}", success, 1))
    dots = [
        Dot(
            ends[stage_of(e)] / 60,
            e["success"],
            e.get("low", e["success"]),
            e.get("high", e["success"]),
            f"{label_of(e)}: {percent(e['success'])}",
        )
        for e in run.evaluations
        if stage_of(e) in ends and e.get("temperature") != 0 and e.get("success") is not None
    ]
    if not lines and len(dots) < 2:
        return ""
    chart = line_chart(
        lines,
        title="Reward and held-out success over the run",
        x_label="minutes since the run started",
        y_label="share",
        y_range=(0.0, 1.0),
        dots=dots,
        dots_label="held-out success, 95% interval",
        bands=bands,
        y_format=lambda v: percent(v, 0),
        width=960,
        height=320,
    )
    return f"<div class='wide'>{chart}</div>"


def _evaluation_table(run: Run) -> str:
    head = [text("measured"), text("success"), text("", "bar"), text("95% interval"), number("n")]
    head += [number("3 turns or more"), number("temperature"), number("took")]
    rows: list[list[Cell]] = []
    for e in run.evaluations:
        low, high = e.get("low", 0.0), e.get("high", 1.0)
        several = e.get("multi_turn") or [0, 0]
        rows.append(
            [
                text(label_of(e)),
                (f"<b>{percent(e.get('success'))}</b>", "n"),
                (rate_bar(float(e.get("success") or 0.0), low, high), "bar"),
                number(interval(low, high)),
                number(e.get("n", "–")),
                number(_of(several)),
                number(e.get("temperature", "–")),
                number(duration(e.get("wall_s"))),
            ]
        )
    head[1] = number("success")
    head[3] = number("95% interval")
    return table(head, rows)


def _comparison_table(comparisons: list[Comparison]) -> str:
    head = [text("stage"), text("compared with"), number("before"), number("after")]
    head += [number("difference"), number("95% interval"), number("learned"), number("lost")]
    rows: list[list[Cell]] = []
    for c in comparisons:
        against = f"stage {c.rival}, same start" if c.rival else label_of(c.before)
        tone = "good" if c.change.low > 0 else "bad" if c.change.high < 0 else "open"
        rows.append(
            [
                text(c.stage),
                text(against),
                number(percent(c.change.before)),
                number(percent(c.change.after)),
                (f"<b class='{tone}'>{points(c.change.difference)}</b>", "n"),
                number(f"{points(c.change.low)} to {points(c.change.high)}"),
                number(c.change.gained),
                number(c.change.lost),
            ]
        )
    return table(head, rows)


def _family_table(run: Run) -> str:
    records = [e for e in run.evaluations if e.get("families") and e.get("temperature") != 0]
    records = records or [e for e in run.evaluations if e.get("families")]
    families = sorted({name for e in records for name in e["families"]})
    if not families:
        return ""
    head = [text("family"), number("n")]
    for e in records:
        head += [number(label_of(e)), text("", "bar")]
    rows: list[list[Cell]] = []
    for family in families:
        counts = [e["families"].get(family, [0, 0]) for e in records]
        row: list[Cell] = [(f"<code>{escape(family)}</code>", ""), number(counts[-1][1])]
        for ok, n in counts:
            row.append(number(percent(ok / n, 0) if n else "–"))
            row.append((rate_bar(ok / n, *wilson(ok, n)) if n else "", "bar"))
        rows.append(row)
    return "<h3>By task family</h3>" + table(head, rows)


def _of(counts: Any) -> str:
    ok, n = counts
    return f"{percent(ok / n)} of {n}" if n else "–"
