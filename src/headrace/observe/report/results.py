"""What came out: the headline change, every evaluation with its interval, and rates by family."""

from collections.abc import Mapping
from html import escape
from typing import Any

from headrace.observe.charts import Band, Dot, Line, line_chart, rate_bar
from headrace.observe.report.language import language_cards
from headrace.observe.report.markup import Cell, number, section, table, text
from headrace.observe.runs import Comparison, Run
from headrace.observe.statistics import wilson
from headrace.observe.units import duration, interval, percent, points, stage_of


def headline_section(run: Run) -> str:
    """Before and after of rollouts, large, with the paired difference; then the language model."""
    parts = [
        part
        for part in (_rollout_headline(run), _cards(language_cards(run), "cards apart"))
        if part
    ]
    if not parts:
        words = "No evaluation has finished in this run. What exists is below."
        parts = [f"<p>{words}</p>"]
    return f"<section class='headline'>{''.join(parts)}</section>"


def _rollout_headline(run: Run) -> str:
    found = run.headlines()
    if found:
        return "".join(_change(run, best) for best in found)
    if not run.evaluations:
        return ""
    last = run.evaluations[-1]
    words = "Only one measurement exists so far, so there is no change to report."
    return f"{_cards(_card(run.label(last), last, ''))}<p>{words}</p>"


def _change(run: Run, best: Comparison) -> str:
    """Before and after of one task."""
    change = best.change
    tone = "good" if change.low > 0 else "bad" if change.high < 0 else "open"
    several = len(run.headlines()) > 1
    of_task = f" on <b>{escape(best.task)}</b>" if several else ""
    reading = (
        f"Held-out success{of_task} changed by <b>{points(change.difference)} points</b> "
        f"(95% interval {points(change.low)} to {points(change.high)}) over the stage "
        f"<b>{escape(best.stage)}</b>, measured on the same {change.n} instances before and "
        f"after: {change.gained} learned, {change.lost} lost."
    )
    cards = (
        _card(run.label(best.before), best.before, "")
        + "<div class='arrow' aria-hidden='true'>→</div>"
        + _card(run.label(best.after), best.after, tone)
        + f"<div class='card {tone}'><p>paired difference</p>"
        f"<p class='big'>{points(change.difference)}</p>"
        f"<p class='small'>{points(change.low)} to {points(change.high)} points</p></div>"
    )
    return f"{_cards(cards)}<p>{reading}</p>"


def _cards(cards: str, css: str = "cards") -> str:
    return f"<div class='{css}'>{cards}</div>" if cards else ""


def results_section(run: Run) -> str:
    """Timeline, comparisons, evaluations and families."""
    parts = [_timeline(run)]
    if run.evaluations:
        parts.append(_evaluation_table(run))
    comparisons = run.comparisons()
    if comparisons:
        parts += ["<h3>Paired comparisons</h3>", _comparison_table(run, comparisons)]
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
    spans = run.spans()
    bands = [Band(s.start / 60, s.end / 60, s.stage) for s in spans]
    ends = run.measured_at()
    lines: list[Line] = []
    for label, key, colour, faint in (
        ("mean reward of rollouts", "reward_mean", 0, True),
        ("success of finished rollouts", "success_rate", 1, False),
    ):
        for span in spans:
            points = [
                (r.elapsed / 60, r.metrics[key])
                for r in run.rows_of(span.stage)
                if key in r.metrics
            ]
            lines.append(Line(label, points, colour, faint))
    dots = [
        Dot(
            ends[stage_of(e)] / 60,
            e["success"],
            e.get("low", e["success"]),
            e.get("high", e["success"]),
            f"{run.label(e)}: {percent(e['success'])}",
        )
        for e in run.evaluations
        if stage_of(e) in ends and e.get("temperature") != 0 and e.get("success") is not None
    ]
    if not any(line.points for line in lines) and len(dots) < 2:
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
                text(run.label(e)),
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


def _comparison_table(run: Run, comparisons: list[Comparison]) -> str:
    head = [text("stage"), text("compared with"), number("before"), number("after")]
    head += [number("difference"), number("95% interval"), number("learned"), number("lost")]
    rows: list[list[Cell]] = []
    for c in comparisons:
        against = f"stage {c.rival}, same start" if c.rival else run.label(c.before)
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
        head += [number(run.label(e)), text("", "bar")]
    rows: list[list[Cell]] = []
    for family in families:
        counts = [e["families"].get(family, [0, 0]) for e in records]
        row: list[Cell] = [
            (f"<code>{escape(family)}</code>", ""),
            number(max(n for _, n in counts)),
        ]
        for ok, n in counts:
            row.append(number(percent(ok / n, 0) if n else "–"))
            row.append((rate_bar(ok / n, *wilson(ok, n)) if n else "", "bar"))
        rows.append(row)
    return "<h3>By task family</h3>" + table(head, rows)


def _of(counts: Any) -> str:
    ok, n = counts
    return f"{percent(ok / n)} of {n}" if n else "–"
