"""The client keeps to httpx's errors when the server goes away under a request."""

import asyncio
import socket
import struct

import httpx
import pytest
import uvloop

from headrace.http.client import HttpClient


@pytest.mark.parametrize("raised", [AttributeError("None has no address"), RuntimeError("closed")])
async def test_what_the_libraries_trip_over_is_an_error_of_the_network(raised):
    class Tripping(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise raised

    async with HttpClient(transport=Tripping()) as client:
        with pytest.raises(httpx.NetworkError, match=str(raised)):
            await client.get("http://127.0.0.1:9/")
        with pytest.raises(httpx.NetworkError):
            async with client.stream("PUT", "http://127.0.0.1:9/", content=b"x"):
                pass


async def test_a_closed_client_says_so():
    client = HttpClient()
    await client.aclose()
    with pytest.raises(httpx.NetworkError, match="closed"):
        await client.get("http://127.0.0.1:9/")


def test_connections_that_are_reset_while_they_open():
    async def resets() -> list[BaseException]:
        listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        listening.setblocking(False)
        loop = asyncio.get_running_loop()

        async def reset() -> None:
            while True:
                accepted, _ = await loop.sock_accept(listening)
                # Closed without lingering: the other side is told by a reset, as by a kill.
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()

        resetting = asyncio.create_task(reset())
        url = "http://{}:{}/".format(*listening.getsockname())
        try:
            async with HttpClient(timeout=30.0, trust_env=False) as client:
                asked = [client.put(url, content=b"x" * 65536) for _ in range(40)]
                return await asyncio.gather(*asked, return_exceptions=True)  # pyright: ignore
        finally:
            resetting.cancel()
            await asyncio.gather(resetting, return_exceptions=True)
            listening.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors = runner.run(resets())
    assert [e for e in errors if not isinstance(e, httpx.HTTPError)] == []
