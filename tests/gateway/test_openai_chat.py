"""Chat completions through their official client, unmodified: whole and streaming."""

import asyncio
import contextlib
import json
from typing import Any

import openai
import pytest
from api_rig import CALL, RENDERER, SAID, THOUGHT, TOKENIZER, USER, Running
from openai import AsyncOpenAI
from scripted import BASH, ScriptedEngine, answers, spans

from headrace.engine.types import GenerationRequest, GenerationResult
from headrace.gateway.gateway import Gateway
from headrace.rollout.types import Call, FinishReason


async def test_chat_streams_what_it_would_answer(running: Running, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        tools=[BASH],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    thought, names, arguments, last, usage, ids = "", [], "", None, None, set()
    async for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            thought += extra.get("reasoning_content", "")
            last = choice.finish_reason or last
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                assert call.function is not None
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
    assert (thought, names, json.loads(arguments)) == ("list them", ["bash"], {"command": "ls"})
    assert last == "tool_calls"
    assert len(ids) == 1
    assert usage is not None
    assert usage.completion_tokens == len(THOUGHT + CALL)
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)
    (call,) = running.calls
    assert call.response["tool_calls"][0]["function"]["arguments"] == arguments


async def test_the_helper_that_assembles_a_stream_sees_the_answer(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        tools=[BASH],  # type: ignore[list-item]
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"command": "ls"}


async def test_a_streamed_turn_is_continued_like_any_other(
    running: Running, client: AsyncOpenAI
) -> None:
    first = await client.chat.completions.create(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        tools=[BASH],  # type: ignore[list-item]
        stream=True,
    )
    calls = [c async for chunk in first for c in chunk.choices[0].delta.tool_calls or ()]
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": calls[0].id,
                "type": "function",
                "function": {
                    "name": "bash",
                    "arguments": "".join(c.function.arguments or "" for c in calls if c.function),
                },
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "12"}
    second = await client.chat.completions.create(
        model="tiny",
        messages=[USER, message, result],  # type: ignore[list-item]
        tools=[BASH],  # type: ignore[list-item]
    )
    assert second.choices[0].message.content == "there are 12"
    assert running.calls[1].parent_id == "s/0"


async def test_n_answers_are_siblings_of_one_prompt(running: Running, client: AsyncOpenAI) -> None:
    running.engine.script = answers(THOUGHT + SAID)
    key = running.server.gateway.open_session("seeded", seed=3)
    several = await client.with_options(api_key=key).chat.completions.create(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        n=3,
        logprobs=True,
        top_logprobs=0,
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.usage is not None
    assert several.usage.completion_tokens == 3 * len(THOUGHT + SAID)
    requests = running.engine.requests
    assert len({r.sampling.seed for r in requests}) == 3
    assert len({r.prompt_ids for r in requests}) == 1
    assert [call.parent_id for call in running.calls] == [None] * 3
    assert len({call.prompt_delta for call in running.calls}) == 1
    content = several.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == len(THOUGHT + SAID)
    assert bytes(b for token in content for b in token.bytes or ()).decode() == (
        "list them</think>there are 12<|user|>"
    )


async def test_a_stop_text_is_no_part_of_the_answer(running: Running, client: AsyncOpenAI) -> None:
    sampled = TOKENIZER.encode("</think>") + TOKENIZER.encode_text("one, two STOP and")

    def script(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.id, spans(sampled), FinishReason.STOP, stop=" STOP")

    running.engine.script = script
    for stream in (False, True):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[USER],  # type: ignore[list-item]
            stop=[" STOP", "never"],
            stream=stream,
        )
        if stream:
            pieces = [chunk.choices[0].delta.content or "" async for chunk in answer]  # type: ignore[union-attr]
            assert "".join(pieces) == "one, two"
        else:
            assert answer.choices[0].message.content == "one, two"  # type: ignore[union-attr]
            assert answer.choices[0].finish_reason == "stop"  # type: ignore[union-attr]
    assert running.engine.requests[0].sampling.stop == (" STOP", "never")
    assert running.calls[0].output_ids == tuple(sampled), "what was sampled is recorded whole"
    assert running.calls[0].parse_state == "ok"


async def test_a_reader_that_goes_away_ends_its_request(
    running: Running, client: AsyncOpenAI
) -> None:
    running.engine.gate = asyncio.Event()
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        stream=True,
    )
    await running.engine.entered.acquire()
    await stream.close()
    aborted = running.engine._aborted[running.engine.requests[0].id]
    async with asyncio.timeout(5):
        await aborted.wait()
        await running.engine.finished.get()
    await running.server.gateway.close_session("s")
    assert running.calls[0].finish_reason is FinishReason.ABORTED


async def test_an_answer_that_begins_again_is_never_told_two_ways(
    running: Running, client: AsyncOpenAI
) -> None:
    """What was streamed stands, or the stream ends with an error."""
    for again, fails in ((SAID, False), (TOKENIZER.encode("no, 13<|user|>"), True)):
        running.engine.replay = [TOKENIZER.encode("</think>") + SAID[:3]]
        running.engine.script = answers(TOKENIZER.encode("</think>") + again)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[USER],  # type: ignore[list-item]
            stream=True,
        )
        texts = []
        expected: Any = pytest.raises(openai.APIError, match="began this answer again")
        with expected if fails else contextlib.nullcontext():
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
        assert "there are 12".startswith("".join(texts))
        assert fails or "".join(texts) == "there are 12"


async def test_a_repeated_key_streams_the_same_answer(
    running: Running, client: AsyncOpenAI
) -> None:
    texts = []
    for _ in range(2):
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[USER],  # type: ignore[list-item]
            stream=True,
            extra_headers={"Idempotency-Key": "once"},
        )
        told = [c.choices[0].delta async for c in stream]
        texts.append("".join((d.model_extra or {}).get("reasoning_content", "") for d in told))
    assert texts == ["list them"] * 2
    assert len(running.engine.requests) == 1


async def test_a_call_that_cannot_be_read_is_told_to_the_model(running: Running) -> None:
    """With repairs, the model hears of it as a tool result before its client sees anything."""
    bad = TOKENIZER.encode("</think><tool_call>bash<arg_key>command</tool_call><|observation|>")
    engine = ScriptedEngine(answers(bad, THOUGHT + CALL, THOUGHT + SAID))
    calls: list[Call] = []
    gateway = Gateway(engine, RENDERER, on_call=calls.append, repairs=1)
    key = gateway.open_session("s")
    response = await gateway.chat(key, {"messages": [USER], "tools": [BASH]})
    message = response["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "bash"
    assert [call.parse_state for call in calls] == ["malformed", "ok"]
    assert calls[1].parent_id == calls[0].id
    assert "arg_key" in TOKENIZER.decode(calls[1].prompt_delta) or "tool" in TOKENIZER.decode(
        calls[1].prompt_delta
    )
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"}
    await gateway.chat(key, {"messages": [USER, message, result], "tools": [BASH]})
    assert calls[2].parent_id == calls[1].id
    assert gateway.counters["repaired"] == 1
    await gateway.close()
