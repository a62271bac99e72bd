"""The running server and the unmodified openai client."""

import json
import socket
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from scripted import BASH, ScriptedEngine, answers, merged_tokenizer, refuses

from headrace.engine.types import EngineError
from headrace.errors import UserError
from headrace.gateway.app import MAX_BODY_BYTES
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.rollout.segments import segments
from headrace.rollout.types import Call, Outcome, Session
from headrace.tokens.compact import CompactRenderer

TOKENIZER = merged_tokenizer()
CALL = TOKENIZER.encode(
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
SAID = TOKENIZER.encode("12<|user|>")
USER = {"role": "user", "content": "how many lines?"}


@pytest.fixture
async def server() -> AsyncIterator[GatewayServer]:
    engine = ScriptedEngine(answers(CALL, SAID))
    gateway = Gateway(engine, CompactRenderer(TOKENIZER), model="tiny")
    running = await GatewayServer.start(gateway)
    yield running
    await running.stop()


async def test_an_openai_agent_loop_end_to_end(server: GatewayServer):
    recorded: list[Call] = []
    server.gateway._answering.on_call = recorded.append
    key = server.gateway.open_session("s")
    async with AsyncOpenAI(base_url=server.base_url, api_key=key) as client:
        messages: list = [{"role": "system", "content": "Use bash, then answer."}, USER]
        first = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[BASH],  # type: ignore[list-item]
            max_tokens=32,
            extra_headers={"Idempotency-Key": "turn-0"},
        )
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"command": "ls"}
        # The client's own dump of the message, with all its empty fields, is sent back.
        messages += [
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "12"},
        ]
        second = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[BASH],  # type: ignore[list-item]
        )
        assert second.choices[0].message.content == "12"
        assert second.choices[0].finish_reason == "stop"
        assert second.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens  # type: ignore[union-attr]
        assert second.usage.completion_tokens == len(SAID)
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
    assert [call.idempotency_key for call in recorded] == ["turn-0", None]
    session = Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=tuple(recorded))
    (segment,) = segments(session)
    trained = [i for i, mask in zip(segment.ids, segment.train_mask, strict=True) if mask]
    assert trained == [*CALL, *SAID]
    assert TOKENIZER.decode(segment.ids) == (
        "<sop><|system|>Use bash, then answer.\ntools: bash<|user|>how many lines?<|assistant|>"
        "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
        "<|observation|>12<|assistant|>12<|user|>"
    )


async def test_errors_reach_the_client_as_its_own_exceptions(server: GatewayServer):
    key = server.gateway.open_session("s")
    async with AsyncOpenAI(base_url=server.base_url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="no open session"):
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        client = client.with_options(api_key=key)
        with pytest.raises(openai.BadRequestError, match="response_format") as caught:
            await client.chat.completions.create(
                model="m",
                messages=[USER],  # type: ignore[list-item]
                response_format={"type": "json_object"},
            )
        assert caught.value.code == "unsupported"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        engine = server.gateway._engine
        assert isinstance(engine, ScriptedEngine)
        engine.script = refuses(EngineError.OVERLOADED)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        engine.script = refuses(EngineError.CLOSED)
        with pytest.raises(openai.InternalServerError) as closed:
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert closed.value.status_code == 503
        engine.script = refuses(EngineError.TOO_LONG)
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert long.value.code == "context_length_exceeded"


async def test_raw_http_mistakes_get_openais_error_shape(server: GatewayServer):
    key = server.gateway.open_session("s")
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{server.base_url}/chat/completions"
    async with httpx.AsyncClient(headers=headers) as client:
        responses = {
            "not JSON": (await client.post(url, content=b"{"), 400),
            "not UTF-8": (await client.post(url, content=b'{"messages": ["\xff"]}'), 400),
            "no messages": (await client.post(url, json={}), 400),
            "wrong type": (await client.post(url, json={"messages": "hi"}), 400),
            "too large": (await client.post(url, content=b" " * (MAX_BODY_BYTES + 1)), 413),
            "long key": (
                await client.post(url, json={}, headers={"Idempotency-Key": "k" * 999}),
                400,
            ),
            "no such route": (await client.get(f"{server.base_url}/nothing"), 404),
            "wrong method": (await client.get(url), 405),
        }
        for what, (response, status) in responses.items():
            assert response.status_code == status, what
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}, what
        health = await client.get(server.base_url.replace("/v1", "/health"))
        assert health.json() == {"status": "ok", "weight_version": 0}


async def test_a_bug_is_a_500_in_the_same_shape(server: GatewayServer):
    def sink(call: Call) -> None:
        raise OSError("disk full")

    server.gateway._answering.on_call = sink
    key = server.gateway.open_session("s")
    async with AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="disk full"):
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]


async def test_a_port_in_use_is_a_user_error():
    gateway = Gateway(ScriptedEngine(answers(SAID)), CompactRenderer(TOKENIZER))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 cannot be used"):
            await GatewayServer.start(gateway, port=port)


async def test_the_port_is_free_again_after_stop():
    gateway = Gateway(ScriptedEngine(answers(SAID)), CompactRenderer(TOKENIZER))
    server = await GatewayServer.start(gateway)
    await server.stop()
    await server.stop()
    again = await GatewayServer.start(gateway, port=server.port)
    assert again.port == server.port
    await again.stop()
