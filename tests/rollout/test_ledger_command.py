"""`headrace ledger`: its books add up, damage done by hand is found, and the exit code says so."""

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from ledger_writer import batch, make_call, play

from headrace.cli import main
from headrace.rollout.record import evidence
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import DropReason, Outcome


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A run in the middle: groups trained, dropped, waiting, stale and open, and an evaluation."""
    run_dir = tmp_path_factory.mktemp("sound")
    with Ledger.create(run_dir) as ledger:
        ledger.stage_started("rl")
        ledger.put_state("version", 3)
        ledger.publish("rl", 1, 0, "start")
        trained = play(ledger, "g", [0.0, 1.0, None], versions=(1,))
        play(ledger, "h", [1.0, 1.0], versions=(1,))
        stale = play(ledger, "s", [0.0, 1.0], versions=(0,))
        play(ledger, "w", [0.0, 1.0], versions=(2,))
        play(ledger, "o", [0.0, 1.0], versions=(2,), decide=False)
        ledger.cut_batch(batch(0, trained[:2], version=2, tau=1))
        ledger.commit_batch("rl", 0, 1)
        ledger.publish("rl", 2, 1, "v2")
        ledger.checkpointed("rl", 1, "v2")
        more = play(ledger, "m", [0.0, 1.0], versions=(1, 2))
        ledger.cut_batch(
            batch(1, more, version=2, tau=1), dropped=[(name, DropReason.STALE) for name in stale]
        )
        ledger.commit_batch("rl", 1, 2)
        ledger.dispatch("evaluation", "eval:x", "e", "toy", {}, ["e"])
        ledger.record_call(make_call("e", 0))
        ledger.record_call(make_call("e", 1, parent="e/0"))
        ledger.finish("e", Outcome.OK, {"reward": 1.0})
    return run_dir


def report(capsys, run_dir, *options):
    """(exit code, JSON report)"""
    code = main(["ledger", str(run_dir), "--json", *options])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_books_of_a_sound_run_close(sound, capsys):
    before = (sound / "ledger.sqlite").read_bytes()
    code, found = report(capsys, sound)
    assert code == 0, found["laws"]
    assert found["held"]
    assert list(found["laws"]) == ["L2", "L4", "L5", "L6", "L7", "L9"]
    rl, evaluation = found["stages"]
    assert rl["groups"] == {
        "dispatched": 6,
        "trained": 2,
        "dropped": {"no_signal": 1, "stale": 1},
        "waiting": 1,
        "open": 1,
    }
    # Three tokens per call and version; a call of group m has two versions.
    assert rl["tokens"] == {
        "sampled": 13 * 3 + 2 * 3,
        "trained": 2 * 3 + 2 * 6,
        "dropped": {"env_failed": 3, "no_signal": 6, "stale": 6},
        "pending": 12,
    }
    assert rl["staleness"] == {"0": 6, "1": 12}
    assert rl["batches"] == {"cut": 2, "trained": 2, "replayed": 0, "tau": 1}
    assert rl["duplicates"] == {}
    assert [p["version"] for p in rl["publications"]] == [1, 2]
    assert rl["trained_digest"]
    assert evaluation["tokens"]["dropped"] == {"evaluation": 6}
    assert report(capsys, sound, "--stage", "rl")[1]["stages"] == [rl]
    assert (sound / "ledger.sqlite").read_bytes() == before


def test_people_get_tables_and_words(sound, capsys):
    assert main(["ledger", str(sound)]) == 0
    shown = capsys.readouterr().out
    for text in ("rl  not finished", "no_signal 1, stale 1", "bound 1", "2 (update 1)", "L7  held"):
        assert text in shown


def _change_call(connection, call_id, change, **columns):
    """Rewrite the stored spans of a call, and columns beside them."""
    ((body,),) = connection.execute("SELECT body FROM calls WHERE id = ?", (call_id,))
    stored = evidence._decoder.decode(body)
    spans = tuple(msgspec.structs.replace(span, **change(span)) for span in stored.spans)
    body = evidence._encoder.encode(msgspec.structs.replace(stored, spans=spans))
    connection.execute("UPDATE calls SET body = ? WHERE id = ?", (body, call_id))
    for name, value in columns.items():
        connection.execute(f"UPDATE calls SET {name} = ? WHERE id = ?", (value, call_id))


def _without_keys(connection, *tables):
    """The same tables without what keeps rows apart."""
    for table in tables:
        connection.executescript(
            f"CREATE TABLE copied AS SELECT * FROM {table}; DROP TABLE {table};"
            f"ALTER TABLE copied RENAME TO {table};"
        )


def _extra_member(connection, session="h.0"):
    connection.execute(
        "INSERT INTO batch_members SELECT key, 'rl', 0, 2, 0.5, 1 FROM sessions WHERE id = ?",
        (session,),
    )


def _extra_rollout(connection):
    connection.execute(
        "INSERT INTO sessions (id, group_id, stage, purpose, outcome, reward, drop_reason, "
        "dispatched_at) VALUES ('h.9', 'h', 'rl', 'train', 'ok', 1.0, 'no_signal', 1.0)"
    )


def _batch_twice(connection):
    connection.execute(
        "INSERT INTO batches SELECT stage, 2, version, tau, step, 0, cut_at, committed_at "
        "FROM batches WHERE idx = 1"
    )


def _batch_twice_with_members(connection):
    _without_keys(connection, "batch_members")
    _batch_twice(connection)
    connection.execute(
        "INSERT INTO batch_members SELECT session, stage, 2, position, advantage, multiplicity "
        "FROM batch_members WHERE batch = 1"
    )


def _group_twice(connection):
    _without_keys(connection, "groups")
    connection.execute("INSERT INTO groups SELECT * FROM groups WHERE id = 'g'")


def _call_twice(connection):
    _without_keys(connection, "calls")
    connection.execute("INSERT INTO calls SELECT * FROM calls WHERE id = 'g.0/0'")


def _token_missing(connection):
    _change_call(connection, "g.0/0", lambda s: {"ids": s.ids[:-1], "logprobs": s.logprobs[:-1]})


def _logprob_missing(connection):
    ((body,),) = connection.execute("SELECT body FROM calls WHERE id = 'g.0/0'")
    parts = msgspec.msgpack.decode(body)
    parts[6][0]["logprobs"].pop()
    connection.execute(
        "UPDATE calls SET body = ? WHERE id = 'g.0/0'", (msgspec.msgpack.encode(parts),)
    )


def _sql(text):
    return lambda connection: connection.executescript(text)


DAMAGES = {
    "a member that was dropped": ("L2", _extra_member),
    "a member whose group is not decided": ("L2", lambda c: _extra_member(c, "o.0")),
    "a member that failed through its environment": ("L6", lambda c: _extra_member(c, "g.2")),
    "a rollout too many in a group": ("L2", _extra_rollout),
    "a member taken out": ("L2", _sql("DELETE FROM batch_members WHERE position = 0")),
    "a batch twice": ("L9", _batch_twice),
    "a batch twice, with its members": ("L9", _batch_twice_with_members),
    "sessions in two batches": ("L2", _batch_twice_with_members),
    "a group twice": ("L2", _group_twice),
    "a call twice": ("L2", _call_twice),
    "a group gone": ("L2", _sql("DELETE FROM groups WHERE id = 'h'")),
    "a call gone": ("L2", _sql("DELETE FROM calls WHERE id = 'e/0'")),
    "a token gone": ("L2", _token_missing),
    "a logprob gone": ("L5", _logprob_missing),
    "a version never published": (
        "L4",
        lambda c: _change_call(c, "g.0/0", lambda s: {"weight_version": 9}, oldest=9, newest=9),
    ),
    "a version changed in the books": (
        "L4",
        _sql("UPDATE calls SET oldest = 2, newest = 2 WHERE id = 'g.0/0'"),
    ),
    "a member older than it was": (
        "L7",
        lambda c: _change_call(c, "g.0/0", lambda s: {"weight_version": 0}, oldest=0, newest=0),
    ),
    "a batch cut later than it was": ("L7", _sql("UPDATE batches SET version = 3 WHERE idx = 1")),
    "a reward for a failed environment": (
        "L6",
        _sql("UPDATE sessions SET reward = 0.0 WHERE id = 'g.2'"),
    ),
    "an advantage of the other sign": (
        "L6",
        _sql("UPDATE batch_members SET advantage = -advantage WHERE batch = 0"),
    ),
    "a trained update taken back": (
        "L9",
        _sql("UPDATE batches SET step = NULL WHERE idx = 0"),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_breaks_its_law(sound, tmp_path, capsys, name):
    law, damage = DAMAGES[name]
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    with contextlib.closing(sqlite3.connect(copy / "ledger.sqlite")) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        damage(connection)
        connection.commit()
    code, found = report(capsys, copy)
    assert code == 1
    assert not found["held"]
    assert not found["laws"][law]["held"], found["laws"]
    assert "first: " in found["laws"][law]["detail"]
    main(["ledger", str(copy)])
    assert f"{law}  BROKEN" in capsys.readouterr().out


def test_what_occurs_twice_is_counted(sound, tmp_path, capsys):
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    with contextlib.closing(sqlite3.connect(copy / "ledger.sqlite")) as connection:
        _batch_twice_with_members(connection)
        connection.commit()
    twice = report(capsys, copy, "--stage", "rl")[1]["stages"][0]["duplicates"]
    assert twice == {"sessions in batches": 2, "tokens trained again": 12}


def test_mistakes_are_one_line_and_code_2(sound, tmp_path, capsys):
    (tmp_path / "ledger.sqlite").write_text("not a database, but long enough to look into it")
    for arguments, message in (
        ([str(tmp_path / "none")], "no ledger at"),
        ([str(tmp_path)], "not a headrace ledger"),
        ([str(sound), "--stage", "sft"], "--stage sft: the ledger has no such stage; it has rl"),
    ):
        assert main(["ledger", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_run_that_goes_on_is_read_beside_its_writer(sound, tmp_path, capsys):
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    with Ledger.resume(copy) as ledger:
        ledger.dispatch("rl", "train", "new", "toy", {}, ["new.0", "new.1"])
        code, found = report(capsys, copy)
    assert code == 0, found["laws"]
    assert found["stages"][0]["groups"]["open"] == 2
