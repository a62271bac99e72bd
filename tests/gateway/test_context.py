"""Old tool results are folded, long contexts begin anew, and what was cut stays away."""

from typing import Any

import pytest
from scripted import BASH, ScriptedEngine, answers, merged_tokenizer

from headrace.gateway.context import FOLDED, Change, ContextManager, ContextPolicy, fold, task
from headrace.gateway.gateway import Gateway
from headrace.gateway.history import ignore_lines
from headrace.rollout.segments import segments
from headrace.rollout.types import Call, Outcome, Session
from headrace.tokens.compact import CompactRenderer

TOKENIZER = merged_tokenizer()
CALL = TOKENIZER.encode(
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
SYSTEM = {"role": "system", "content": "Use bash."}
USER = {"role": "user", "content": "how many?"}


def conversation(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [SYSTEM, USER]
    for i in range(turns):
        messages.append({"role": "assistant", "content": f"call {i}"})
        messages.append({"role": "tool", "content": f"result {i}"})
    return messages


def words(messages: list[dict[str, Any]]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def test_only_the_newest_results_are_kept() -> None:
    folded = fold(conversation(5), 2, FOLDED)
    results = [m["content"] for m in folded if m["role"] == "tool"]
    assert results == [FOLDED] * 3 + ["result 3", "result 4"]
    assert [m for m in folded if m["role"] != "tool"] == [
        m for m in conversation(5) if m["role"] != "tool"
    ]
    assert fold(conversation(2), 2, FOLDED) == conversation(2)


def test_the_task_is_everything_up_to_the_first_question() -> None:
    assert task(conversation(3)) == [SYSTEM, USER]
    assert task([SYSTEM]) == [SYSTEM]


def test_discarding_is_remembered_while_the_client_sends_everything() -> None:
    manager = ContextManager(ContextPolicy(discard_above=12))
    assert manager.apply(conversation(2), words) == (conversation(2), Change.NOTHING)
    assert manager.apply(conversation(3), words) == ([SYSTEM, USER], Change.DISCARDED)
    longer = conversation(4)
    kept = manager.apply(longer, words)
    assert kept == ([SYSTEM, USER, *longer[8:]], Change.DISCARDED)
    other = [SYSTEM, {"role": "user", "content": "another task"}]
    assert manager.apply(other, words) == (other, Change.NOTHING)
    assert manager.apply(conversation(1), words) == (conversation(1), Change.NOTHING)


def test_both_together_fold_first() -> None:
    policy = ContextPolicy(keep_recent=1, discard_above=200, placeholder="-")
    managed = ContextManager(policy).apply(conversation(4), words)
    assert managed.change is Change.FOLDED
    assert [m["content"] for m in managed.messages if m["role"] == "tool"] == [
        *"---",
        "result 3",
    ]


def test_policies_that_keep_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_recent is 0"):
        ContextPolicy(keep_recent=0)


async def test_what_the_gateway_changes_branches_is_counted_and_trains() -> None:
    engine = ScriptedEngine(answers(CALL))
    calls: list[Call] = []
    gateway = Gateway(
        engine,
        CompactRenderer(TOKENIZER),
        on_call=calls.append,
        context=ContextPolicy(keep_recent=1),
    )
    key = gateway.open_session("s")
    messages: list[Any] = [SYSTEM, USER]
    for i in range(4):
        response = await gateway.chat(key, {"messages": messages, "tools": [BASH]})
        answer = response["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": f"r{i}"}
        messages += [answer, result]
    # Each folded conversation still begins with the first call's very tokens, and branches there.
    assert [call.parent_id for call in calls] == [None, "s/0", "s/0", "s/0"]
    assert gateway.counters["context.folded"] == 2
    assert FOLDED in TOKENIZER.decode(engine.requests[3].prompt_ids)
    assert "r0" not in TOKENIZER.decode(engine.requests[3].prompt_ids)
    assert [m["content"] for m in calls[3].messages if m["role"] == "tool"] == ["r0", "r1", "r2"]
    session = Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=tuple(calls))
    trained = sum(sum(segment.train_mask) for segment in segments(session))
    assert trained == 4 * len(CALL)
    await gateway.close()


async def test_lines_that_change_do_not_fork_where_they_are_named() -> None:
    for normaliser, forks in ((None, 1), (ignore_lines(["^It is "]), 0)):
        gateway = Gateway(
            ScriptedEngine(answers(TOKENIZER.encode("12<|user|>"))),
            CompactRenderer(TOKENIZER),
            normaliser=normaliser,
        )
        key = gateway.open_session("s")
        first = {"role": "system", "content": "Be brief.\nIt is 9:00."}
        response = await gateway.chat(key, {"messages": [first, USER]})
        later = {"role": "system", "content": "Be brief.\nIt is 9:05."}
        answer = response["choices"][0]["message"]
        await gateway.chat(key, {"messages": [later, USER, answer, USER]})
        calls = gateway.calls("s")
        assert sum(call.fork_reason is not None for call in calls) == forks
        assert (calls[1].parent_id is None) == bool(forks)
        await gateway.close()
