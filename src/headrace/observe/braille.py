"""Line charts made of text: braille cells hold 2 x 4 dots each, so a small area shows a real curve.

Pure functions; no terminal control. Colour and frame belong to the caller.
"""

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at (row, column) of a braille cell."""


def curve(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """Draw `values` from left to right, resampled to fill the width.

    Args:
        values: at least one finite number; clipped to [low, high].
        width: columns of text, >= 1.
        height: rows of text, >= 1.
        low: value at the bottom edge.
        high: value at the top edge, > low.

    Returns:
        `height` strings of `width` characters, top row first.
    """
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    heights = [_row(v, low, high, rows) for v in resample(values, columns)]
    previous = heights[0] if heights else 0
    for x, y in enumerate(heights):
        # Fill up to the previous column's dot, so that steep curves stay connected.
        for dot in range(min(previous, y) + 1, max(previous, y)):
            _set(cells, x, rows - 1 - dot)
        _set(cells, x, rows - 1 - y)
        previous = y
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def resample(values: Sequence[float], count: int) -> list[float]:
    """`count` numbers that follow `values`: bucket means when there are more, lines when fewer."""
    finite = [v for v in values if math.isfinite(v)]
    n = len(finite)
    if n == 0 or count < 1:
        return []
    if n >= count:
        return [
            sum(bucket) / len(bucket)
            for i in range(count)
            if (bucket := finite[i * n // count : (i + 1) * n // count])
        ]
    if n == 1:
        return finite * count
    result = []
    for i in range(count):
        position = i * (n - 1) / (count - 1)
        left = min(int(position), n - 2)
        result.append(finite[left] + (finite[left + 1] - finite[left]) * (position - left))
    return result


def bar(fraction: float, width: int) -> str:
    """A bar of `width` characters filled to `fraction` (clipped to [0, 1]), in eighths."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return ("█" * full + partial).ljust(width)


def _row(value: float, low: float, high: float, rows: int) -> int:
    share = (value - low) / (high - low)
    return round(min(max(share, 0.0), 1.0) * (rows - 1))


def _set(cells: list[list[int]], x: int, y: int) -> None:
    cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
