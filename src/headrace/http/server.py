"""Puts an ASGI app on a port of this machine, inside the event loop that is already running.

The socket is bound before uvicorn sees it, so that a port in use is a clear error and port 0 tells
which one it became. Connections are held to limits that uvicorn does not have: how many there are,
how long and how large a request's head may be, and how slowly an answer may be read. It knows
nothing of what the app does. Signals stay with the process that owns the loop.
"""

import asyncio
import contextlib
import functools
import ipaddress
import resource
import socket
from collections.abc import Generator
from typing import Any, cast

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import UserError

_START_S = 10.0
_DRAIN_S = 2.0
"""Seconds that open requests get when the server stops."""
_KEEP_ALIVE_S = 75
_OTHER_DESCRIPTORS = 1024
"""Of this process, beside two for each connection, as its clients may be here as well."""
_PROBE_S = 30
"""Idle seconds after which the kernel asks whether the other end is still there."""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """What one client connection may cost.

    Attributes:
        connections: most connections at once; one more is closed at once.
        head_s: seconds from the first byte of a request, or from connecting, to the end of its
            headers.
        head_bytes: size of request line and headers.
        stall_s: an answer of which less than `stall_bytes` are taken in this time is cut off.
        stall_bytes: see `stall_s`.
        linger_s: seconds in which a body that was refused may go on coming, so that its sender gets
            to see the answer.
    """

    connections: int = 1024
    head_s: float = 20.0
    head_bytes: int = 65_536
    stall_s: float = 30.0
    stall_bytes: int = 16_384
    linger_s: float = 2.0


class _Connection(HttpToolsProtocol):
    """uvicorn's protocol with `ConnectionLimits`. A connection that breaks one is aborted."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        # Between messages, or inside the head of one.
        self._head_due = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        # Answered; what is left of the body is read and forgotten.
        self._lingering = False
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._cancel_stall()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    # Slow and endless heads.

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_s, self.transport.abort)

    def _head_arrived(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        if self._head_due:
            self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        # A head that came to its end has set this back to 0.
        if self._head_bytes > self._limits.head_bytes:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        if self._lingering:
            return
        self._head_due = False
        self._head_arrived()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_due = True
        super().on_message_complete()
        if self._lingering:
            self.transport.close()

    # Bodies that were refused before their end.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        unread = not self._head_due and not self.pipeline and self.cycle.response_complete
        if unread and not self.transport.is_closing():
            # Closing at once would reset the connection, and with it the answer on its way.
            self._lingering = True
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)

    # Slow readers.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._cancel_stall()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._limits.stall_s, self._check_reader)

    def _check_reader(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() < self._limits.stall_bytes:
            self._stall_timer = None
            self.transport.abort()
        else:
            self._watch_reader()

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


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


class HttpServer:
    """A running HTTP server. `await HttpServer.start(app)`, then `await server.stop()`.

    Attributes:
        host: address it is bound to.
        port: TCP port it listens on.
        address: what others call this machine.
    """

    def __init__(self, host: str, port: int, address: str, server: _Server) -> None:
        self.host = host
        self.port = port
        self.address = address
        self._server = server
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it answers, without a path."""
        return url_of(self.address, self.port)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    @classmethod
    async def start(
        cls,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "server",
        address: str | None = None,
        limits: ConnectionLimits | None = None,
    ) -> "HttpServer":
        """Serve `app`; returns once requests are accepted.

        Args:
            app: what answers.
            host: address to bind.
            port: TCP port; 0 takes a free one, see `port`.
            name: what messages call it.
            address: what others call this machine; by default `host`, or the machine's name where
                that is every address.
            limits: of its connections.

        Raises:
            UserError: the port is in use or the address cannot be bound.
        """
        limits = limits or ConnectionLimits()
        _allow_descriptors(_OTHER_DESCRIPTORS + 2 * limits.connections)
        sock = _bind(host, port, name)
        protocol = functools.partial(_Connection, limits=limits)
        config = uvicorn.Config(
            app,
            loop="none",
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            # Warnings are about clients' mistakes: whoever may connect could fill the log.
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_DRAIN_S),
        )
        address = address or (socket.gethostname() if is_unspecified(host) else host)
        server = cls(host, sock.getsockname()[1], address, _Server(config))
        task = asyncio.create_task(server._server.serve(sockets=[sock]), name=f"{name} http")
        server._task = task
        up = asyncio.create_task(server._server.up.wait())
        try:
            await asyncio.wait({task, up}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if not server._server.started:
            await server.stop()
            sock.close()
            raise RuntimeError(f"{name}: the HTTP server on port {server.port} did not start")
        return server

    async def stop(self) -> None:
        """Close the port; open requests get a moment to end. Safe to repeat."""
        task, self._task = self._task, None
        if task is None:
            return
        self._server.should_exit = True
        _, late = await asyncio.wait({task}, timeout=_DRAIN_S + 3.0)
        if late:
            task.cancel()
            await asyncio.wait({task}, timeout=_DRAIN_S)
        elif not task.cancelled():
            task.result()


def url_of(host: str, port: int) -> str:
    """The root of a server by its host and port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Whether it binds every address of this machine, and so is none that others could call."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _allow_descriptors(count: int) -> None:
    """Let this process have so many open files, as far as the system permits it; the usual limit is
    1024, at which connections would fail one by one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(host: str, port: int, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit these: peers that vanished are found, idle or not.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _PROBE_S), ("TCP_USER_TIMEOUT", _PROBE_S * 1000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise UserError(
            f"{name}: port {port} on {host} cannot be used ({error}); "
            "choose another, or 0 for a free one"
        ) from error
    return sock
