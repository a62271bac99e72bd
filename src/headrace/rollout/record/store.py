"""The SQLite file under the ledger: schema, one writer, transactions, and errors people can read.

It knows the tables but not what they mean; `reading.py` and `ledger.py` do. WAL with
synchronous=NORMAL makes a commit one write() to the page cache: a commit survives SIGKILL of this
process at any moment, and costs no fsync. (After a power cut the newest commits may be missing, but
the file is consistent.)
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UserError

APPLICATION_ID = 0x48524C47  # "HRLG", in the file's header
SCHEMA_VERSION = 2
"""1: sessions had no `failure`. Readers see it as NULL; a resume adds it."""
BUSY_TIMEOUT_S = 5.0

# Blobs come last in their row, so that scans over the small columns skip the overflow pages.
_SCHEMA = (
    """CREATE TABLE stages (
        name TEXT PRIMARY KEY, started_at REAL NOT NULL, finished_at REAL, seconds REAL,
        result BLOB) STRICT""",
    """CREATE TABLE groups (
        id TEXT PRIMARY KEY, stage TEXT NOT NULL, purpose TEXT NOT NULL, task TEXT NOT NULL,
        instance BLOB NOT NULL, size INTEGER NOT NULL, state TEXT NOT NULL, drop_reason TEXT,
        created_at REAL NOT NULL) STRICT""",
    "CREATE INDEX groups_by_stage ON groups(stage, purpose, state)",
    # replaced = 1: lost in a crash, no longer a member of its group.
    # drop_batch: index of the batch at whose cut the session was dropped.
    """CREATE TABLE sessions (
        key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL
        REFERENCES groups(id), stage TEXT NOT NULL, purpose TEXT NOT NULL, outcome TEXT,
        reward REAL, drop_reason TEXT, drop_batch INTEGER, replaced INTEGER NOT NULL DEFAULT 0,
        dispatched_at REAL NOT NULL, finished_at REAL, reason TEXT NOT NULL DEFAULT '',
        failure TEXT, rewards BLOB, detail BLOB) STRICT""",
    "CREATE INDEX sessions_by_group ON sessions(group_id)",
    "CREATE INDEX sessions_by_stage ON sessions(stage, purpose, outcome)",
    "CREATE TABLE tools (key INTEGER PRIMARY KEY, body BLOB NOT NULL UNIQUE) STRICT",
    # late = 1: arrived after its session had finished; evidence, but never trained.
    """CREATE TABLE calls (
        key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session INTEGER NOT NULL
        REFERENCES sessions(key), idx INTEGER NOT NULL, parent TEXT, tokens INTEGER NOT NULL,
        oldest INTEGER, newest INTEGER, drop_reason TEXT, late INTEGER NOT NULL, fork_reason TEXT,
        finish_reason TEXT NOT NULL, parse_state TEXT NOT NULL, tools INTEGER NOT NULL
        REFERENCES tools(key), body BLOB NOT NULL) STRICT""",
    "CREATE UNIQUE INDEX calls_by_session ON calls(session, idx)",
    # step is NULL while the batch is cut but not in the surviving weights.
    """CREATE TABLE batches (
        stage TEXT NOT NULL, idx INTEGER NOT NULL, version INTEGER NOT NULL, tau INTEGER,
        step INTEGER, replays INTEGER NOT NULL DEFAULT 0, cut_at REAL NOT NULL, committed_at REAL,
        PRIMARY KEY (stage, idx)) STRICT""",
    # The primary key is law L2: a session is in at most one batch, ever.
    """CREATE TABLE batch_members (
        session INTEGER PRIMARY KEY REFERENCES sessions(key), stage TEXT NOT NULL,
        batch INTEGER NOT NULL, position INTEGER NOT NULL, advantage REAL NOT NULL,
        multiplicity INTEGER NOT NULL, FOREIGN KEY (stage, batch) REFERENCES batches(stage, idx))
        STRICT""",
    "CREATE UNIQUE INDEX members_by_batch ON batch_members(stage, batch, position)",
    """CREATE TABLE publications (
        stage TEXT NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL,
        published_at REAL NOT NULL, PRIMARY KEY (stage, version)) STRICT""",
    """CREATE TABLE checkpoints (
        stage TEXT NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL, saved_at REAL NOT NULL,
        PRIMARY KEY (stage, step)) STRICT""",
    """CREATE TABLE recoveries (
        key INTEGER PRIMARY KEY, stage TEXT NOT NULL, step INTEGER NOT NULL,
        cancelled INTEGER NOT NULL, replayed INTEGER NOT NULL, at REAL NOT NULL) STRICT""",
    """CREATE TABLE evaluations (
        label TEXT NOT NULL, task TEXT NOT NULL, stage TEXT NOT NULL, n INTEGER NOT NULL,
        success REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL, detail BLOB NOT NULL,
        at REAL NOT NULL, PRIMARY KEY (label, task)) STRICT""",
    "CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT",
)


class Store:
    """One connection to a ledger file. Use from one thread.

    Make it with `create`, `resume` (both hold the writer's lock until `close`) or `read`.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, lock: sqlite3.Connection | None
    ) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        self._depth = 0

    @classmethod
    def create(cls, path: Path) -> "Store":
        """Start a ledger at `path`.

        Raises:
            UserError: there already is one, or the file cannot be made.
        """
        store = cls._open_writer(path)
        with store._closing_on_error():
            if store._has_tables():
                raise UserError(
                    f"run directory {path.parent} already holds a ledger ({path.name}); resume it "
                    f"with `headrace run --resume {path.parent}` or choose another --run-dir"
                )
            store._make_schema()
        return store

    @classmethod
    def resume(cls, path: Path) -> "Store":
        """Open an existing ledger for writing, after any kind of end of its former writer.

        Raises:
            UserError: none there, held by another process, damaged, foreign, or of a newer schema.
        """
        _require_file(path)
        store = cls._open_writer(path)
        with store._closing_on_error():
            if store._has_tables():
                version = store._check_identity()
                problems = store.execute("PRAGMA quick_check(1)")
                if problems != [("ok",)]:
                    first = " ".join(str(problems[0][0]).split())
                    raise UserError(f"ledger {path} is damaged ({first:.200}); {_MEND}")
                if version < SCHEMA_VERSION:
                    store._upgrade()
            else:  # killed between making the file and making its tables
                store._make_schema()
        return store

    @classmethod
    def read(cls, path: Path) -> "Store":
        """Open for reading only, also while a run is writing.

        Raises:
            UserError: none there, damaged, foreign, or of a newer schema.
        """
        _require_file(path)
        # Beside a finished run there is no WAL; in a directory that cannot be written SQLite then
        # needs to be told that nobody else will write either.
        attempts = ["mode=ro"]
        if not path.with_name(path.name + "-wal").exists():
            attempts.append("mode=ro&immutable=1")
        for attempt in attempts:
            with _explained(path):
                uri = f"{path.resolve().as_uri()}?{attempt}"
                connection = sqlite3.connect(
                    uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S
                )
            store = cls(path, connection, None)
            try:
                connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1")
            except sqlite3.OperationalError:
                if attempt != attempts[-1]:
                    connection.close()
                    continue
            except sqlite3.DatabaseError:
                pass  # explained just below
            with store._closing_on_error():
                if not store._has_tables():
                    raise UserError(f"ledger {path} is empty: its run ended before it began")
                if store._check_identity() < SCHEMA_VERSION:
                    # A name of this connection hides the table's; nothing is written to the file.
                    store.execute(
                        "CREATE TEMP VIEW sessions AS SELECT *, NULL AS failure FROM main.sessions"
                    )
            return store
        raise AssertionError("unreachable: the last attempt returns or raises")

    @classmethod
    def _open_writer(cls, path: Path) -> "Store":
        path = Path(path)
        if not path.parent.is_dir():
            raise UserError(f"run directory {path.parent} does not exist; create it first")
        lock = _hold_lock(path)
        try:
            with _explained(path):
                connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
        except BaseException:
            lock.close()
            raise
        store = cls(path, connection, lock)
        with store._closing_on_error():
            # Before journal_mode, which would already write to somebody else's database.
            store._check_identity(fresh_ok=True)
            store.execute("PRAGMA journal_mode = WAL")
            store.execute("PRAGMA synchronous = NORMAL")
            store.execute("PRAGMA foreign_keys = ON")
            store.execute("PRAGMA journal_size_limit = 16777216")
        return store

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _has_tables(self) -> bool:
        return bool(self.execute("SELECT 1 FROM sqlite_schema LIMIT 1"))

    def _make_schema(self) -> None:
        with self.transaction():
            for statement in _SCHEMA:
                self.execute(statement)
            self.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _upgrade(self) -> None:
        """Bring a ledger of an earlier version up to date."""
        with self.transaction():
            self.execute("ALTER TABLE sessions ADD COLUMN failure TEXT")
            self.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_identity(self, *, fresh_ok: bool = False) -> int:
        """The file's schema version.

        Raises:
            UserError: it is no ledger, or a newer one.
        """
        ((application,),) = self.execute("PRAGMA application_id")
        ((version,),) = self.execute("PRAGMA user_version")
        if fresh_ok and application == 0 and not self._has_tables():
            return version
        if application != APPLICATION_ID:
            raise UserError(f"{self.path} is an SQLite file but not a headrace ledger; {_MEND}")
        if not 1 <= version <= SCHEMA_VERSION:
            raise UserError(
                f"ledger {self.path} has schema {version}, this headrace reads up to "
                f"{SCHEMA_VERSION}; use the headrace version that wrote it"
            )
        return version

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return all its rows.

        Raises:
            UserError: the file or its disk is at fault.
        """
        with _explained(self.path):
            return self._connection.execute(sql, parameters).fetchall()

    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        """Run an INSERT and return the new row's integer key."""
        with _explained(self.path):
            key = self._connection.execute(sql, parameters).lastrowid
        assert key is not None
        return key

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. Nests: an inner failure undoes the inner part only."""
        outermost = self._depth == 0
        name = f"level{self._depth}"
        self.execute("BEGIN IMMEDIATE" if outermost else f"SAVEPOINT {name}")
        self._depth += 1
        try:
            try:
                yield
            finally:
                self._depth -= 1
            self.execute("COMMIT" if outermost else f"RELEASE {name}")
        except BaseException:
            # A full disk may already have rolled everything back.
            if self._connection.in_transaction:
                if outermost:
                    self.execute("ROLLBACK")
                else:
                    self.execute(f"ROLLBACK TO {name}")
                    self.execute(f"RELEASE {name}")
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Every read inside sees one moment of the file, whatever a writer commits meanwhile."""
        if self._connection.in_transaction:
            yield
            return
        self.execute("BEGIN")
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self.execute("COMMIT")

    def close(self) -> None:
        """Close the file and give the lock back. Safe to repeat."""
        self._connection.close()
        if self._lock is not None:
            self._lock.close()


