"""Metrics on disk: one JSON line per row for tools, TensorBoard events for curves.

One writer per run, in the controlling process; rows arrive about once a second. Rows reach the
kernel before `log` returns, so a killed process loses none, and a line torn by a crash is cut off
on resume. TensorBoard records are written here directly, without importing torch or TensorFlow.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

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


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and `tensorboard/` of a run directory.

    Args:
        run_dir: must exist.
        resume: continue existing files; otherwise an existing metrics.jsonl is an error.

    Raises:
        UserError: not resuming although rows exist, or the files cannot be written.
    """

    def __init__(self, run_dir: Path, resume: bool = False) -> None:
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
            self._board = _BoardWriter(run_dir / "tensorboard")
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
            self._board.scalars(stage, int(step), finite, now)
        except OSError as error:
            raise full_disk(error, self._path) from error
        return row

    def close(self) -> None:
        """Close the files. Safe to repeat."""
        self._rows.close()
        self._board.close()

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


class _BoardWriter:
    """TensorBoard's event file format, written synchronously: records of scalar summaries."""

    def __init__(self, folder: Path) -> None:
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
    try:
        lines = (run_dir / FILE_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    decoder = msgspec.json.Decoder(MetricRow)
    rows: list[MetricRow] = []
    for line in lines:
        try:
            rows.append(decoder.decode(line))
        except (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError):
            continue
    return rows
