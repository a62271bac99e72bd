"""Puts a gateway on a port of this machine, inside the event loop that is already running.

The socket is bound before uvicorn sees it, so that a port in use is a clear error and port 0 tells
which one it became. Signals stay with the process that owns the loop.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from headrace.errors import UserError
from headrace.gateway.app import create_app
from headrace.gateway.sessions import Gateway

_START_S = 10.0
_DRAIN_S = 2.0
"""Seconds that open requests get when the server stops."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, saying when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class GatewayServer:
    """A running HTTP server. `await GatewayServer.start(...)`, then `await server.stop()`."""

    def __init__(self, gateway: Gateway, host: str, port: int, server: _Server) -> None:
        self.gateway = gateway
        self.host = host
        self.port = port
        self._server = server
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"http://{self.host}:{self.port}/v1"

    @classmethod
    async def start(
        cls, gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0
    ) -> "GatewayServer":
        """Serve `gateway`; returns once requests are accepted.

        Args:
            gateway: what answers.
            host: address to bind.
            port: TCP port; 0 takes a free one, see `port`.

        Raises:
            UserError: the port is in use or the address cannot be bound.
        """
        sock = _bind(host, port)
        config = uvicorn.Config(
            create_app(gateway),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(_DRAIN_S),
        )
        server = cls(gateway, host, sock.getsockname()[1], _Server(config))
        task = asyncio.create_task(server._server.serve(sockets=[sock]), name="gateway-http")
        server._task = task
        up = asyncio.create_task(server._server.up.wait())
        try:
            await asyncio.wait({task, up}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if not server._server.started:
            await server.stop()
            sock.close()
            raise RuntimeError(f"gateway: the HTTP server on port {server.port} did not start")
        return server

    async def stop(self) -> None:
        """Close the gateway's sessions, then the port. Safe to repeat."""
        task, self._task = self._task, None
        if task is None:
            return
        await self.gateway.close()
        self._server.should_exit = True
        _, late = await asyncio.wait({task}, timeout=_DRAIN_S + 3.0)
        if late:
            task.cancel()
            await asyncio.wait({task}, timeout=_DRAIN_S)
        elif not task.cancelled():
            task.result()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise UserError(
            f"gateway port {port} on {host} cannot be used ({error}); "
            "choose another, or 0 for a free one"
        ) from error
    return sock
