"""What is the same in every API: clients of both makes, thinking budgets, and naming a session."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from api_rig import RENDERER, SAID, THOUGHT, TOKENIZER, USER, Running
from openai import AsyncOpenAI, OpenAI
from scripted import ScriptedEngine, answers

from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer

Place = Callable[[str], dict[str, Any]]
PLACES: dict[str, Place] = {
    "bearer": lambda key: {"headers": {"Authorization": f"Bearer {key}"}},
    "x-api-key": lambda key: {"headers": {"x-api-key": key}},
    "header": lambda key: {"headers": {"X-Headrace-Session": key, "Authorization": "Bearer x"}},
    "path": lambda key: {"path": f"/s/{key}"},
    "metadata": lambda key: {"metadata": {"session": key}},
    "user_id": lambda key: {"metadata": {"user_id": key}},
}


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


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ('["x", ""]', "stop holds '' of 0 bytes"),
        ('["' + 300 * "x" + '"]', "of 300 bytes"),
        ('["\\ud800"]', "not valid JSON"),  # to a strict reader
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages"])
async def test_an_impossible_stop_text_is_the_clients_mistake(
    running: Running, route: str, stop: str, words: str
) -> None:
    name = "stop_sequences" if route == "messages" else "stop"
    body = f'{{"model": "m", "max_tokens": 4, "messages": [], "prompt": "x", "{name}": {stop}}}'
    body = body.replace("[]", '[{"role": "user", "content": "x"}]')
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {running.key}"}) as http:
        answer = await http.post(f"{running.root}/v1/{route}", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert running.engine.requests == []
