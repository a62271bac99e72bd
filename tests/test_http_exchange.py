"""Exchanges over kept connections: every way a server can answer, or fail to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from headrace.http.exchange import ExchangePool

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request by the next of its scripts: bytes, or None to wait for ever."""

    def __init__(self, *scripts: bytes | None, close: bool = False) -> None:
        self.scripts = list(scripts)
        self.close = close
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.lost = asyncio.Event()
        self.entered = asyncio.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.entered.release()
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                if script is not None:
                    writer.write(script)
                    if self.close:
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def pool_to(server: Server, connections: int = 8) -> AsyncIterator[ExchangePool]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    pool = ExchangePool(
        "127.0.0.1",
        listening.sockets[0].getsockname()[1],
        headers={"Authorization": "Bearer k"},
        connections=connections,
        connect_timeout_s=5.0,
    )
    try:
        yield pool
    finally:
        await pool.close()
        listening.close()


async def post(pool: ExchangePool, body: bytes = b"{}", timeout_s: float = 5.0) -> tuple:
    return await pool.post("/x", body, headers={"Content-Type": "a/b"}, timeout_s=timeout_s)


async def test_one_connection_serves_one_request_after_the_other():
    server = Server(OK)
    async with pool_to(server) as pool:
        big = b"x" * 300_000
        assert [await post(pool, body) for body in (b"{}", b"", big)] == [(200, b"ok")] * 3
    assert server.connections == 1
    assert server.bodies == [b"{}", b"", big]
    assert server.heads[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in server.heads[0]


async def test_no_more_connections_than_allowed_and_all_are_answered():
    server = Server(OK)
    async with pool_to(server, connections=2) as pool:
        assert await asyncio.gather(*(post(pool) for _ in range(9))) == [(200, b"ok")] * 9
    assert server.connections <= 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
            200,
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200),
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", 503),
    ],
)
async def test_answers_of_every_form(script: bytes, expected: int):
    server = Server(script, OK)
    async with pool_to(server) as pool:
        assert await post(pool) == (expected, b"ok")
        assert await post(pool) == (200, b"ok")


async def test_an_answer_without_length_ends_with_its_connection():
    async with pool_to(Server(b"HTTP/1.1 200 OK\r\n\r\nok", close=True)) as pool:
        assert await post(pool) == (200, b"ok")
        assert await post(pool) == (200, b"ok")


@pytest.mark.parametrize(
    "script", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", b"no\r\n"]
)
async def test_what_is_no_whole_answer_is_an_error(script: bytes):
    async with pool_to(Server(script, close=True)) as pool:
        with pytest.raises(httpx.RemoteProtocolError):
            await post(pool)


async def test_too_late_and_cancelled_requests_close_their_connections():
    server = Server(None, None, OK)
    async with pool_to(server) as pool:
        with pytest.raises(httpx.ReadTimeout):
            await post(pool, timeout_s=0.05)
        await asyncio.wait_for(server.lost.wait(), 30)
        server.lost.clear()
        task = asyncio.create_task(post(pool))
        for _ in range(2):
            await asyncio.wait_for(server.entered.acquire(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.lost.wait(), 30)
        assert await post(pool) == (200, b"ok")


async def test_nobody_there_and_closed():
    async with pool_to(Server(OK)) as pool:
        await pool.close()
        with pytest.raises(RuntimeError):
            await post(pool)
    with pytest.raises(httpx.ConnectError):
        await post(pool_of_nobody())


def pool_of_nobody() -> ExchangePool:
    return ExchangePool("127.0.0.1", 1, headers={}, connections=1, connect_timeout_s=5.0)
