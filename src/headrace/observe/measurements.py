"""What a run measured of its language model: bits per byte, retrieval, chat format, by stage.

The records are summary.json's; this reads them as typed values, in one order, so that the report,
`headrace show` and the live view say the same. Total: odd records become odd text, never an error.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from headrace.observe.units import percent

BITS = "bits per byte"
CHAT = "chat format"
_ASPECTS = ("parsed", "thinking", "call", "ended", "correct")


class Measure(Enum):
    """Kinds of measurement, in the order they are shown."""

    BITS = "bits"
    RETRIEVAL = "retrieval"
    CHAT = "chat"
    OTHER = "other"


class Measurement(msgspec.Struct, frozen=True):
    """One measured number.

    Attributes:
        after: the stage whose model was measured, "start" before the first.
        task: what was measured, in words; the same words mean the same measurement.
        kind: of measurement.
        value: bits, or a rate in [0, 1].
        n: bytes or examples.
        bounds: 95% interval of a rate; None where there is none.
        length, keys: of a retrieval task, else 0.
        wall_s: seconds it took.
        detail: what the measurement itself says.
    """

    after: str
    task: str
    kind: Measure
    value: float
    n: int
    bounds: tuple[float, float] | None
    length: int
    keys: int
    wall_s: float
    detail: Mapping[str, Any]

    @property
    def words(self) -> str:
        """The value: "3.770", "81.3%"; "–" for a model that gives no numbers any more."""
        if not math.isfinite(self.value):
            return "–"
        return percent(self.value) if self.bounds is not None else f"{self.value:.3f}"

    @property
    def short_task(self) -> str:
        """The task where its kind and length are clear: "4 keys" for retrieval."""
        if self.kind is Measure.RETRIEVAL:
            return f"{self.keys} {'key' if self.keys == 1 else 'keys'}"
        return self.task


def is_measurement(record: Mapping[str, Any]) -> bool:
    """Whether a record of summary.json is a measurement; the others are rollouts on a task."""
    return isinstance(record.get("value"), int | float)


def measurement_of(record: Mapping[str, Any]) -> Measurement:
    """The record, typed; see `is_measurement`."""
    found = record.get("detail")
    detail: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    task = str(record.get("task", "?"))
    kind = Measure.OTHER
    if task == BITS:
        kind = Measure.BITS
    elif task == CHAT:
        kind = Measure.CHAT
    elif task.startswith("retrieval") and "length" in detail and "keys" in detail:
        kind = Measure.RETRIEVAL
    retrieval = kind is Measure.RETRIEVAL
    bounds = None
    if record.get("low") is not None and record.get("high") is not None:
        bounds = (float(record["low"]), float(record["high"]))
    return Measurement(
        after=str(record.get("after", "?")),
        task=task,
        kind=kind,
        value=float(record["value"]),
        n=int(record.get("n") or 0),
        bounds=bounds,
        length=int(detail["length"]) if retrieval else 0,
        keys=int(detail["keys"]) if retrieval else 0,
        wall_s=float(record.get("wall_s") or 0.0),
        detail=detail,
    )


class MeasurementTable(msgspec.Struct, frozen=True):
    """Measurements by task and stage.

    Attributes:
        stages: that were measured, in the order of measuring.
        rows: for every task, in the order they are shown, its measurements by stage.
    """

    stages: tuple[str, ...]
    rows: Sequence[Mapping[str, Measurement]]

    def of_kind(self, kind: Measure) -> list[Mapping[str, Measurement]]:
        """The rows of one kind."""
        return [row for row in self.rows if latest(row).kind is kind]


def tabulate(measurements: Iterable[Measurement]) -> MeasurementTable:
    """Arrange measurements; of two of the same thing the later one counts."""
    found = list(measurements)
    rows: dict[str, dict[str, Measurement]] = {}
    for one in found:
        rows.setdefault(one.task, {})[one.after] = one
    kinds = list(Measure)

    def place(row: Mapping[str, Measurement]) -> tuple[int, int, int]:
        one = latest(row)
        return kinds.index(one.kind), one.length, one.keys

    stages = tuple(dict.fromkeys(one.after for one in found))
    return MeasurementTable(stages, sorted(rows.values(), key=place))


def latest(row: Mapping[str, Measurement]) -> Measurement:
    """The newest measurement of a row, which is never empty."""
    return list(row.values())[-1]


def hardest_retrieval(table: MeasurementTable) -> Mapping[str, Measurement] | None:
    """The retrieval row at the longest context, with the most keys."""
    rows = table.of_kind(Measure.RETRIEVAL)
    return rows[-1] if rows else None


def aspects(chat: Measurement) -> list[tuple[str, float]]:
    """(name, rate) of what makes up following the chat format, "correct" last."""
    rates = chat.detail.get("rates")
    if not isinstance(rates, Mapping):
        return []
    return [(name, float(rates[name])) for name in _ASPECTS if name in rates]
