"""Whole HTTP/1.1 exchanges over plain connections that are kept alive: one request, one answer.

For the calls that are made thousands of times a second. What a general client does besides (TLS,
redirects, cookies, proxies, streams) is left to one; failures are httpx's exceptions, so that
callers need not care which of the two it was.
"""

import asyncio
from typing import Any, NamedTuple

import httptools
import httpx

_KEPT_S = 30.0
"""Idle seconds after which a connection is not used again: servers close theirs at some time, and a
request that crosses the closing is lost."""


class Response(NamedTuple):
    """A whole answer."""

    status: int
    content: bytes


class ExchangePool:
    """Connections to one server.

    Args:
        host: of the server.
        port: TCP port.
        headers: sent with every request.
        connections: most that are open at once; further requests wait for one.
        connect_timeout_s: longest wait for a connection to open.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        headers: dict[str, str],
        connections: int,
        connect_timeout_s: float,
    ) -> None:
        self._host, self._port = host, port
        shown = f"[{host}]" if ":" in host else host
        lines = {"Host": f"{shown}:{port}", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._connect_timeout_s = connect_timeout_s
        self._free = asyncio.Semaphore(connections)
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._closed = False

    async def post(
        self, path: str, body: bytes, *, headers: dict[str, str], timeout_s: float | None
    ) -> Response:
        """POST a body and read the whole answer. Cancelling this closes the connection.

        Args:
            path: with its query, ASCII.
            body: of the request.
            headers: more of them, ASCII without line breaks.
            timeout_s: longest wait for the answer; None for no limit.

        Raises:
            httpx.HTTPError: no connection, no answer in time, or not HTTP.
            RuntimeError: the pool is closed.
        """
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\n{self._headers}{more}Content-Length: {len(body)}\r\n\r\n"
        if not path.isascii() or not path.isprintable() or not more.isascii():
            raise httpx.UnsupportedProtocol(f"{path!r} cannot be asked for")
        async with self._free:
            try:
                async with asyncio.timeout(timeout_s):
                    connection = self._reuse() or await self._connect()
                    return await self._exchange(connection, head.encode("latin-1"), body)
            except TimeoutError as error:
                raise httpx.ReadTimeout("no answer in time") from error

    async def close(self) -> None:
        """Close every connection; requests on them fail. Safe to repeat."""
        self._closed = True
        for connection in list(self._open):
            connection.transport.abort()
        self._idle.clear()

    def _reuse(self) -> "_Connection | None":
        if self._closed:
            raise RuntimeError("the client is closed")
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and now - connection.idle_since < _KEPT_S:
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), self._host, self._port
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    async def _exchange(self, connection: "_Connection", head: bytes, body: bytes) -> Response:
        try:
            response = await connection.exchange(head, body)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.reusable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.transport.close()
        return response


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time.

    Args:
        open_: the pool's set of these, in which this one is while it is connected.
    """

    def __init__(self, open_: "set[_Connection]") -> None:
        self.idle_since = 0.0
        self.lost = False
        self.reusable = False
        self.transport: Any = None
        self._open = open_
        self._answer: asyncio.Future[Response] | None = None
        self._begun = self._sized = False

    async def exchange(self, head: bytes, body: bytes) -> Response:
        """Send a request; returns its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.reusable = False
        self._begun = self._sized = False
        if self.lost:
            raise httpx.RemoteProtocolError("the server closed the connection")
        # One write for small bodies: a second packet would wait for the first one's receipt.
        self.transport.write(head + body)
        try:
            return await self._answer
        finally:
            self._answer = None

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._open.discard(self)
        if self._begun and exc is None and not self._sized and self._answer is not None:
            # Without a length, the end of the connection is the end of the answer.
            self.on_message_complete()
            self.reusable = False
        reason = "the server closed the connection" if exc is None else str(exc)
        self._fail(httpx.RemoteProtocolError(reason))

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked: whatever it is, the next answer would be wrong
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"not HTTP: {error}"))

    # the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # says only that there will be an answer
            self._parts.clear()
            return
        if self._answer is not None and not self._answer.done():
            self.reusable = self._parser.should_keep_alive()
            self._answer.set_result(Response(status, b"".join(self._parts)))

    def _fail(self, error: httpx.HTTPError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
