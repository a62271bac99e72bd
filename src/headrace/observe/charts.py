"""Charts as inline SVG: axes with round ticks, lines, interval dots and bars, nothing external.

Colours are CSS classes (`s0`, `s1` ... for series), so the page decides what they look like in
light and dark. Pure functions from numbers to markup.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import msgspec

from headrace.observe.units import short

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
_LETTER = 6.2
"""About the width of a letter of a tick, in pixels at scale 1."""
_AIR = 0.35
"""Room beside the first and the last of named x values, in units of their distance."""
_MAX_POINTS = 600
"""Points drawn per line; longer series are averaged in buckets, far below pixel resolution."""


class Line(msgspec.Struct, frozen=True):
    """One curve: label for the legend, points (x, y) in order of x, colour class number."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    faint: bool = False


class Dot(msgspec.Struct, frozen=True):
    """One measurement with its interval: y in [low, high] at x, labelled.

    `colour` is a series' colour class number; None stands out from every series.
    """

    x: float
    y: float
    low: float
    high: float
    label: str
    colour: int | None = None


class Band(msgspec.Struct, frozen=True):
    """A named stretch of the x axis, shaded alternately (a stage)."""

    start: float
    end: float
    label: str


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that lie within [low, high]."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    zero: bool = True,
    dots: Sequence[Dot] = (),
    dots_label: str = "",
    bands: Sequence[Band] = (),
    x_names: Sequence[str] = (),
    y_format: Callable[[float], str] = short,
    width: int = 460,
    height: int = 240,
) -> str:
    """Curves and interval dots over a common x axis.

    Args:
        lines: curves; those without points are left out. Equal labels are one legend entry.
        title: read by screen readers and shown above the chart.
        x_label: axis label with unit.
        y_label: axis label with unit.
        y_range: fixed y axis, else from the data.
        zero: whether a y axis from the data starts at 0 when nothing is below.
        dots: measurements with intervals.
        dots_label: their name in the legend; "" for none.
        bands: shaded stretches behind the data.
        x_names: names of x = 0, 1, 2 ... where x is a choice and no quantity.
        y_format: writes y ticks.
        width: of the view box, in pixels at scale 1.
        height: of the view box.
    """
    drawn = [Line(s.label, thin(s.points), s.colour, s.faint) for s in lines if s.points]
    xs = [x for s in drawn for x, _ in s.points] + [d.x for d in dots]
    xs += [edge for b in bands for edge in (b.start, b.end)]
    ys = [y for s in drawn for _, y in s.points] + [v for d in dots for v in (d.low, d.high)]
    if not ys:
        return _figure(title, '<p class="empty">No data.</p>', "")
    x_low, x_high = _widen(min(xs), max(xs), air=0.0)
    if x_names:
        x_low, x_high = -_AIR, len(x_names) - 1 + _AIR
    # Names of bands stand at the top, where no curve should run through them.
    air = 0.14 if bands else 0.04
    y_low, y_high = y_range or _widen(min([*ys, 0.0] if zero else ys), max(ys), air=air)
    if y_range is None and not zero:
        # A curve that lies on the axis looks as if it had reached a bound.
        below = y_low - (y_high - y_low) * 0.04
        y_low = below if below > 0 or y_low <= 0 else 0.0
    plot = _Plot(width, height, (x_low, x_high), (y_low, y_high))
    parts = [_band(plot, band, i) for i, band in enumerate(bands)]
    named = {float(i): name for i, name in enumerate(x_names)} or None
    parts.append(plot.axes(x_label, y_label, y_format, named))
    for series in drawn:
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in series.points)
        weight = " faint" if series.faint else ""
        if len(series.points) == 1:
            x, y = series.points[0]
            parts.append(
                f'<circle class="dot s{series.colour}" cx="{plot.x(x):.1f}" '
                f'cy="{plot.y(y):.1f}" r="3"/>'
            )
        else:
            parts.append(f'<polyline class="line s{series.colour}{weight}" points="{path}"/>')
    parts += [_dot(plot, dot) for dot in dots]
    legend = [(s.label, f"s{s.colour}{' faint' if s.faint else ''}", "line") for s in drawn]
    legend = list(dict.fromkeys(legend))
    if dots and dots_label:
        legend.append((dots_label, "mark", "dot"))
    # One curve alone is named by the title.
    return _figure(title, plot.svg(title, parts), _legend(legend) if len(legend) > 1 else "")


