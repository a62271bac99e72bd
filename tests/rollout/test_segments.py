"""Segments and their accounting on hand-made call trees."""

import pytest

from headrace.rollout.segments import accounting, segments
from headrace.rollout.types import (
    Call,
    DropReason,
    FinishReason,
    Outcome,
    ParseState,
    Session,
    Span,
)


def call(index: int, parent: int | None, delta: list[int], *runs: list[int]) -> Call:
    """Call c<index>; token i was sampled at logprob -i/100, run k by version 10 + k."""
    spans = tuple(
        Span(tuple(run), tuple(-i / 100 for i in run), 10 + k, "e") for k, run in enumerate(runs)
    )
    return Call(
        id=f"c{index}",
        session_id="s",
        index=index,
        parent_id=None if parent is None else f"c{parent}",
        fork_reason=None,
        idempotency_key=None,
        messages=[],
        tools=[],
        renderer_id="test",
        prompt_delta=tuple(delta),
        spans=spans,
        finish_reason=FinishReason.STOP,
        parse_state=ParseState.OK,
        response={},
        started_at=0.0,
        finished_at=0.0,
    )


def session(*calls: Call, purpose: str = "train", outcome: Outcome = Outcome.OK) -> Session:
    return Session("s", "rl", purpose, "t", {}, "g", outcome, calls=calls)


def trained(found: list) -> list[list[int]]:
    return [[i for i, m in zip(seg.ids, seg.train_mask, strict=True) if m] for seg in found]


def test_one_path_is_one_segment_with_aligned_columns():
    (segment,) = segments(session(call(0, None, [1, 2], [3], [4]), call(1, 0, [5], [6])))
    assert segment.ids == (1, 2, 3, 4, 5, 6)
    assert segment.train_mask == (False, False, True, True, False, True)
    assert segment.logprobs == (0.0, 0.0, -0.03, -0.04, 0.0, -0.06)
    assert segment.versions == (-1, -1, 10, 11, -1, 10)


def test_siblings_share_a_prefix_that_trains_once():
    found = segments(session(call(0, None, [1], [2]), call(1, 0, [3], [4]), call(2, 0, [3], [5])))
    assert [segment.ids for segment in found] == [(1, 2, 3, 4), (1, 2, 3, 5)]
    assert trained(found) == [[2, 4], [5]]
    assert found[1].logprobs == (0.0, -0.02, 0.0, -0.05)  # kept, though not trained again


def test_a_fork_from_the_root_trains_on_its_own():
    found = segments(session(call(0, None, [1], [2]), call(1, None, [7], [8])))
    assert trained(found) == [[2], [8]]


def test_calls_without_output_end_nothing():
    tree = session(call(0, None, [1], [2]), call(1, 0, [3]), call(2, 1, [4]), call(3, None, [9]))
    assert [segment.ids for segment in segments(tree)] == [(1, 2)]


def test_a_call_without_output_can_be_continued():
    tree = session(call(0, None, [1], [2]), call(1, 0, [3]), call(2, 1, [4], [5]))
    assert [segment.ids for segment in segments(tree)] == [(1, 2, 3, 4, 5)]


def test_a_prefix_shared_with_a_dropped_segment_still_trains():
    tree = session(call(0, None, [1], [2]), call(1, 0, [3, 3, 3, 3], [4]), call(2, 0, [3], [5]))
    assert trained(segments(tree, max_tokens=4)) == [[2, 5]]
    account = accounting(tree, max_tokens=4)
    assert (account.sampled, account.trainable) == (3, 2)
    assert account.dropped == {DropReason.TOO_LONG: 1}


@pytest.mark.parametrize(
    ("purpose", "outcome", "reason"),
    [
        ("eval:before", Outcome.OK, DropReason.EVALUATION),
        ("train", Outcome.ENV_FAILED, DropReason.ENV_FAILED),
        ("train", Outcome.CANCELLED, DropReason.CANCELLED),
    ],
)
def test_sessions_that_never_train_say_why(purpose, outcome, reason):
    account = accounting(session(call(0, None, [1], [2, 3]), purpose=purpose, outcome=outcome))
    assert (account.sampled, account.trainable, account.dropped) == (2, 0, {reason: 2})


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.AGENT_FAILED, Outcome.TIMEOUT])
def test_scored_sessions_train_everything(outcome):
    account = accounting(session(call(0, None, [1], [2, 3]), outcome=outcome))
    assert (account.sampled, account.trainable, account.dropped) == (2, 2, {})


def test_an_empty_session_has_nothing():
    assert segments(session()) == []
    assert accounting(session()).sampled == 0


def test_broken_trees_are_refused():
    with pytest.raises(ValueError, match="c0: its parent c1"):
        segments(session(call(0, 1, [1], [2]), call(1, None, [1], [2])))
    with pytest.raises(ValueError, match="c0 appears twice"):
        segments(session(call(0, None, [1], [2]), call(0, None, [1], [2])))
