"""How numbers are written for people: durations, rates, percentages, intervals, token text.

One place, so that the live view, the report and `headrace show` agree to the last digit.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any


def duration(seconds: float | None) -> str:
    """ "0.4 s", "42 s", "3:07", "1:02:03"; "–" when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def percent(rate: float | None, digits: int = 1) -> str:
    """ "81.3%" from 0.813; "–" when unknown."""
    if rate is None or not math.isfinite(rate):
        return "–"
    return f"{100 * rate:.{digits}f}%"


def points(difference: float) -> str:
    """ "+30.7" percentage points from 0.307, always signed."""
    return f"{100 * difference:+.1f}"


def count(value: float | None) -> str:
    """ "1,234,567"; "–" when unknown."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Three significant digits with a magnitude letter: "842", "3.1k", "12M", "0.0042"."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            scaled = value / limit
            return f"{scaled:.{1 if abs(scaled) < 100 else 0}f}{letter}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    if size >= 0.001:
        return f"{value:.3g}"
    return f"{value:.1e}"


def memory(size: float | None) -> str:
    """ "1.5 GiB", "312 MiB" from bytes; "–" when unknown."""
    if size is None or not math.isfinite(size):
        return "–"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def loss_name(kind: str) -> str:
    """What `loss` is in a stage of this kind."""
    return "indexer loss" if kind == "dsa_warmup" else "loss"


def supervised_numbers(
    kind: str, metrics: Mapping[str, float], *, brief: bool = False
) -> list[str]:
    """A supervised stage's newest numbers in words, most telling first; those that exist.

    Args:
        kind: of the stage; decides what its loss is.
        metrics: a row of it.
        brief: only what a person asks first.
    """
    parts: list[str] = []
    for label, key, write in (
        (loss_name(kind), "loss", short),
        ("language", "language_loss", short),
        ("mtp", "mtp_loss", short),
        ("index", "index_loss", short),
        ("grad norm", "grad_norm", short),
        ("tokens/s", "tokens_per_s", short),
        ("MFU", "mfu", percent),
        ("memory", "memory_mb", lambda v: memory(v * 2**20)),
        ("lr", "learning_rate", short),
    ):
        if key in metrics and (not brief or key in ("loss", "tokens_per_s", "mfu")):
            parts.append(f"{label} {write(metrics[key])}")
    return parts


def interval(low: float, high: float) -> str:
    """ "46.7–57.9%" from two rates."""
    return f"{100 * low:.1f}–{100 * high:.1f}%"


def stage_of(evaluation: Mapping[str, Any]) -> str:
    """The stage whose result was measured, "start" before the first: "rl" also for "rl greedy"."""
    return str(evaluation.get("after", "?")).removesuffix(" greedy")


def label_of(evaluation: Mapping[str, Any], *, task: bool = False) -> str:
    """What an evaluation measured, in words: "before training" or "after rl", greedy marked.

    Args:
        evaluation: its record.
        task: name the task first, as where several are measured.
    """
    words = after_words(stage_of(evaluation))
    words = f"{evaluation.get('task', '?')} {words}" if task else words
    return f"{words}, greedy" if evaluation.get("temperature") == 0 else words


def several_tasks(evaluations: Iterable[Mapping[str, Any]]) -> bool:
    """Whether these are of more than one task, so that labels have to name it."""
    return len({e.get("task") for e in evaluations}) > 1


def after_words(stage: str) -> str:
    """ "after pretrain", "before training" for the model before the first stage."""
    return "before training" if stage == "start" else f"after {stage}"


def moment(unix: float | None) -> str:
    """Local date and time to the second; "–" when unknown."""
    return "–" if not unix else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def printable(text: str) -> str:
    """`text` on one line: control characters and line ends shown as escapes."""
    return "".join(
        ch if ch.isprintable() else ch.encode("unicode_escape").decode("ascii") for ch in text
    )


def readable(text: str) -> str:
    """`text` as any page or terminal can show it: control characters as symbols, lone surrogates
    as escapes, as are those that turn the direction of what follows; line ends and tabs kept.
    Models write such things."""
    return text.translate(_CONTROL).encode("utf-8", "backslashreplace").decode("utf-8")


_CONTROL: dict[int, int | str] = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"}
_CONTROL |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_CONTROL |= {i: f"\\u{i:04x}" for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Control characters to their pictures (U+2400 block), C1 controls to the replacement character,
bidirectional overrides to escapes."""
