"""Metrics as line charts, the shape that most charts of the report have."""

from collections.abc import Callable, Mapping, Sequence

from headrace.observe.charts import Line, line_chart
from headrace.observe.metrics import MetricRow
from headrace.observe.units import short


def curves(
    rows: Sequence[MetricRow],
    names: Mapping[str, str],
    title: str,
    y_label: str,
    x_label: str = "update",
    y_range: tuple[float, float] | None = None,
    write: Callable[[float], str] = short,
    zero: bool = True,
    width: int = 460,
    height: int = 240,
) -> str:
    """Metrics over steps; "" when none of them was logged.

    Args:
        rows: of one stage.
        names: metric name to label, one curve each.

    The others are `line_chart`'s.
    """
    lines = [
        Line(label, [(float(r.step), r.metrics[key]) for r in rows if key in r.metrics], i)
        for i, (key, label) in enumerate(names.items())
    ]
    if not any(line.points for line in lines):
        return ""
    return line_chart(
        lines,
        title=title,
        x_label=x_label,
        y_label=y_label,
        y_range=y_range,
        y_format=write,
        zero=zero,
        width=width,
        height=height,
    )
