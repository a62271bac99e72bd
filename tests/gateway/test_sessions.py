"""The gateway core: matching, forks, bridges, idempotency, limits, errors."""

import asyncio
import copy

import pytest
from scripted import BASH, ScriptedEngine, answers, merged_tokenizer, refuses, spans

from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.gateway.gateway import Gateway
from headrace.gateway.turn import ApiError
from headrace.rollout.types import Call, FinishReason, ParseState
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer

TOKENIZER = merged_tokenizer()
RENDERER = CompactRenderer(TOKENIZER)
CALL = TOKENIZER.encode(
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
SAID = TOKENIZER.encode("12<|user|>")
SYSTEM = {"role": "system", "content": "Use bash, then answer."}
USER = {"role": "user", "content": "how many lines?"}


def body(messages: list, **fields: object) -> dict:
    return {"model": "m", "messages": messages, "tools": [BASH], **fields}


def make(*outputs: list[int], **options) -> tuple[Gateway, ScriptedEngine, list[Call], str]:
    engine = ScriptedEngine(answers(*(outputs or (SAID,))))
    recorded: list[Call] = []
    gateway = Gateway(engine, RENDERER, on_call=recorded.append, **options)
    return gateway, engine, recorded, gateway.open_session("s")


async def ask(gateway: Gateway, key: str, messages: list, **fields) -> dict:
    response = await gateway.chat(key, body(messages, **fields))
    return response["choices"][0]["message"]


async def refused(gateway: Gateway, key: str | None, request: dict, **options) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await gateway.chat(key, request, **options)
    return caught.value


async def test_two_turns_extend_the_sampled_tokens():
    gateway, engine, calls, key = make(CALL, SAID)
    first = await ask(gateway, key, [SYSTEM, USER])
    assert first["content"] is None
    assert first["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "a.txt"}
    second = await ask(gateway, key, [SYSTEM, USER, first, result])
    assert second == {"role": "assistant", "content": "12"}
    assert TOKENIZER.decode(engine.requests[1].prompt_ids) == (
        "<sop><|system|>Use bash, then answer.\ntools: bash<|user|>how many lines?<|assistant|>"
        "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
        "<|observation|>a.txt<|assistant|>"
    )
    assert engine.requests[1].prompt_ids == (
        engine.requests[0].prompt_ids + tuple(CALL) + calls[1].prompt_delta
    )
    assert [call.parent_id for call in calls] == [None, "s/0"]
    assert [call.fork_reason for call in calls] == [None, None]
    assert [call.parse_state for call in calls] == [ParseState.OK, ParseState.OK]
    assert gateway.calls("s") == tuple(calls)


async def test_history_is_matched_by_meaning_not_by_bytes():
    gateway, _, calls, key = make(CALL, SAID)
    first = await ask(gateway, key, [SYSTEM, USER])
    rewritten = copy.deepcopy(first)
    rewritten["content"] = ""
    rewritten["tool_calls"][0]["id"] = "made-up"
    rewritten["tool_calls"][0]["function"]["arguments"] = '{ "command" : "ls" }'
    rewritten["refusal"] = None
    parts = {"role": "user", "content": [{"type": "text", "text": "how many lines?"}]}
    await ask(gateway, key, [SYSTEM, parts, rewritten, {"role": "tool", "content": "x"}])
    assert calls[1].parent_id == "s/0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: [SYSTEM, {**USER, "content": "other"}, *h[2:]], "history_rewritten"),
        (lambda h: [{**SYSTEM, "content": "You are a subagent."}, USER], "new_conversation"),
        (lambda h: [SYSTEM, *h[2:]], "history_rewritten"),
        (lambda h: [*h[:2], {"role": "assistant", "content": "no"}, h[3]], "history_rewritten"),
        (lambda h: h[:2], "repeated_first_call"),
    ],
)
async def test_a_changed_history_forks_with_a_counted_reason(change, reason):
    gateway, engine, calls, key = make(SAID)
    first = await ask(gateway, key, [SYSTEM, USER])
    history = [SYSTEM, USER, first, {"role": "user", "content": "sure?"}]
    await ask(gateway, key, change(history))
    assert (calls[1].parent_id, calls[1].fork_reason) == (None, reason)
    assert calls[1].prompt_delta == engine.requests[1].prompt_ids
    assert gateway.counters[f"fork.{reason}"] == 1


async def test_a_changed_tool_call_forks():
    gateway, _, calls, key = make(CALL)
    first = await ask(gateway, key, [USER])
    first["tool_calls"][0]["function"]["arguments"] = '{"command":"rm"}'
    await ask(gateway, key, [USER, first, {"role": "tool", "content": "x"}])
    assert calls[1].fork_reason == "history_rewritten"


