"""Every API through its official client, unmodified: sync, async and streaming."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI
from scripted import BASH, ScriptedEngine, answers, merged_tokenizer, spans

from headrace.engine.types import GenerationRequest, GenerationResult
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.rollout.types import Call, FinishReason
from headrace.tokens.library import LibraryRenderer

TOKENIZER = merged_tokenizer()
RENDERER = LibraryRenderer("glm-5", TOKENIZER)
THOUGHT = TOKENIZER.encode("list them</think>")
CALL = TOKENIZER.encode(
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
SAID = TOKENIZER.encode("there are 12<|user|>")
USER = {"role": "user", "content": "how many lines?"}
ANTHROPIC_TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": BASH["function"]["parameters"],
}


class Running(NamedTuple):
    server: GatewayServer
    engine: ScriptedEngine
    calls: list[Call]
    key: str

    @property
    def root(self) -> str:
        return self.server.base_url.removesuffix("/v1")


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    engine = ScriptedEngine(answers(THOUGHT + CALL, THOUGHT + SAID))
    calls: list[Call] = []
    gateway = Gateway(engine, RENDERER, model="tiny", on_call=calls.append)
    server = await GatewayServer.start(gateway)
    yield Running(server, engine, calls, gateway.open_session("s"))
    await server.stop()


@pytest.fixture
async def client(running: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=running.server.base_url, api_key=running.key, max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def claude(running: Running) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=running.root, api_key=running.key, max_retries=0) as made:
        yield made


# -- chat completions ---------------------------------------------------------------------------


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


def test_the_synchronous_clients_work() -> None:
    """In threads of their own, as such clients run."""

    async def run() -> None:
        engine = ScriptedEngine(answers(THOUGHT + SAID))
        server = await GatewayServer.start(Gateway(engine, RENDERER, model="tiny"))
        key = server.gateway.open_session("s")
        root = server.base_url.removesuffix("/v1")

        def work() -> None:
            with OpenAI(base_url=server.base_url, api_key=key) as one:
                said = one.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
                assert said.choices[0].message.content == "there are 12"
                told = one.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
                text = "".join(c.choices[0].delta.content or "" for c in told)
                assert text == "there are 12"
            with Anthropic(base_url=root, api_key=key) as other:
                message = other.messages.create(model="m", max_tokens=50, messages=[USER])  # type: ignore[list-item]
                assert message.content[-1].text == "there are 12"  # type: ignore[union-attr]
                with other.messages.stream(model="m", max_tokens=50, messages=[USER]) as stream:  # type: ignore[list-item]
                    assert "".join(stream.text_stream) == "there are 12"

        await asyncio.to_thread(work)
        await server.stop()

    asyncio.run(run())


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


async def test_a_thinking_budget_ends_thinking_by_tokens_that_never_train(
    running: Running, client: AsyncOpenAI, claude: AsyncAnthropic
) -> None:
    long = TOKENIZER.encode_text("on and on and on")
    running.engine.script = answers(long[:4], TOKENIZER.encode("12<|user|>"))
    whole = await client.chat.completions.create(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        extra_body={"chat_template_kwargs": {"thinking_budget": 4}},
    )
    message = whole.choices[0].message
    assert message.content == "12"
    thought = (message.model_extra or {})["reasoning_content"]
    assert TOKENIZER.decode(long[:4]).strip() == thought.strip()
    first, second = running.calls
    assert second.parent_id == first.id
    assert TOKENIZER.special_ids["</think>"] in second.prompt_delta
    assert running.engine.requests[0].sampling.max_tokens == 4
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4 + len(second.output_ids)
    # What the client got is what it continues.
    history = [USER, {"role": "assistant", "content": "12"}, USER]
    await client.chat.completions.create(
        model="tiny",
        messages=history,  # type: ignore[arg-type]
        extra_body={"chat_template_kwargs": {"thinking_budget": 4}},
    )
    assert running.calls[2].fork_reason == "bridge_refused", "a new question removes thinking"
    running.engine.script = answers(long[:4], TOKENIZER.encode("12<|user|>"))
    budget = {"type": "enabled", "budget_tokens": 4}
    async with claude.messages.stream(
        model="tiny",
        max_tokens=64,
        thinking=budget,  # type: ignore[arg-type]
        messages=[USER],  # type: ignore[list-item]
    ) as stream:
        told = await stream.get_final_message()
    assert [block.type for block in told.content] == ["thinking", "text"]
    assert told.content[-1].text == "12"  # type: ignore[union-attr]


async def test_thinking_is_switched_per_request(running: Running, claude: AsyncAnthropic) -> None:
    running.engine.script = answers(SAID)
    message = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        thinking={"type": "disabled"},
        messages=[USER],  # type: ignore[list-item]
    )
    assert [block.type for block in message.content] == ["text"]
    assert running.engine.requests[0].prompt_ids[-1] == TOKENIZER.special_ids["</think>"]


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


# -- completions --------------------------------------------------------------------------------


async def test_completions_continue_a_text_and_their_own_tokens(
    running: Running, client: AsyncOpenAI
) -> None:
    running.engine.script = answers(TOKENIZER.encode_text("é, two"))
    first = await client.completions.create(model="tiny", prompt="one", max_tokens=9, logprobs=0)
    assert first.choices[0].text == "é, two"
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].logprobs is not None
    path = [*TOKENIZER.encode("one"), *TOKENIZER.encode_text("é, two")]
    await client.completions.create(model="tiny", prompt=[*path, 5])
    assert running.calls[1].parent_id == "s/0"
    assert running.calls[1].prompt_delta == (5,)
    stream = await client.completions.create(model="tiny", prompt="one", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "é, two"
    rare = {"min_p": 0.25, "repetition_penalty": 1.5, "top_k": -1}
    await client.completions.create(model="tiny", prompt="x", top_p=0.5, extra_body=rare)
    sampling = running.engine.requests[-1].sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.top_k) == (0.25, 1.5, 0)
    assert (sampling.top_p, sampling.temperature, sampling.max_tokens) == (0.5, 1.0, 16)
    for fields in ({"echo": True, "stream": True}, {"suffix": "x"}, {"best_of": 3}):
        with pytest.raises(openai.BadRequestError, match="not supported"):
            await client.completions.create(model="tiny", prompt="x", **fields)  # type: ignore[call-overload]


# -- responses ----------------------------------------------------------------------------------

RESPONSES_TOOL = {"type": "function", **BASH["function"], "strict": False}


async def test_responses_hold_a_conversation_by_items(
    running: Running, client: AsyncOpenAI
) -> None:
    first = await client.responses.create(
        model="tiny",
        instructions="Use bash.",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"command": "ls"}
    history: list[Any] = [{"role": "user", "content": "how many lines?"}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "12"})
    second = await client.responses.create(
        model="tiny",
        instructions="Use bash.",
        input=history,
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    assert second.output_text == "there are 12"
    assert second.status == "completed"
    assert running.calls[1].parent_id == "s/0"


async def test_responses_continue_by_id(running: Running, client: AsyncOpenAI) -> None:
    first = await client.responses.create(
        model="tiny",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    call = first.output[1]
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    second = await client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[output],  # type: ignore[list-item]
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    assert second.output_text == "there are 12"
    assert running.calls[1].parent_id == "s/0"
    with pytest.raises(openai.NotFoundError, match="'gone' is no response"):
        await client.responses.create(model="tiny", previous_response_id="resp_gone", input="x")


@pytest.mark.parametrize("output", [CALL, SAID, SAID[:-1]])
async def test_responses_stream_in_the_events_their_client_knows(
    running: Running, client: AsyncOpenAI, output: list[int]
) -> None:
    running.engine.script = answers(THOUGHT + output)
    async with client.responses.stream(
        model="tiny",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response() if output[-1] in RENDERER.stop_ids else None
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == ("response.incomplete" if final is None else "response.completed")
    whole = await client.responses.create(
        model="tiny",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    streamed = events[-1].response  # type: ignore[union-attr]

    def without_ids(response: Any) -> list[dict[str, Any]]:
        return [
            {
                k: v
                for k, v in item.model_dump().items()
                if k not in ("id", "call_id", "parsed_arguments")
            }
            for item in response.output
        ]

    assert [i["type"] for i in without_ids(streamed)] == [i["type"] for i in without_ids(whole)]
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage


async def test_responses_refuse_what_they_lack(client: AsyncOpenAI) -> None:
    for fields, word in (
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": [{"type": "compaction", "id": "x"}]}, "compaction"),
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            await client.responses.create(**{"model": "tiny", "input": "x", **fields})


# -- messages -----------------------------------------------------------------------------------


async def test_messages_hold_a_conversation_by_blocks(
    running: Running, claude: AsyncAnthropic
) -> None:
    system = [{"type": "text", "text": "Use bash.", "cache_control": {"type": "ephemeral"}}]
    first = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        system=system,  # type: ignore[arg-type]
        messages=[USER],  # type: ignore[list-item]
        tools=[ANTHROPIC_TOOL],  # type: ignore[list-item]
    )
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert first.stop_reason == "tool_use"
    use = first.content[1]
    assert use.type == "tool_use"
    assert use.input == {"command": "ls"}
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "12"}],
    }
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        system=system,  # type: ignore[arg-type]
        messages=messages,
        tools=[ANTHROPIC_TOOL],  # type: ignore[list-item]
    )
    assert second.content[-1].text == "there are 12"  # type: ignore[union-attr]
    assert second.stop_reason == "end_turn"
    assert running.calls[1].parent_id == "s/0"
    counted = await claude.messages.count_tokens(
        model="tiny",
        system=system,  # type: ignore[arg-type]
        messages=[USER],  # type: ignore[list-item]
        tools=[ANTHROPIC_TOOL],  # type: ignore[list-item]
    )
    assert counted.input_tokens == len(running.calls[0].prompt_delta)


@pytest.mark.parametrize("output", [CALL, SAID, SAID[:-1]])
async def test_messages_stream_in_the_events_their_client_knows(
    running: Running, claude: AsyncAnthropic, output: list[int]
) -> None:
    running.engine.script = answers(THOUGHT + output)
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 64,
        "messages": [USER],
        "tools": [ANTHROPIC_TOOL],
    }
    async with claude.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    whole = await claude.messages.create(**asked)

    def without_ids(message: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in b.model_dump().items() if k != "id"} for b in message.content]

    assert without_ids(streamed) == without_ids(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_messages_stop_at_a_sequence(running: Running, claude: AsyncAnthropic) -> None:
    sampled = TOKENIZER.encode("</think>") + TOKENIZER.encode_text("one STOP")

    def script(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.id, spans(sampled), FinishReason.STOP, stop="STOP")

    running.engine.script = script
    message = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        messages=[USER],  # type: ignore[list-item]
        stop_sequences=["STOP"],
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[-1].text == "one "  # type: ignore[union-attr]


async def test_anthropic_errors_are_its_clients_own(
    running: Running, claude: AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="no open session"):
        await claude.with_options(api_key="wrong").messages.create(
            model="m",
            max_tokens=5,
            messages=[USER],  # type: ignore[list-item]
        )
    for fields, word in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=word) as caught:
            await claude.messages.create(
                **{"model": "m", "max_tokens": 5, "messages": [USER], **fields}
            )
        body = caught.value.body
        assert isinstance(body, dict)
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
    assert [model.id async for model in claude.models.list()] == ["tiny"]
    with pytest.raises(anthropic.NotFoundError):
        await claude.models.retrieve("other")


# -- sessions -----------------------------------------------------------------------------------

Place = Callable[[str], dict[str, Any]]
PLACES: dict[str, Place] = {
    "bearer": lambda key: {"headers": {"Authorization": f"Bearer {key}"}},
    "x-api-key": lambda key: {"headers": {"x-api-key": key}},
    "header": lambda key: {"headers": {"X-Headrace-Session": key, "Authorization": "Bearer x"}},
    "path": lambda key: {"path": f"/s/{key}"},
    "metadata": lambda key: {"metadata": {"session": key}},
    "user_id": lambda key: {"metadata": {"user_id": key}},
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_session_is_named_in_whichever_place_a_client_can_set(
    running: Running, place: str
) -> None:
    shown = PLACES[place](running.key)
    body = {"model": "m", "messages": [USER], "max_tokens": 64}
    if "metadata" in shown:
        body["metadata"] = shown["metadata"]
    for route in ("/v1/chat/completions", "/v1/messages"):
        async with httpx.AsyncClient(headers=shown.get("headers")) as http:
            url = running.root + shown.get("path", "") + route
            assert (await http.post(url, json=body)).status_code == 200
    assert {call.session_id for call in running.calls} == {"s"}
    async with httpx.AsyncClient() as http:
        wrong = PLACES[place]("guess")
        body["metadata"] = wrong.get("metadata", {})
        url = running.root + wrong.get("path", "") + "/v1/chat/completions"
        answer = await http.post(url, json=body, headers=wrong.get("headers"))
    assert answer.status_code == 401


async def test_keys_of_two_sessions_are_refused(running: Running) -> None:
    other = running.server.gateway.open_session("t")
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{running.root}/s/{other}/v1/chat/completions",
            json={"messages": [USER]},
            headers={"Authorization": f"Bearer {running.key}"},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "ambiguous_session")
