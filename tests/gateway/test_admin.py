"""Sessions opened and closed over HTTP by whoever has the admin key."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from scripted import ScriptedEngine, answers, byte_tokenizer

from headrace.gateway.server import GatewayServer
from headrace.serving import KeyedGateway
from headrace.tokens.compact import CompactRenderer

RENDERER = CompactRenderer(byte_tokenizer())
USER: Any = {"role": "user", "content": "hello"}


@pytest.fixture
async def server() -> AsyncIterator[GatewayServer]:
    said = [*RENDERER.tokenizer.encode("yes"), min(RENDERER.stop_ids)]
    gateway = KeyedGateway("public", ScriptedEngine(answers(said)), RENDERER, model="tiny")
    running = await GatewayServer.start(gateway, admin_key="secret")
    yield running
    await running.stop()


@pytest.fixture
async def admin(server: GatewayServer) -> AsyncIterator[httpx.AsyncClient]:
    root = server.base_url.removesuffix("/v1")
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=root, headers=headers) as client:
        yield client


async def test_a_session_is_opened_used_up_closed_and_handed_over(
    server: GatewayServer, admin: httpx.AsyncClient
) -> None:
    wanted = {"task": "sums", "group": "g7", "limits": {"calls": 1, "wall_s": 60}}
    opened = (await admin.post("/admin/sessions", json=wanted)).json()
    assert opened["session"].startswith("g7-")
    path = f"/admin/sessions/{opened['session']}"
    async with AsyncOpenAI(
        base_url=server.base_url, api_key=opened["key"], max_retries=0
    ) as client:
        await client.chat.completions.create(model="tiny", messages=[USER])
        with pytest.raises(openai.BadRequestError, match="may make 1 calls"):
            await client.chat.completions.create(model="tiny", messages=[USER])
        ended = {"outcome": "agent_failed", "rewards": {"reward": 0.0}}
        closed = (await admin.post(f"{path}/close", json=ended)).json()
        assert closed["outcome"] == "agent_failed"
        assert closed["reason"] == "session limit (session_call_limit)"
        assert (closed["task"], closed["group"], closed["calls"]) == ("sums", "g7", 1)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="tiny", messages=[USER])
    evidence = (await admin.get(path)).json()
    (call,) = evidence["calls"]
    assert len(call["spans"][0]["ids"]) == closed["sampled_tokens"] == 4
    assert len(call["spans"][0]["logprobs"]) == 4
    again = await admin.post(f"{path}/close", json=ended)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "session_not_found")
    taken = await admin.post("/admin/sessions", json=wanted | {"session": opened["session"]})
    assert taken.status_code == 409


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"task": "t"}, 400, "group"),
        ({"task": "t", "group": "g", "limits": {"call": 1}}, 400, "call"),
        ({"task": "t", "group": "g", "limits": {"calls": 0}}, 400, "limits.calls=0"),
        ({"task": "t", "group": "a/b"}, 400, "group='a/b'"),
    ],
)
async def test_bad_requests_say_what_is_wrong(
    admin: httpx.AsyncClient, body: dict[str, Any], status: int, words: str
) -> None:
    refused = await admin.post("/admin/sessions", json=body)
    assert refused.status_code == status
    assert words in refused.json()["error"]["message"]


async def test_only_the_admin_key_opens_and_a_reward_belongs_to_a_score(
    admin: httpx.AsyncClient,
) -> None:
    wanted = {"task": "t", "group": "g", "session": "one"}
    for key in ("public", "secre"):
        refused = await admin.post(
            "/admin/sessions", json=wanted, headers={"Authorization": f"Bearer {key}"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert (await admin.post("/admin/sessions", json=wanted)).json()["session"] == "one"
    unscored = await admin.post("/admin/sessions/one/close", json={"outcome": "ok"})
    assert unscored.status_code == 400
    assert (await admin.get("/admin/sessions/one")).json()["outcome"] is None
