"""Metrics on disk: one JSON line per row for tools, and sinks such as TensorBoard for curves.

One writer per run, in the controlling process; rows arrive about once a second. Rows reach the
kernel before `log` returns, so a killed process loses none, and a line torn by a crash is cut off
on resume. TensorBoard records are written here directly, without importing torch or TensorFlow.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from headrace.errors import UserError
from headrace.observe.disk import full_disk

FILE_NAME = "metrics.jsonl"


class MetricRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl.

    Attributes:
        time: unix time, seconds.
        elapsed: seconds since the run first started, stops included.
        stage: stage name.
        step: optimizer step or update of that stage.
        metrics: flat name to value; a value that is not finite is left out.
    """

    time: float
    elapsed: float
    stage: str
    step: int
    metrics: dict[str, float]


class Sink(Protocol):
    """Another place that gets every row."""

    def scalars(self, stage: str, step: int, metrics: Mapping[str, float], now: float) -> None:
        """One row: stage, its step, finite numbers by name, unix time in seconds."""
        ...

    def close(self) -> None:
        """Nothing comes after this."""
        ...


class MetricsWriter:
    """Appends rows to `metrics.jsonl` of a run directory and hands them to sinks.

    Args:
        run_dir: must exist.
        resume: continue existing files; otherwise an existing metrics.jsonl is an error.
        sinks: who else gets the rows; closed with the writer. `tensorboard/` by default.

    Raises:
        UserError: not resuming although rows exist, or the files cannot be written.
    """

    def __init__(
        self, run_dir: Path, resume: bool = False, *, sinks: Sequence[Sink] | None = None
    ) -> None:
        self._path = run_dir / FILE_NAME
        self._started = time.time()
        if self._path.exists() and self._path.stat().st_size:
            if not resume:
                raise UserError(
                    f"{run_dir}: already holds metrics of a run; use --resume or another --run-dir"
                )
            self._started = self._repair()
        try:
            # Unbuffered, so each row is one write: readers and crashes see whole lines.
            self._rows: BinaryIO = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._sinks = [BoardSink(run_dir)] if sinks is None else list(sinks)
        except OSError as error:
            raise full_disk(error, self._path) from error

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> MetricRow:
        """Append one row and return it as written.

        Raises:
            UserError: the disk is full.
        """
        now = time.time()
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        row = MetricRow(now, round(now - self._started, 3), stage, int(step), finite)
        line = msgspec.json.encode(row) + b"\n"
        try:
            written = self._rows.write(line)
            if written != len(line):
                # A short write on a regular file means that the disk is full; keep lines whole.
                os.ftruncate(self._rows.fileno(), self._rows.tell() - written)
                raise OSError(28, "No space left on device")
            for sink in self._sinks:
                sink.scalars(stage, int(step), finite, now)
        except OSError as error:
            raise full_disk(error, self._path) from error
        return row

    def close(self) -> None:
        """Close the files. Safe to repeat."""
        self._rows.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self) -> float:
        """Cut a torn last line off; return when the run started (unix time)."""
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(self._path, whole)
        rows = read_metrics(self._path.parent)
        return rows[0].time - rows[0].elapsed if rows else time.time()


# protobuf makes these classes while importing, where type checkers do not see them.
_Event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
_Summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]


class BoardSink:
    """TensorBoard's event files in `tensorboard/` of a run directory, written synchronously."""

    def __init__(self, run_dir: Path) -> None:
        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = open(folder / name, "ab")  # noqa: SIM115  closed by close()
        self._records = RecordWriter(self._file)
        self._write(_Event(wall_time=now, file_version="brain.Event:2"))

    def scalars(self, stage: str, step: int, metrics: Mapping[str, float], now: float) -> None:
        values = [_Summary.Value(tag=f"{stage}/{k}", simple_value=v) for k, v in metrics.items()]
        self._write(_Event(wall_time=now, step=step, summary=_Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: Path) -> list[MetricRow]:
    """All rows of a run, in order; lines that cannot be read (torn by a crash) are skipped."""
    tail = MetricsTail(run_dir)
    tail.update()
    return tail.rows


class MetricsTail:
    """The rows of a run that may go on: each `update` reads only what was added.

    Attributes:
        rows: so far, in order; lines that cannot be read are skipped.
    """

    def __init__(self, run_dir: Path) -> None:
        self.rows: list[MetricRow] = []
        self._path = run_dir / FILE_NAME
        self._read = 0
        self._decoder = msgspec.json.Decoder(MetricRow)

    def update(self) -> bool:
        """Read what was added; returns whether anything was."""
        try:
            size = self._path.stat().st_size
            if size == self._read:
                return False
            # A resumed run cuts a torn line off, so a shorter file is read again.
            start = self._read if size > self._read else 0
            with self._path.open("rb") as file:
                file.seek(start)
                added = file.read()
        except FileNotFoundError:
            return False
        if start == 0:
            self.rows.clear()
        whole = added.rfind(b"\n") + 1
        self._read = start + whole
        before = len(self.rows)
        for line in added[:whole].splitlines():
            try:
                self.rows.append(self._decoder.decode(line))
            except (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError):
                continue
        return len(self.rows) != before
