"""Bad files, full disks, two writers: one clear line each, and nothing acknowledged is lost."""

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ledger_writer import batch, make_call, play

from headrace.errors import UserError
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.store import SCHEMA_VERSION
from headrace.rollout.types import Outcome


def test_a_finished_run_can_be_read_without_write_permission(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        play(ledger, "g", [0.0, 1.0])
    folder = Path(tempfile.mkdtemp(prefix="headrace-read-only-"))
    try:
        (folder / "ledger.sqlite").write_bytes((tmp_path / "ledger.sqlite").read_bytes())
        folder.chmod(0o555)
        # In a child, because root may write everywhere and has to become somebody else first.
        code = (
            "import os, sys; from headrace.rollout.record.reading import LedgerReader\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "counts = LedgerReader.open(sys.argv[1]).outcome_counts()\n"
            "print(counts, os.access(sys.argv[1], os.W_OK))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip() == "{'ok': 2} False", done.stderr
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_one_writer_at_a_time(ledger, tmp_path):
    with pytest.raises(UserError, match="in use by another headrace process"):
        Ledger.resume(tmp_path)
    ledger.close()
    Ledger.resume(tmp_path).close()


def test_a_run_directory_is_not_overwritten(ledger, tmp_path):
    ledger.close()
    with pytest.raises(UserError, match="--resume"):
        Ledger.create(tmp_path)
    Ledger.resume(tmp_path).close()


def test_a_ledger_of_the_first_schema_is_read_as_it_is_and_upgraded_by_a_resume(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        play(ledger, "g", [0.0, None, 1.0])
    file = tmp_path / "ledger.sqlite"
    with sqlite3.connect(file) as raw:
        raw.execute("ALTER TABLE sessions DROP COLUMN failure")
        raw.execute("PRAGMA user_version = 1")
    raw.close()
    before = file.read_bytes()
    with LedgerReader.open(tmp_path) as reader:
        assert reader.failure_counts() == {FailureReason.ENV_FAILED: 1}
        assert {s.failure for s in reader.sessions()} == {None}
        assert len(reader.rollouts("g")) == 3
        assert all(finding.held for finding in audit(reader).values())
    assert file.read_bytes() == before
    with Ledger.resume(tmp_path) as ledger:
        ledger.dispatch("rl", "train", "h", "toy", {}, ["h0"])
        ledger.finish("h0", Outcome.ENV_FAILED, failure=FailureReason.TASK_HUNG)
        assert ledger.failure_counts() == {
            FailureReason.ENV_FAILED: 1,
            FailureReason.TASK_HUNG: 1,
        }
    Ledger.resume(tmp_path).close()
    with sqlite3.connect(file) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    raw.close()


@pytest.mark.parametrize("opener", [Ledger.resume, LedgerReader.open])
def test_files_that_are_no_ledger(tmp_path, opener):
    with pytest.raises(UserError, match="no ledger at"):
        opener(tmp_path)
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(b"this is a text and no database, long enough to be looked at" * 20)
    with pytest.raises(UserError, match="damaged or not a headrace ledger"):
        opener(tmp_path)
    file.unlink()
    other = sqlite3.connect(file)
    other.execute("CREATE TABLE t (x)")
    other.close()
    before = file.read_bytes()
    with pytest.raises(UserError, match="SQLite file but not a headrace ledger"):
        opener(tmp_path)
    assert file.read_bytes() == before


@pytest.mark.parametrize("opener", [Ledger.resume, LedgerReader.open])
def test_a_newer_schema_is_named(ledger, tmp_path, opener):
    ledger.close()
    raw = sqlite3.connect(tmp_path / "ledger.sqlite")
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(UserError, match="schema 99"):
        opener(tmp_path)


def test_a_damaged_ledger_is_not_resumed(ledger, tmp_path):
    for i in range(20):
        play(ledger, f"g{i}", [0.0, 1.0], tokens=500)
    ledger.close()
    file = tmp_path / "ledger.sqlite"
    data = bytearray(file.read_bytes())
    for page in range(4096 * 10, len(data) - 4096, 4096 * 3):
        data[page : page + 64] = b"\xff" * 64
    file.write_bytes(data)
    with pytest.raises(UserError, match="damaged") as caught:
        Ledger.resume(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_directory_and_killed_before_the_first_table(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Ledger.create(tmp_path / "nowhere" / "ledger.sqlite")
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(UserError, match="empty"):
        LedgerReader.open(tmp_path)
    with Ledger.resume(tmp_path) as ledger:
        play(ledger, "g", [0.0, 1.0])


def test_a_full_disk_is_said_in_one_line_and_loses_nothing(ledger, tmp_path):
    names = play(ledger, "g", [0.0, 1.0])
    pages = ledger._store.execute("PRAGMA page_count")[0][0]
    ledger._store.execute(f"PRAGMA max_page_count = {pages + 3}")  # what SQLite takes for the disk
    ledger.dispatch("rl", "train", "h", "toy", {}, ["s"])

    def record_until_full():
        for index in range(100):
            ledger.record_call(make_call("s", index, tokens=500))

    with pytest.raises(UserError, match="full; free space, then resume") as caught:
        record_until_full()
    assert "\n" not in str(caught.value)
    kept = len(ledger.session("s").calls)
    ledger.close()
    with Ledger.resume(tmp_path) as again:
        again.record_call(make_call("s", kept, tokens=500))
        assert len(again.session("s").calls) == kept + 1
        again.cut_batch(batch(0, names))
        assert all(finding.held for finding in audit(again).values())


def test_a_torn_log_opens_at_an_earlier_moment(ledger, tmp_path):
    """After a power cut the end of the write-ahead log may be missing: older, but consistent."""
    for i in range(10):
        play(ledger, f"g{i}", [0.0, 1.0])
    wal = (tmp_path / "ledger.sqlite-wal").read_bytes()
    main = (tmp_path / "ledger.sqlite").read_bytes()
    assert len(wal) > 8192
    for i, size in enumerate(range(len(wal) // 2, len(wal), len(wal) // 7)):
        torn = tmp_path / f"torn{i}"
        torn.mkdir()
        (torn / "ledger.sqlite").write_bytes(main)
        (torn / "ledger.sqlite-wal").write_bytes(wal[:size])
        with Ledger.resume(torn) as older:
            older.recover("rl")
            assert 0 < len(list(older.sessions())) <= 20
            assert all(finding.held for finding in audit(older).values())
