"""Versions that an engine only bounded: kept by the ledger, counted as old, shown as bounds."""

import msgspec
import pytest
from rich.console import Console

from headrace.observe.show import _token_table
from headrace.rollout.record.rows import SessionSummary
from headrace.rollout.segments import segments
from headrace.rollout.types import Call, FinishReason, Outcome, ParseState, Session, Span

EXACT = Span((3, 4), (-0.5, -0.25), 4, "e")
BOUNDED = Span((5,), (-1.0,), 4, "e", 6)


def session(*spans):
    call = Call(
        id="c0",
        session_id="s",
        index=0,
        parent_id=None,
        fork_reason=None,
        idempotency_key=None,
        messages=[],
        tools=[],
        renderer_id="test",
        prompt_delta=(1, 2),
        spans=spans,
        finish_reason=FinishReason.STOP,
        parse_state=ParseState.OK,
        response={},
        started_at=0.0,
        finished_at=0.0,
    )
    return Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=(call,))


def test_bounds_must_leave_something_open():
    for newest in (4, 3):
        with pytest.raises(ValueError, match="newest_version"):
            Span((1,), (-1.0,), 4, "e", newest)


def test_exact_spans_are_stored_as_ever_and_bounded_ones_come_back():
    encoded = msgspec.msgpack.encode((EXACT, BOUNDED))
    assert msgspec.msgpack.decode(encoded)[0] == {
        "ids": [3, 4],
        "logprobs": [-0.5, -0.25],
        "weight_version": 4,
        "engine_id": "e",
    }
    assert msgspec.msgpack.decode(encoded, type=tuple[Span, ...]) == (EXACT, BOUNDED)


def test_segments_keep_bounds_only_where_there_are_any():
    (exact,) = segments(session(EXACT))
    assert exact.newest_versions == ()
    (bounded,) = segments(session(EXACT, BOUNDED))
    assert bounded.versions == (-1, -1, 4, 4, 4)
    assert bounded.newest_versions == (-1, -1, 4, 4, 6)


def test_the_ledger_counts_staleness_from_the_oldest_and_keeps_the_bounds(ledger):
    ledger.dispatch("rl", "train", "g", "t", {}, ["s"])
    (call,) = session(EXACT, BOUNDED).calls
    ledger.record_call(call)
    ledger.finish("s", Outcome.OK, {"reward": 1.0})
    assert ledger.session("s").calls[0].spans == (EXACT, BOUNDED)
    (summary,) = ledger.sessions()
    assert summary.oldest_version == 4


def test_the_token_table_shows_bounds():
    (segment,) = segments(session(EXACT, BOUNDED))
    summary = SessionSummary(
        **dict.fromkeys(SessionSummary.__struct_fields__)  # type: ignore[arg-type]
    )
    console = Console(width=80, record=True)
    console.print(_token_table(segment, None, summary))
    lines = console.export_text().splitlines()
    versions = [line.split()[-1] for line in lines if line.split() and line.split()[0].isdigit()]
    assert versions == ["–", "–", "v4", "v4", "v4..v6"]
