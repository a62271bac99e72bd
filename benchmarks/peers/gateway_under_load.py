"""headrace's gateway as a peer, over an engine that answers at once: by HTTP, or in this process.

Sessions are opened here, with as many turns behind them as asked for: those that make a history are
answered without HTTP, from the same bytes.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop
from agent_text import AgentText
from lines import options, serve

from headrace.engine.config import UpdatePolicy
from headrace.engine.servers.remote import HeadraceEngine
from headrace.engine.types import GenerationRequest, GenerationResult, OnProgress
from headrace.gateway.apis import openai_chat
from headrace.gateway.apis.openai_chat import WireChatRequest
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.gateway.sessions import Credentials
from headrace.gateway.turn import decode
from headrace.rollout.types import FinishReason, Span
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.tokenizer import load_tokenizer

_WAIT_S = 300.0


class StubEngine:
    """Answers at once, in this process, or asks another engine.

    Args:
        ids: of every answer.
        other: who answers unless `alone`; None: nobody.
    """

    weight_version = 0
    max_context = 1 << 20

    def __init__(self, ids: list[int], other: HeadraceEngine | None) -> None:
        logprobs = (-0.5,) * len(ids)
        self._spans = (Span(tuple(ids), logprobs, 0, "stub"),)
        self._raw = logprobs
        self._other = other
        self.alone = True
        """Histories are made without the other engine."""

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        if self._other is not None and not self.alone:
            return await self._other.generate(request, on_progress)
        return GenerationResult(request.id, self._spans, FinishReason.STOP, raw_logprobs=self._raw)

    async def abort(self, request_id: str) -> None:
        return

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        raise NotImplementedError("the stub has no weights")

    async def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        return


async def start(given: dict[str, Any]) -> tuple[GatewayServer, StubEngine]:
    """The gateway on a port, and its engine."""
    other = None
    if given["engine_url"] is not None:
        other = HeadraceEngine(given["engine_url"])
        await other.start()
    engine = StubEngine(given["ids"], other)
    renderer = LibraryRenderer("glm-5", load_tokenizer(Path(given["tokenizer"])))
    gateway = Gateway(engine, renderer, max_running=2048)
    return await GatewayServer.start(gateway), engine


async def open_sessions(gateway: Gateway, ages: list[int], text: AgentText) -> list[str]:
    """Close all sessions and open others; returns their keys."""
    await gateway.close()
    gateway.counters.clear()
    opened = time.monotonic_ns()
    keys = []
    for number, age in enumerate(ages):
        key = gateway.open_session(f"{opened}-{number}")
        body = text.opening.head
        for turn in range(age):
            body += text.added(number, turn)
            request = decode(body + text.opening.end, WireChatRequest)
            shown = Credentials(api_key=key)
            conversation = gateway.transcript(shown).read(bytes(request.messages))
            await gateway.ask(shown, openai_chat.read(request, conversation))
        keys.append(key)
    return keys


def check(counters: Counter[str], roots: int) -> None:
    """Every call but the first of a session must have continued one.

    Raises:
        RuntimeError: one did not, or its answer was not read as a tool call.
    """
    odd = {name: n for name, n in counters.items() if name.startswith(("fork", "error"))}
    if odd or counters["calls"] - counters["bridged"] > roots:
        raise RuntimeError(f"not the calls that were meant: {dict(counters)}")
    if counters["parse.ok"] != counters["calls"]:
        raise RuntimeError(f"answers were not read: {dict(counters)}")


def main() -> None:
    given = options()
    os.sched_setaffinity(0, given["cores"])
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(_WAIT_S)

    server, engine = wait(start(given))
    opened = 0

    def open_(ages: list[int], lines: int, series: int) -> dict[str, Any]:
        nonlocal opened
        check(server.gateway.counters, opened)
        opened = len(ages)
        engine.alone = True
        keys = wait(open_sessions(server.gateway, ages, AgentText(lines, series)))
        engine.alone = False
        return {"keys": keys, "port": server.port}

    serve(given, {"open": open_})


if __name__ == "__main__":
    main()
