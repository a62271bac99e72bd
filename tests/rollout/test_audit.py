"""The audit finds what a forger changes in a ledger."""

import pytest
from ledger_writer import batch, make_call, play

from headrace.rollout.record.audit import audit
from headrace.rollout.types import Outcome, Segment, Span


@pytest.mark.parametrize(
    ("law", "forgery"),
    [
        ("L2", "UPDATE sessions SET drop_reason = 'stale' WHERE id = 'g.0'"),
        ("L2", "UPDATE calls SET tokens = 4 WHERE id = 'g.1/0'"),
        ("L2", "UPDATE sessions SET drop_reason = NULL WHERE id = 'e'"),
        ("L5", "UPDATE calls SET body = x'00' WHERE id = 'g.0/0'"),
        ("L6", "UPDATE sessions SET reward = 0.0 WHERE id = 'g.2'"),
        ("L6", "UPDATE sessions SET drop_reason = NULL WHERE id = 'g.2'"),
        ("L6", "UPDATE batch_members SET advantage = -advantage"),
        ("L7", "UPDATE batches SET version = 2"),
        ("L9", "UPDATE batches SET idx = 5"),
        ("L9", "UPDATE sessions SET outcome = NULL WHERE id = 'g.0'"),
    ],
)
def test_the_audit_sees_forgeries(ledger, law, forgery):
    names = play(ledger, "g", [0.0, 1.0, None])
    ledger.dispatch("rl", "eval:x", "e", "toy", {}, ["e"])
    ledger.record_call(make_call("e", 0))
    ledger.finish("e", Outcome.OK, {"reward": 1.0})
    ledger.cut_batch(batch(0, names[:2], version=1, tau=1))
    ledger.commit_batch("rl", 0, 1)
    assert all(finding.held for finding in audit(ledger).values()), audit(ledger)
    ledger._store.execute("PRAGMA foreign_keys = OFF")
    ledger._store.execute(forgery)
    assert not audit(ledger)[law].held


def test_the_audit_sees_a_token_without_a_logprob(ledger):
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    spans = (Span((1, 2), (-1.0, float("nan")), 0, "e"),)
    ledger.record_call(make_call("s", 0, spans=spans))
    assert not audit(ledger)["L4"].held


def test_the_audit_compares_segments_with_the_evidence(ledger):
    names = play(ledger, "g", [0.0, 1.0])
    ledger.cut_batch(batch(0, names))

    def all_but_one(session):
        return [Segment(session.id, (7,) * 3, (True, True, False), (-0.25,) * 3, (0,) * 3)]

    def every(session):
        return [Segment(session.id, (7,) * 3, (True,) * 3, (-0.25,) * 3, (0,) * 3)]

    assert audit(ledger, derive=every)["L5"].held
    assert not audit(ledger, derive=all_but_one)["L5"].held
