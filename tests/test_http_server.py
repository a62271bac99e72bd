"""Connections that say nothing, say too much, or do not listen; and the port itself."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from headrace.errors import UserError
from headrace.http import server as server_module
from headrace.http.server import ConnectionLimits, HttpServer, _Connection

LARGE = 8 * 1024 * 1024


class Recorder:
    """Answers with as many bytes as the path names, and notes how each request ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue(100)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method == "POST" and request.url.path == "/refuse":
            await Response("no", 413)(scope, receive, send)
            return
        await request.body()
        count = int(request.url.path.strip("/") or 2)
        start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        for _ in range(0, count, 65_536):
            body = b"x" * min(count, 65_536)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        gone = await receive()
        self.ended.put_nowait(gone["type"])


@pytest.fixture
def app() -> Recorder:
    return Recorder()


@pytest.fixture
async def server(app: Recorder) -> AsyncIterator[HttpServer]:
    limits = ConnectionLimits(
        connections=4, head_s=0.3, head_bytes=4096, stall_s=0.3, stall_bytes=50_000, linger_s=0.2
    )
    running = await HttpServer.start(app, limits=limits)
    yield running
    await running.stop()


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(server.host, server.port)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What came until the server hung up, politely or not."""
    data = b""
    try:
        while part := await asyncio.wait_for(reader.read(65_536), 20):
            data += part
    except ConnectionError:
        pass
    return data


@pytest.mark.parametrize(
    "said", [b"", b"\r\n", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: 1"]
)
async def test_half_a_head_is_waited_for_only_so_long(server: HttpServer, said: bytes):
    reader, writer = await connect(server)
    writer.write(said)
    assert await closed(reader) == b""
    writer.close()


async def test_half_a_second_head_on_a_kept_connection_too(server: HttpServer):
    reader, writer = await connect(server)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"GET / HTTP/1.1\r\nho")
    assert await closed(reader) == b""
    writer.close()


async def test_an_endless_head_is_cut_off(server: HttpServer):
    reader, writer = await connect(server)
    writer.write(b"GET / HTTP/1.1\r\n" + b"x-a: " + b"b" * 5000)
    assert await closed(reader) == b""
    writer.close()
    large = {"x-a": "b" * 3000}
    async with httpx.AsyncClient(base_url=server.url) as client:
        # Bodies are not heads, and each request has a head of its own.
        for _ in range(3):
            assert (await client.post("/5", content=b"c" * 9000, headers=large)).text == "x" * 5


async def test_a_reader_that_stops_is_cut_off_and_the_app_told(server: HttpServer, app: Recorder):
    reader, writer = await connect(server)
    writer.write(f"GET /{LARGE} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert await asyncio.wait_for(app.ended.get(), 20) == "http.disconnect"
    assert len(await closed(reader)) < LARGE
    writer.close()


async def test_a_slow_reader_that_goes_on_is_left_alone():
    class Clock:
        """An event loop's timers, which run when the test says so."""

        def __init__(self) -> None:
            self.timers: list[Callable[[], None]] = []

        def call_later(self, delay: float, callback: Callable[[], None]) -> Mock:
            self.timers.append(callback)
            return Mock()

    clock, transport = Clock(), Mock(spec=asyncio.Transport)
    connection = _Connection(
        uvicorn.Config(Recorder()),
        ServerState(),
        {},
        _loop=clock,
        limits=ConnectionLimits(stall_bytes=100),
    )
    connection.connection_made(transport)
    clock.timers.clear()
    transport.get_write_buffer_size.return_value = 1000
    connection.pause_writing()
    for left in (900, 800, 700):
        transport.get_write_buffer_size.return_value = left
        clock.timers.pop()()
        transport.abort.assert_not_called()
    transport.get_write_buffer_size.return_value = 601
    clock.timers.pop()()
    transport.abort.assert_called_once()


async def test_a_refused_body_does_not_cost_the_client_its_answer(server: HttpServer):
    async with httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(2):
            assert (await client.post("/refuse", content=b"c" * LARGE)).status_code == 413
        assert (await client.get("/3")).text == "xxx"


async def test_connections_are_counted(server: HttpServer):
    first = [await connect(server) for _ in range(4)]
    for _, writer in first:
        writer.write(b"G")
    reader, writer = await connect(server)
    assert await closed(reader) == b""
    for _, open_writer in [*first, (reader, writer)]:
        open_writer.close()
    async with httpx.AsyncClient(base_url=server.url) as client, asyncio.timeout(20):
        while True:
            try:
                assert (await client.get("/2")).text == "xx"
                break
            except httpx.TransportError:  # the server has not seen the others close
                continue


async def test_the_port_is_told_refused_when_taken_and_free_after_stop(app: Recorder):
    server = await HttpServer.start(app)
    assert server.url == f"http://127.0.0.1:{server.port}"
    with pytest.raises(UserError, match=f"engine: port {server.port} on 127.0.0.1 cannot be used"):
        await HttpServer.start(app, port=server.port, name="engine")
    await server.stop()
    await server.stop()
    again = await HttpServer.start(app, port=server.port)
    assert again.port == server.port
    await again.stop()


@pytest.mark.parametrize(
    ("host", "address", "url"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:{port}"),
        ("127.0.0.1", "trainer.example", "http://trainer.example:{port}"),
        ("127.0.0.1", "fd00::5", "http://[fd00::5]:{port}"),
        ("0.0.0.0", None, "http://box:{port}"),
        ("0.0.0.0", "10.0.0.5", "http://10.0.0.5:{port}"),
    ],
)
async def test_its_url_is_what_others_call_the_machine(
    app: Recorder,
    host: str,
    address: str | None,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("headrace.http.server.socket.gethostname", lambda: "box")
    bound: list[str] = []
    bind = server_module._bind

    def bind_loopback(asked: str, port: int, name: str) -> socket.socket:
        bound.append(asked)
        return bind("127.0.0.1", port, name)  # a test opens nothing to others

    monkeypatch.setattr(server_module, "_bind", bind_loopback)
    running = await HttpServer.start(app, host=host, address=address)
    assert running.url == url.format(port=running.port)
    assert bound == [host]
    await running.stop()


async def test_an_open_request_does_not_keep_the_server_from_stopping(app: Recorder):
    server = await HttpServer.start(app)
    reader, writer = await connect(server)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    await asyncio.wait_for(server.stop(), 10)
    await closed(reader)
    writer.close()
