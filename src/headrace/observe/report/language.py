"""What a language-model run came to: bits per byte, retrieval and chat format, by stage."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from headrace.observe.charts import Dot, Line, line_chart
from headrace.observe.measurements import (
    Measure,
    Measurement,
    MeasurementTable,
    hardest_retrieval,
    latest,
    tabulate,
)
from headrace.observe.report.markup import Cell, number, section, table, text
from headrace.observe.runs import Run
from headrace.observe.units import after_words, count, duration, interval, percent

_WIDTH, _HEIGHT = 340, 220
_DODGE = 0.07
"""Distance between intervals that would cover each other, in units of the x axis."""


def language_cards(run: Run) -> str:
    """The headline: newest bits per byte, hardest retrieval and chat format; "" without any."""
    found = tabulate(run.measurements)
    rows = [*found.of_kind(Measure.BITS)[:1], *found.of_kind(Measure.CHAT)[:1]]
    hardest = hardest_retrieval(found)
    if hardest is not None:
        rows.insert(1 if found.of_kind(Measure.BITS) else 0, hardest)
    return "".join(_card(row) for row in rows)


def _card(row: Mapping[str, Measurement]) -> str:
    one = latest(row)
    title = {
        Measure.BITS: "bits per byte, held-out text",
        Measure.CHAT: "chat format followed",
    }.get(one.kind, one.task)
    if one.bounds is None:
        sure = f"{count(one.n)} bytes"
    else:
        sure = f"{interval(*one.bounds)}, n = {count(one.n)}"
    steps = [f"<span>{escape(stage)} {m.words}</span>" for stage, m in row.items()]
    history = f"<p class='small steps'>{' → '.join(steps)}</p>" if len(steps) > 1 else ""
    return (
        f"<div class='card'><p>{escape(title)}</p><p class='big'>{one.words}</p>"
        f"<p class='small'>{escape(after_words(one.after))} · {escape(sure)}</p>{history}</div>"
    )


def measurement_section(run: Run) -> str:
    """Every measurement by stage, and how they changed as charts."""
    found = tabulate(run.measurements)
    if not found.rows:
        return ""
    charts = [*_bits_charts(found), *_retrieval_charts(found)]
    grid = f"<div class='grid three'>{''.join(charts)}</div>" if charts else ""
    seconds = sum(m.wall_s for m in run.measurements)
    return section(
        "Measurements",
        grid,
        _table(found),
        intro="Held-out text, facts and conversations, the same ones after every stage. "
        "Retrieval asks for a fact hidden in filler; only lengths that the model could hold were "
        f"measured. All of it took {duration(seconds)}.",
    )


def _table(found: MeasurementTable) -> str:
    head = [text("measured"), *(number(_column(stage)) for stage in found.stages), number("n")]
    rows: list[list[Cell]] = []
    for row in found.rows:
        cells = [_cell(row.get(stage)) for stage in found.stages]
        rows.append([text(_row_name(latest(row))), *cells, number(count(latest(row).n))])
    return table(head, rows)


def _column(stage: str) -> str:
    return after_words(stage) if stage == "start" else stage


def _row_name(one: Measurement) -> str:
    if one.kind is Measure.BITS:
        return "bits per byte (lower is better)"
    return "chat format followed" if one.kind is Measure.CHAT else one.task


def _cell(one: Measurement | None) -> Cell:
    if one is None:
        return "<span class='dim'>–</span>", "n"
    sure = "" if one.bounds is None else f"<span class='low'>{interval(*one.bounds)}</span>"
    return f"<b>{one.words}</b>{sure}", "n"


def _bits_charts(found: MeasurementTable) -> list[str]:
    rows = found.of_kind(Measure.BITS)
    if not rows:
        return []
    stages = [s for s in found.stages if s in rows[0] and math.isfinite(rows[0][s].value)]
    if len(stages) < 2:
        return []
    points = [(float(i), rows[0][stage].value) for i, stage in enumerate(stages)]
    return [
        line_chart(
            [Line("bits per byte", points)],
            title="Bits per byte of held-out text, by stage",
            x_label="",
            y_label="bits",
            zero=False,
            dots=[Dot(x, y, y, y, f"{stages[int(x)]}: {y:.3f}", 0) for x, y in points],
            x_names=stages,
            y_format=lambda v: f"{v:.2f}",
            width=_WIDTH,
            height=_HEIGHT,
        )
    ]


def _retrieval_charts(found: MeasurementTable) -> list[str]:
    rows = found.of_kind(Measure.RETRIEVAL)
    if not rows:
        return []
    charts: list[str] = []
    newest = latest(rows[-1]).after
    now = [row[newest] for row in rows if newest in row]
    lengths = sorted({m.length for m in now})
    if len(lengths) > 1:
        names = [count(length) for length in lengths]
        by_keys = _by_keys([(float(lengths.index(m.length)), m) for m in now])
        title = f"Retrieval {after_words(newest)}, by context"
        charts.append(_rates(by_keys, title, "tokens of context", names))
    longest = [row for row in rows if latest(row).length == latest(rows[-1]).length]
    stages = [s for s in found.stages if any(s in row for row in longest)]
    if len(stages) > 1:
        placed = [(float(stages.index(s)), m) for row in longest for s, m in row.items()]
        title = f"Retrieval at {count(latest(rows[-1]).length)} tokens, by stage"
        charts.append(_rates(_by_keys(placed), title, "", stages))
    return charts


Placed = Sequence[tuple[float, Measurement]]


def _by_keys(placed: Placed) -> list[tuple[str, Placed]]:
    keys = sorted({m.keys for _, m in placed})
    groups = [[(x, m) for x, m in placed if m.keys == k] for k in keys]
    return [(group[0][1].short_task, sorted(group, key=lambda p: p[0])) for group in groups]


def _rates(
    groups: Sequence[tuple[str, Placed]], title: str, x_label: str, names: Sequence[str]
) -> str:
    """Rates with intervals over named x values, one colour for each group."""
    lines: list[Line] = []
    dots: list[Dot] = []
    for i, (label, placed) in enumerate(groups):
        colour = i % 6
        shift = (i - (len(groups) - 1) / 2) * _DODGE
        lines.append(Line(label, [(x + shift, m.value) for x, m in placed], colour))
        for x, m in placed:
            low, high = m.bounds or (m.value, m.value)
            words = f"{label}, {names[int(x)]}: {m.words} ({interval(low, high)} of {m.n})"
            dots.append(Dot(x + shift, m.value, low, high, words, colour))
    return line_chart(
        lines,
        title=title,
        x_label=x_label,
        y_label="answered exactly",
        y_range=(0.0, 1.0),
        dots=dots,
        x_names=names,
        y_format=lambda v: percent(v, 0),
        width=_WIDTH,
        height=_HEIGHT,
    )
