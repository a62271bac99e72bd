"""A session's calls are drawn under the calls they continue, forks with their reasons."""

import io

from rich.console import Console

from headrace.observe.show import call_tree
from headrace.rollout.types import Call, FinishReason, Outcome, ParseState, Session, Span


def call(index: int, parent: str | None, fork: str | None = None, **changes: object) -> Call:
    fields: dict[str, object] = {
        "id": f"s/{index}",
        "session_id": "s",
        "index": index,
        "parent_id": parent,
        "fork_reason": fork,
        "idempotency_key": None,
        "messages": [],
        "tools": [],
        "renderer_id": "r",
        "prompt_delta": (1, 2, 3),
        "spans": (Span((4, 5), (-1.0, -1.0), index, "e"),),
        "finish_reason": FinishReason.STOP,
        "parse_state": ParseState.OK,
        "response": {},
        "started_at": 0.0,
        "finished_at": 0.0,
    }
    return Call(**{**fields, **changes})  # type: ignore[arg-type]  # a shorthand


def test_the_tree_shows_who_continues_whom_and_why_others_do_not() -> None:
    calls = (
        call(0, None),
        call(1, "s/0"),
        call(2, "s/0", parse_state=ParseState.MALFORMED),
        call(3, None, "history_rewritten"),
        call(4, "s/1"),
    )
    session = Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=calls)
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(call_tree(session))
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    lines = [line.rstrip() for line in shown.splitlines()]
    depth = {line.split("call ")[1][0]: line.index("call") for line in lines if "call" in line}
    assert depth["0"] == depth["3"] < depth["1"] == depth["2"] < depth["4"]
    assert [line.split("call ")[1][0] for line in lines if "call" in line] == list("01423")
    assert "5 held + 3 read, 2 sampled" in lines[2]
    assert "10 held + 3 read, 2 sampled" in lines[3]
    assert "malformed" in lines[4]
    assert "fork: history_rewritten" in lines[5]
    assert "v4" in lines[3]
