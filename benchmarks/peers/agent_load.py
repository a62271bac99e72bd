"""Agents that take turns over HTTP: many sessions in one process, as cheap as they can be.

A session is one connection kept alive and one key at a time. Its bodies grow by the bytes of each
turn; after its last turn it goes on as another session with another key.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import httptools
import uvloop
from agent_text import CHAT_PATH, AgentText
from lines import options, serve

_DEADLINE_S = 300.0


class Plan:
    """What all sessions of one measurement share.

    Args:
        keys: one for each session, as many as will be needed.
        turns: of a session.
        lines: of a tool result.
        series: see `AgentText`.
        limit: requests in all.
        arrivals: a second, at random, sessions in turn; 0 asks again as soon as it is answered.
    """

    def __init__(
        self,
        port: int,
        keys: list[str],
        turns: int,
        lines: int,
        series: int,
        limit: int,
        arrivals: float,
    ) -> None:
        self.port = port
        self.keys = iter(enumerate(keys))
        self.turns = turns
        self.text = AgentText(lines, series)
        self.arrivals = arrivals
        self.left = limit
        self.open = limit
        self.samples: list[tuple[int, float]] = []
        """Turn and seconds of every answer."""
        self.draw = random.Random(0)
        self.finished = asyncio.get_running_loop().create_future()

    def fail(self, reason: str) -> None:
        if not self.finished.done():
            self.finished.set_exception(RuntimeError(reason))


class Session(asyncio.Protocol):
    """One connection and who speaks over it.

    Args:
        age: turns that its first session has behind it.
    """

    def __init__(self, plan: Plan, age: int) -> None:
        self._plan = plan
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._body = b""
        self.waiting = 0
        """Requests that are to be sent once the present one is answered."""
        self._busy = False
        self._begin(age)

    def _begin(self, age: int) -> None:
        self._number, key = next(self._plan.keys)
        self._turn = age
        text = self._plan.text
        self._history = bytearray(text.opening.head)
        for turn in range(age + 1):
            self._history += text.added(self._number, turn)
        self._head = (
            f"POST {CHAT_PATH} HTTP/1.1\r\nhost: 127.0.0.1:{self._plan.port}\r\n"
            f"authorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: "
        ).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._busy:
            self._plan.fail(f"a connection was closed ({exc})")

    async def connect(self) -> None:
        """Open the connection, at first or after the server closed it when it was idle."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, "127.0.0.1", self._plan.port)

    async def _send_anew(self) -> None:
        try:
            await self.connect()
        except OSError as error:
            self._plan.fail(f"no connection: {error}")
        else:
            self._write()

    def close(self) -> None:
        """Let go of the connection."""
        self._busy = False
        if self._transport is not None:
            self._transport.abort()

    def ask(self) -> None:
        """Ask, now or when the present answer is there; if there is anything left to ask."""
        plan = self._plan
        if not plan.left:
            return
        plan.left -= 1
        self.waiting += 1
        if not self._busy:
            self._send()

    def _send(self) -> None:
        self.waiting -= 1
        self._busy = True
        self._sent = time.perf_counter()
        if self._transport is None:
            self._parser = httptools.HttpResponseParser(self)
            self._anew = asyncio.create_task(self._send_anew())
        else:
            self._write()

    def _write(self) -> None:
        plan = self._plan
        end = plan.text.opening.end
        length = len(self._history) + len(end)
        self._transport.write(b"%b%d\r\n\r\n%b%b" % (self._head, length, self._history, end))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body = body

    def on_message_complete(self) -> None:
        plan = self._plan
        status = self._parser.get_status_code()
        if status != 200:
            plan.fail(f"status {status}: {self._body[:300]!r}")
            return
        plan.samples.append((self._turn, time.perf_counter() - self._sent))
        self._busy = False
        plan.open -= 1
        if not plan.open:
            plan.finished.set_result(None)
            return
        self._turn += 1
        if self._turn < plan.turns:
            self._history += plan.text.added(self._number, self._turn)
        elif plan.left or self.waiting:
            self._begin(0)
        if self.waiting:
            self._send()
        elif not plan.arrivals:
            self.ask()


def arrive(plan: Plan, sessions: Iterator[Session]) -> None:
    """Let the next session ask, and the one after it when its time comes."""
    next(sessions).ask()
    if plan.left:
        pause = plan.draw.expovariate(plan.arrivals)
        asyncio.get_running_loop().call_later(pause, arrive, plan, sessions)


async def _run(ages: list[int], **plan: Any) -> dict[str, Any]:
    shared = Plan(**plan)
    sessions = [Session(shared, age) for age in ages]
    for session in sessions:
        await session.connect()
    began = time.perf_counter()
    busy = time.process_time()
    if shared.arrivals:
        arrive(shared, itertools.cycle(sessions))
    else:
        for session in sessions:
            session.ask()
    await asyncio.wait_for(shared.finished, _DEADLINE_S)
    seconds = time.perf_counter() - began
    busy = time.process_time() - busy
    for session in sessions:
        session.close()
    return {
        "seconds": seconds,
        "busy": busy / seconds,
        "turns": [turn for turn, _ in shared.samples],
        "latencies": [latency for _, latency in shared.samples],
    }


def main() -> None:
    given = options()
    os.sched_setaffinity(0, given["cores"])

    def run(**plan: Any) -> dict[str, Any]:
        return uvloop.run(_run(**plan))

    serve(given, {"run": run})


if __name__ == "__main__":
    main()