_MEND = "name the run directory of a headrace run, or restore it from a copy"


def _require_file(path: Path) -> None:
    if not Path(path).is_file():
        raise UserError(f"no ledger at {path}; name the directory of a run that has started")


def _hold_lock(path: Path) -> sqlite3.Connection:
    """Take the writer's lock: an exclusive SQLite transaction on an empty file beside the ledger.

    The kernel frees it when this process ends, however it ends, and child processes do not inherit
    it. The ledger file itself cannot serve, because readers must get in during a run.
    """
    lock_path = path.with_name(path.name + ".lock")
    with _explained(path):
        lock = sqlite3.connect(lock_path, isolation_level=None, timeout=0.0)
        try:
            lock.execute("PRAGMA journal_mode = OFF")  # nothing is ever written to it
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            lock.close()
            if _primary_code(error) == sqlite3.SQLITE_BUSY:
                raise UserError(
                    f"run directory {path.parent} is in use by another headrace process; "
                    "wait for it or end it"
                ) from None
            raise
    return lock


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the errors of files and disks into one line for a person; leave bugs as they are."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = _primary_code(error)
        if code == sqlite3.SQLITE_FULL:
            text = (
                f"the disk of ledger {path} is full; free space, then resume with "
                f"`headrace run --resume {path.parent}`"
            )
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            text = f"ledger {path} stayed locked for {BUSY_TIMEOUT_S:g} s; end whatever holds it"
        elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            text = f"{path} is damaged or not a headrace ledger ({error}); {_MEND}"
        elif code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            text = f"ledger {path} cannot be opened ({error}); check the permissions"
        elif code == sqlite3.SQLITE_IOERR:
            text = f"ledger {path} cannot be read or written ({error}); check the disk"
        else:
            raise
        raise UserError(text) from error
