"""A run directory that may change, read cheaply again and again.

It notices changes by file times and SQLite's own counter, reads only what was added to the metrics,
and keeps answers until the run has changed. While a run goes on, an answer that takes long is made
less often, so that looking never costs more than a small share of a core.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.errors import UserError
from headrace.observe.metrics import FILE_NAME as METRICS_FILE
from headrace.observe.metrics import MetricsTail
from headrace.observe.runs import RECIPE_FILE, SUMMARY_FILE, Run, require_run
from headrace.observe.vocabulary import Vocabulary
from headrace.rollout.record.browsing import BrowsingReader
from headrace.rollout.record.reading import FILE_NAME as LEDGER_FILE
from headrace.rollout.types import Session

T = TypeVar("T")

_SHARE = 0.05
"""Largest share of time that repeating one answer may take while the run changes."""
_SESSIONS_KEPT = 8


class RunSource:
    """One run directory. Use from one thread.

    Args:
        run_dir: the run.
        clock: monotonic seconds; replaced in tests.

    Raises:
        UserError: no run there.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = require_run(run_dir)
        self._clock = clock
        self._epoch = uuid.uuid4().hex[:8]
        self._tail = MetricsTail(self.path)
        self._ledger: BrowsingReader | None = None
        self._ledger_problem = ""
        self._ledger_file: tuple[object, ...] | None = None
        self._run: Run | None = None
        self._run_version = ""
        self._kept: dict[str, tuple[str, float, float, object]] = {}
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._vocabulary: tuple[object, Vocabulary | None] = ((), None)

    def close(self) -> None:
        """Close the ledger. Safe to repeat."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
            self._ledger_file = None

    def version(self) -> str:
        """Changes whenever anything in the run directory that is shown may have."""
        # First of all, since opening a ledger may make SQLite's side files.
        ledger = self.ledger()
        changes = 0 if ledger is None else ledger.changes()
        names = (RECIPE_FILE, SUMMARY_FILE, METRICS_FILE, LEDGER_FILE, f"{LEDGER_FILE}-wal")
        stamps = [_stamp(self.path / name) for name in names]
        return f"{self._epoch}-{hash((*stamps, changes)) & 0xFFFFFFFFFFFF:012x}"

    def last_change(self) -> float | None:
        """Unix time of the newest write to metrics, summary or ledger; None when there is none."""
        times: list[float] = []
        for name in (SUMMARY_FILE, METRICS_FILE, LEDGER_FILE, f"{LEDGER_FILE}-wal"):
            try:
                found = (self.path / name).stat()
            except OSError:
                continue
            # Readers make an empty write-ahead log; only a writer fills it.
            if found.st_size:
                times.append(found.st_mtime)
        return max(times, default=None)

    def ledger(self) -> BrowsingReader | None:
        """The evidence; None when there is none that can be read. Valid until the next call."""
        file = self.path / LEDGER_FILE
        if self._ledger is None or self._ledger_file != _identity(file):
            self.close()
            self._run, self._ledger_problem = None, ""
            if file.is_file():
                try:
                    self._ledger = BrowsingReader.open(self.path)
                except UserError as error:
                    self._ledger_problem = str(error)
            self._ledger_file = _identity(file)
        return self._ledger

    def run(self) -> Run:
        """The run as of now.

        Raises:
            UserError: a file of it is damaged.
        """
        version = self.version()
        if self._run is None or version != self._run_version:
            self._tail.update()
            run = Run(self.path, rows=self._tail.rows, ledger=self.ledger())
            if run.ledger is None and self._ledger_problem:
                run.ledger_problem = self._ledger_problem
            self._run, self._run_version = run, version
        return self._run

    def kept(self, name: str, compute: Callable[[Run], T]) -> tuple[str, T]:
        """An answer about the run and the version it is of, computed again only when needed.

        Args:
            name: of the answer.
            compute: makes it.

        Raises:
            UserError: a file of the run is damaged.
        """
        version = self.version()
        kept = self._kept.get(name)
        if kept is not None:
            known, at, cost, value = kept
            if known == version or self._clock() - at < cost / _SHARE:
                return known, value  # type: ignore[return-value]  # kept under its own name
        began = self._clock()
        value = compute(self.run())
        ended = self._clock()
        self._kept[name] = (version, ended, ended - began, value)
        return version, value

    def session(self, session_id: str) -> Session | None:
        """Full evidence of a session; None when there is none of that id.

        Raises:
            UserError: its stored bytes are damaged.
        """
        ledger = self.ledger()
        if ledger is None:
            return None
        key = (self.version(), session_id)
        if key not in self._sessions:
            try:
                self._sessions[key] = ledger.session(session_id)
            except KeyError:
                return None
            while len(self._sessions) > _SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer of the newest checkpoint; None when there is none.

        Raises:
            UserError: its file cannot be read.
        """
        file = Vocabulary.file_of(self.path)
        stamp = () if file is None else (file, *_stamp(file))
        if stamp != self._vocabulary[0]:
            self._vocabulary = (stamp, Vocabulary.of_run(self.path))
        return self._vocabulary[1]


def _identity(ledger: Path) -> tuple[object, ...]:
    """Changes when another ledger is there, or when one that nobody wrote to gets a writer.

    A reader that was opened beside no write-ahead log may assume that there is none.
    """
    return _stamp(ledger)[:1], ledger.with_name(f"{ledger.name}-wal").exists()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file does: (inode, time, size), nothing when there is no file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