async def test_reasoning_may_be_left_out_of_history_but_not_changed():
    thinking = LibraryRenderer("glm-5", TOKENIZER)
    thought = TOKENIZER.encode("list them</think>") + CALL
    gateway = Gateway(ScriptedEngine(answers(thought)), thinking)
    key = gateway.open_session("s")
    first = await ask(gateway, key, [USER])
    assert first["reasoning_content"] == "list them"
    result = {"role": "tool", "content": "x"}
    without = {k: v for k, v in first.items() if k != "reasoning_content"}
    for answer in (first, without, {**first, "reasoning_content": "other"}):
        await ask(gateway, key, [USER, answer, result])
    calls = gateway.calls("s")
    assert [call.parent_id for call in calls] == [None, "s/0", "s/0", None]
    assert calls[3].fork_reason == "history_rewritten"
    # A new user message drops earlier thinking in this template, so tokens cannot be extended.
    await ask(gateway, key, [USER, first, USER])
    assert gateway.calls("s")[4].fork_reason == "bridge_refused"


async def test_other_tools_fork():
    gateway, _, calls, key = make(SAID)
    first = await ask(gateway, key, [USER])
    await ask(gateway, key, [USER, first, USER], tools=[])
    assert calls[1].fork_reason == "tools_changed"


async def test_tool_choice_none_keeps_the_prompt_and_returns_text():
    gateway, _, calls, key = make(SAID, CALL)
    first = await ask(gateway, key, [USER])
    second = await ask(gateway, key, [USER, first, USER], tool_choice="none")
    assert calls[1].parent_id == "s/0"
    assert "tool_calls" not in second
    assert second["content"].startswith("<tool_call>bash")
    await ask(gateway, key, [USER, first, USER, second, USER])
    assert calls[2].parent_id == "s/1"


async def test_a_malformed_call_is_answered_as_text_and_can_be_continued():
    bad = TOKENIZER.encode("<tool_call>bash<arg_key>command</tool_call><|observation|>")
    gateway, engine, calls, key = make(bad, SAID)
    response = await gateway.chat(key, body([USER]))
    choice = response["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": "<tool_call>bash<arg_key>command</tool_call>",
    }
    assert response["headrace"]["parse_state"] == "malformed"
    hint = {"role": "user", "content": "that call cannot be read"}
    await ask(gateway, key, [USER, choice["message"], hint])
    assert calls[1].parent_id == "s/0"
    assert engine.requests[1].prompt_ids[-1] == TOKENIZER.special_ids["<|assistant|>"]


async def test_a_truncated_answer_is_closed_by_the_bridge():
    gateway, _, calls, key = make(TOKENIZER.encode_text("12 and"), SAID)
    response = await gateway.chat(key, body([USER], max_tokens=2))
    assert response["choices"][0]["finish_reason"] == "length"
    await ask(gateway, key, [USER, response["choices"][0]["message"], USER])
    assert calls[0].parse_state is ParseState.TRUNCATED
    assert TOKENIZER.decode(calls[1].prompt_delta) == "<|user|>how many lines?<|assistant|>"
    assert calls[1].parent_id == "s/0"


async def test_concurrent_calls_become_siblings():
    gateway, engine, calls, key = make(CALL, SAID)
    first = await ask(gateway, key, [USER])
    history = [USER, first, {"role": "tool", "content": "x"}]
    engine.gate = asyncio.Event()
    both = [asyncio.create_task(ask(gateway, key, history)) for _ in range(2)]
    for _ in range(3):
        await engine.entered.acquire()
    engine.gate.set()
    await asyncio.gather(*both)
    assert [call.parent_id for call in calls] == [None, "s/0", "s/0"]
    assert [call.index for call in calls] == [0, 1, 2]


async def test_tool_call_ids_choose_between_equal_answers():
    gateway, _, calls, key = make(CALL)
    first = await ask(gateway, key, [USER])
    await ask(gateway, key, [USER])
    await ask(gateway, key, [USER, first, {"role": "tool", "content": "x"}])
    assert calls[2].parent_id == "s/0"


async def test_an_idempotency_key_generates_once_also_in_flight():
    gateway, engine, calls, key = make()
    engine.gate = asyncio.Event()
    tasks = [asyncio.create_task(gateway.chat(key, body([USER]), "k")) for _ in range(3)]
    await engine.entered.acquire()
    engine.gate.set()
    responses = await asyncio.gather(*tasks)
    responses.append(await gateway.chat(key, body([USER]), "k"))
    assert all(response == responses[0] for response in responses)
    assert len(engine.requests) == len(calls) == 1
    assert calls[0].idempotency_key == "k"
    error = await refused(gateway, key, body([SYSTEM, USER]), idempotency_key="k")
    assert (error.status, error.code) == (400, "idempotency_key_reused")