def bar_chart(
    bars: Sequence[tuple[str, float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    y_format: Callable[[float], str] = short,
    highlight: Callable[[int], bool] = lambda _: False,
    width: int = 460,
    height: int = 240,
) -> str:
    """Vertical bars with a label below each.

    Args:
        bars: (label, height >= 0).
        highlight: whether the i-th bar is drawn in the warning colour.
    """
    if not bars or not any(v for _, v in bars):
        return _figure(title, '<p class="empty">No data.</p>', "")
    top = max(v for _, v in bars)
    plot = _Plot(width, height, (0.0, float(len(bars))), (0.0, top * 1.08))
    parts = [plot.axes(x_label, y_label, y_format, {})]
    gap = 0.14
    every = math.ceil(len(bars) / 16)
    for i, (label, value) in enumerate(bars):
        left, right = plot.x(i + gap), plot.x(i + 1 - gap)
        y = plot.y(value)
        colour = "s3" if highlight(i) else "s0"
        parts.append(
            f'<rect class="bar {colour}" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" '
            f'height="{plot.y(0) - y:.1f}"><title>{escape(label)}: {escape(y_format(value))}'
            "</title></rect>"
        )
        if i % every == 0:
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{plot.x(i + 0.5):.1f}" '
                f'y="{plot.bottom + 15:.1f}">{escape(label)}</text>'
            )
    return _figure(title, plot.svg(title, parts), "")


class Share(msgspec.Struct, frozen=True):
    """One part of a share bar: its group in the legend, its own name, size >= 0 and colour."""

    group: str
    label: str
    size: float
    colour: int


def share_bar(parts: Sequence[Share], *, title: str, write: Callable[[float], str]) -> str:
    """One horizontal bar split into shares; the legend sums them by group.

    Args:
        parts: in order from left to right.
        write: how a size is written.
    """
    total = sum(part.size for part in parts)
    if total <= 0:
        return _figure(title, '<p class="empty">No data.</p>', "")
    width, height = 940.0, 26.0
    x = 0.0
    shapes: list[str] = []
    groups: dict[str, tuple[float, int]] = {}
    for part in parts:
        span = width * part.size / total
        words = escape(f"{part.label}: {write(part.size)}")
        shapes.append(
            f'<rect class="bar s{part.colour}" x="{x:.1f}" y="0" '
            f'width="{max(span - 1.5, 0.5):.1f}" height="{height:.0f}">'
            f"<title>{words}</title></rect>"
        )
        x += span
        groups[part.group] = (groups.get(part.group, (0.0, 0))[0] + part.size, part.colour)
    svg = (
        f'<svg class="share" role="img" aria-label="{escape(title)}" preserveAspectRatio="none" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(shapes)}</svg>'
    )
    legend = [
        (f"{name} {write(size)} ({100 * size / total:.0f}%)", f"s{colour}", "block")
        for name, (size, colour) in groups.items()
    ]
    return _figure(title, svg, _legend(legend))


def rate_bar(rate: float, low: float, high: float) -> str:
    """A small bar for a table cell: the rate filled, its interval as a whisker."""
    return (
        '<svg class="rate" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" x="0" y="3" width="100" height="6"/>'
        f'<rect class="bar s0" x="0" y="3" width="{100 * rate:.1f}" height="6"/>'
        f'<rect class="whisker" x="{100 * low:.1f}" y="5.2" '
        f'width="{max(100 * (high - low), 0.5):.1f}" height="1.6"/></svg>'
    )


class _Plot:
    """The drawing area of one chart: data coordinates to pixels, and its axes."""

    def __init__(
        self,
        width: int,
        height: int,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
    ) -> None:
        self.width, self.height = width, height
        self.left, self.right = _LEFT, width - _RIGHT
        self.top, self.bottom = _TOP, height - _BOTTOM
        self._x_range, self._y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self._x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self._y_range
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.bottom - share * (self.bottom - self.top)

    def axes(
        self,
        x_label: str,
        y_label: str,
        y_format: Callable[[float], str],
        x_names: Mapping[float, str] | None = None,
    ) -> str:
        """Grid, ticks and labels; `x_names` replaces the x ticks."""
        if x_names is None:
            x_names = {v: short(v) for v in ticks(*self._x_range, about=self.width // 90)}
        parts: list[str] = []
        for value in ticks(*self._y_range, about=5):
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="tick" text-anchor="end" x="{self.left - 7}" '
                f'y="{y + 3.5:.1f}">{escape(y_format(value))}</text>'
            )
        parts.append(
            f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" '
            f'y2="{self.bottom}"/>'
        )
        rows = self._name_rows(x_names)
        for i, (value, name) in enumerate(x_names.items()):
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{self.x(value):.1f}" '
                f'y="{self.bottom + 15 + 12 * (i % rows):.1f}">{escape(name)}</text>'
            )
        middle = (self.top + self.bottom) / 2
        parts.append(
            f'<text class="label" text-anchor="middle" x="{(self.left + self.right) / 2:.1f}" '
            f'y="{self.height - 6}">{escape(x_label)}</text>'
            f'<text class="label" text-anchor="middle" transform="translate(11 {middle:.1f}) '
            f'rotate(-90)">{escape(y_label)}</text>'
        )
        return "".join(parts)

    def _name_rows(self, names: Mapping[float, str]) -> int:
        """Rows that names below the axis need to leave each other room."""
        placed = [(self.x(value), _LETTER * len(name) / 2) for value, name in names.items()]
        pairs = itertools.pairwise(placed)
        return 2 if any(x + half > y - other for (x, half), (y, other) in pairs) else 1

    def svg(self, title: str, parts: Sequence[str]) -> str:
        return (
            f'<svg class="chart" role="img" aria-label="{escape(title)}" '
            f'viewBox="0 0 {self.width} {self.height}">{"".join(parts)}</svg>'
        )


def _band(plot: _Plot, band: Band, index: int) -> str:
    left, right = plot.x(band.start), plot.x(band.end)
    words = ""
    if right - left > 6.5 * len(band.label):
        words = (
            f'<text class="tick" text-anchor="middle" x="{(left + right) / 2:.1f}" '
            f'y="{plot.top + 12}">{escape(band.label)}</text>'
        )
    return (
        f'<rect class="band{index % 2}" x="{left:.1f}" y="{plot.top}" '
        f'width="{max(right - left, 0):.1f}" height="{plot.bottom - plot.top}"/>{words}'
    )


def _dot(plot: _Plot, dot: Dot) -> str:
    x = plot.x(dot.x)
    colour = "" if dot.colour is None else f" s{dot.colour}"
    return (
        f'<g class="mark{colour}"><title>{escape(dot.label)}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{plot.y(dot.low):.1f}" y2="{plot.y(dot.high):.1f}"/>'
        f'<circle cx="{x:.1f}" cy="{plot.y(dot.y):.1f}" r="4.5"/></g>'
    )


def _legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Names of the colours; (label, colour class, shape class) each."""
    items = "".join(
        f'<span class="key"><i class="{shape} {colour}"></i>{escape(label)}</span>'
        for label, colour, shape in entries
    )
    return f'<div class="legend">{items}</div>'


def _figure(title: str, body: str, legend: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{body}</figure>"


def _widen(low: float, high: float, air: float) -> tuple[float, float]:
    """A range that is not empty, with a share of `air` above the data."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        return (0.0, high + pad) if low == 0 else (low - pad, high + pad)
    return (low, high + (high - low) * air)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 600 points, (x, y) in order of x: longer series as means of equal buckets."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    n = len(finite)
    if n <= _MAX_POINTS:
        return finite
    thinned: list[tuple[float, float]] = []
    for i in range(_MAX_POINTS):
        bucket = finite[i * n // _MAX_POINTS : (i + 1) * n // _MAX_POINTS]
        thinned.append(
            (sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket))
        )
    return thinned
