"""A running gateway and the official clients of its APIs."""

from collections.abc import AsyncIterator

import pytest
from anthropic import AsyncAnthropic
from api_rig import CALL, RENDERER, SAID, THOUGHT, Running
from openai import AsyncOpenAI
from scripted import ScriptedEngine, answers

from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.rollout.types import Call


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