async def test_a_failed_request_frees_its_idempotency_key():
    gateway, engine, calls, key = make()
    engine.script = refuses(EngineError.OVERLOADED)
    error = await refused(gateway, key, body([USER]), idempotency_key="k")
    assert (error.status, error.code) == (429, "overloaded")
    engine.script = answers(SAID)
    await gateway.chat(key, body([USER]), "k")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (EngineError.TOO_LONG, 400),
        (EngineError.INVALID, 400),
        (EngineError.CLOSED, 503),
        (EngineError.OVERLOADED, 429),
    ],
)
async def test_engine_refusals_keep_their_code(code, status):
    gateway, engine, calls, key = make()
    engine.script = refuses(code)
    error = await refused(gateway, key, body([USER]))
    assert (error.status, error.code) == (status, code)
    assert not calls


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 65}, "n=65"),
        ({"n": "two"}, "n"),
        ({"logit_bias": {"5": 200}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0]"),
        ({"tools": [{"type": "web"}]}, "tools[0]"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_bad_requests_are_refused_by_name(fields, word):
    gateway, engine, _, key = make()
    error = await refused(gateway, key, {**body([USER]), **fields})
    assert error.status == 400
    assert word in error.message
    assert not engine.requests


async def test_context_overflow_and_clipped_max_tokens():
    gateway, engine, _, key = make()
    engine.max_context = len(RENDERER.render([USER], [BASH])) + 3
    await ask(gateway, key, [USER], max_tokens=50)
    assert engine.requests[0].sampling.max_tokens == 3
    long = {"role": "user", "content": "how many lines? " * 5}
    error = await refused(gateway, key, body([long]))
    assert (error.status, error.code) == (400, "context_length_exceeded")


async def test_keys_and_limits():
    gateway, _, calls, _ = make()
    assert (await refused(gateway, "no", body([USER]))).status == 401
    assert (await refused(gateway, None, body([USER]))).status == 401
    key = gateway.open_session("short", max_calls=1)
    await ask(gateway, key, [USER])
    assert (await refused(gateway, key, body([USER]))).code == "session_call_limit"
    gone = gateway.open_session("gone", lifetime_s=0)
    assert (await refused(gateway, gone, body([USER]))).code == "session_expired"
    assert await gateway.close_session("short") == tuple(calls)
    assert (await refused(gateway, key, body([USER]))).status == 401
    assert await gateway.close_session("short") == ()
    with pytest.raises(ValueError, match="open already"):
        gateway.open_session("s")


async def test_too_many_in_flight_is_429():
    gateway, engine, _, key = make(max_running_per_session=1)
    engine.gate = asyncio.Event()
    task = asyncio.create_task(gateway.chat(key, body([USER])))
    await engine.entered.acquire()
    assert (await refused(gateway, key, body([USER]))).status == 429
    engine.gate.set()
    await task


async def test_closing_a_session_aborts_and_records_what_was_sampled():
    gateway, engine, calls, key = make()
    engine.gate = asyncio.Event()
    task = asyncio.create_task(gateway.chat(key, body([USER])))
    await engine.entered.acquire()
    closed = await gateway.close_session("s")
    assert [call.finish_reason for call in closed] == [FinishReason.ABORTED]
    assert closed == tuple(calls)
    with pytest.raises(ApiError) as caught:
        await task
    assert caught.value.code == "session_closed"


async def test_a_caller_that_gives_up_does_not_lose_the_call():
    gateway, engine, calls, key = make()
    engine.gate = asyncio.Event()
    task = asyncio.create_task(gateway.chat(key, body([USER]), "k"))
    await engine.entered.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = asyncio.create_task(gateway.chat(key, body([USER]), "k"))
    engine.gate.set()
    await again
    assert len(calls) == len(engine.requests) == 1


async def test_a_failing_sink_fails_the_request_and_records_nothing():
    gateway, _, _, key = make()
    fail = True

    def sink(call: Call) -> None:
        if fail:
            raise OSError("disk full")

    gateway._answering.on_call = sink
    with pytest.raises(OSError, match="disk full"):
        await gateway.chat(key, body([USER]))
    assert gateway.calls("s") == ()
    fail = False
    await ask(gateway, key, [USER])
    assert [call.index for call in gateway.calls("s")] == [0]


async def test_versions_and_seeds_are_passed_through():
    gateway, engine, calls, _ = make()

    def script(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.id, spans(SAID[:1], SAID[1:], version=4), FinishReason.STOP)

    engine.script = script
    seeds = []
    for name in ("a", "b"):
        key = gateway.open_session(name, seed=7)
        for _ in range(2):
            response = await gateway.chat(key, body([USER], temperature=0.5, top_p=0.9))
            assert response["headrace"]["weight_versions"] == [4, 5]
        seeds.append([request.sampling.seed for request in engine.requests[-2:]])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2
    assert engine.requests[0].sampling.temperature == 0.5
    assert engine.requests[0].sampling.stop_ids == RENDERER.stop_ids
    await gateway.chat(key, body([USER], seed=3))
    assert engine.requests[-1].sampling.seed == 3
    assert [span.weight_version for span in calls[0].spans] == [4, 5]


async def test_without_required_keys_every_request_is_its_own_session():
    gateway, _, calls, _ = make(require_key=False)
    first = await ask(gateway, "anything", [USER])
    await gateway.chat(None, body([USER, first, USER]))
    assert [call.session_id for call in calls] == ["anonymous-1", "anonymous-2"]
    assert [call.parent_id for call in calls] == [None, None]
