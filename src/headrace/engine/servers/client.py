"""Calls to an inference server, and what its failures mean to an engine's caller.

Knows HTTP and JSON, not what any route is for. Nothing here imports torch.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from headrace.engine.config import USER_ERROR
from headrace.engine.servers.process import ServerProcess
from headrace.engine.types import EngineError
from headrace.errors import UserError
from headrace.http.client import HttpClient
from headrace.http.exchange import ExchangePool

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0
"""Longest wait for the answer to anything but a generation or the loading of weights."""
_LONGEST_MESSAGE = 500
_TOO_LONG = ("maximum model length", "context length", "context_length_exceeded")
"""How servers begin to say that a prompt leaves no room."""

_OWN_CODES = (
    EngineError.INVALID,
    EngineError.TOO_LONG,
    EngineError.OVERLOADED,
    EngineError.CLOSED,
    EngineError.FAILED,
    USER_ERROR,
)

T = TypeVar("T")


class _Said(msgspec.Struct):
    code: str


class _OwnError(msgspec.Struct):
    error: _Said


class ServerClient:
    """One server.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000".
        name: of the server's make, for messages.
        connections: most that are open at once.
        api_key: sent as a bearer token.
        server: its process, if it is this one's own: says why calls fail when it has ended.
        transport: replaces the network, for tests.

    Raises:
        UserError: no usable URL.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        connections: int,
        api_key: str | None = None,
        server: ServerProcess | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise UserError(f"engine URL {url!r}: not a URL ({error})") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"engine URL {url!r}: give one like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.name = name
        self._server = server
        self._closed = False
        self._pool: ExchangePool | None = None
        if parsed.scheme == "http" and transport is None and not parsed.userinfo:
            self._base_path = parsed.raw_path.decode("ascii").rstrip("/")
            self._pool = ExchangePool(
                parsed.host,
                parsed.port or 80,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                connections=connections,
                connect_timeout_s=CONNECT_TIMEOUT_S,
            )
        self._client = HttpClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=64),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections; open calls fail with CLOSED."""
        self._closed = True
        if self._pool is not None:
            await self._pool.close()
        await self._client.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        """The JSON answer to a GET.

        Raises:
            EngineError: as `post`; FAILED if the answer is no `kind`.
        """
        return self.read(path, await self._call("GET", path, None, None, CONTROL_TIMEOUT_S), kind)

    async def answers(self, path: str) -> bool:
        """Whether a GET succeeds."""
        try:
            await self._call("GET", path, None, None, CONTROL_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def has(self, path: str) -> bool:
        """Whether the server knows the route, which takes a POST of something but {}.

        Raises:
            EngineError: the server cannot be reached.
        """
        try:
            request = self._client.build_request(
                "POST", path, json={}, timeout=httpx.Timeout(CONTROL_TIMEOUT_S)
            )
            response = await self._client.send(request)
        except httpx.HTTPError as error:
            raise self.lost(path, error) from error
        return response.status_code not in (404, 405)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The answer to a POST.

        Args:
            path: below the URL.
            body: sent as JSON.
            params: of the query.
            timeout_s: longest wait for the answer; None leaves that to the caller.
            headers: more of them.

        Raises:
            EngineError: CLOSED if the server cannot be reached or has ended, OVERLOADED, TOO_LONG
                or INVALID if it refuses, FAILED for anything else.
        """
        if self._pool is None or params or headers:
            return await self._call("POST", path, body, params, timeout_s, headers)
        content = b"" if body is None else msgspec.json.encode(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = await self._pool.post(
                self._base_path + path, content, headers=kind, timeout_s=timeout_s
            )
        except (httpx.HTTPError, RuntimeError) as error:
            raise self.lost(path, error) from error
        if response.status >= 400:
            raise self.refusal(path, response.status, response.content)
        return response.content

    def read(self, path: str, content: bytes, kind: type[T]) -> T:
        """An answer's JSON.

        Raises:
            EngineError: FAILED if it is no `kind`.
        """
        try:
            return msgspec.json.decode(content, type=kind)
        except ValueError as error:
            raise EngineError(
                EngineError.FAILED, f"{self.name}: {path}: unexpected answer ({error})"
            ) from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        async with self.stream(method, path, body, params, timeout_s, headers) as response:
            try:
                return await response.aread()
            except httpx.HTTPError as error:
                raise self.lost(path, error) from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """An answer as it comes. What fails while it is read is for `lost`.

        Raises:
            EngineError: as `post`.
        """
        sent = dict(headers or {})
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            request = self._client.build_request(
                method,
                path,
                content=None if body is None else msgspec.json.encode(body),
                headers=sent,
                params=params,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            )
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self.lost(path, error) from error
        try:
            if response.status_code >= 400:
                raise self.refusal(path, response.status_code, await _body(response))
            yield response
        finally:
            await response.aclose()

    def lost(self, path: str, error: Exception) -> EngineError:
        """A failed exchange as an error that says what to look at. Returns it to be raised.

        Raises:
            Exception: `error`, if it has nothing to do with the network.
        """
        where = f"{self.name} at {self.url}"
        if self._closed:
            return EngineError(EngineError.CLOSED, "the engine is closed")
        if self._server is not None and (ended := self._server.ended) is not None:
            return EngineError(EngineError.CLOSED, ended)
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EngineError(
                EngineError.CLOSED, f"{where} cannot be reached; is it running and the URL right?"
            )
        if isinstance(error, httpx.TimeoutException):
            return EngineError(EngineError.FAILED, f"{where}: no answer to {path} in time")
        if isinstance(error, httpx.HTTPError):
            reason = str(error) or type(error).__name__
            return EngineError(EngineError.FAILED, f"{where}: connection lost in {path} ({reason})")
        raise error

    def refusal(self, path: str, status: int, content: bytes) -> EngineError:
        """An error status as an `EngineError`."""
        said = message_of(content)
        where = f"{self.name} at {self.url}"
        if self._server is not None and (ended := self._server.ended) is not None:
            return EngineError(EngineError.CLOSED, ended)
        if status in (401, 403):
            return EngineError(EngineError.FAILED, f"{where} refuses the API key for {path}")
        if (code := _own_code(content)) is not None:
            return EngineError(code, said)
        if status in (404, 405):
            return EngineError(EngineError.FAILED, f"{where} has no {path}: {said}")
        if status in (429, 503):
            return EngineError(EngineError.OVERLOADED, f"{where}: {said}")
        if status < 500:
            long = any(words in said for words in _TOO_LONG)
            code = EngineError.TOO_LONG if long else EngineError.INVALID
            return EngineError(code, f"{where}: {said}")
        return EngineError(EngineError.FAILED, f"{where}: {path} failed: {said}")


async def _body(response: httpx.Response) -> bytes:
    try:
        return await response.aread()
    except httpx.HTTPError:
        return b""


def _own_code(content: bytes) -> str | None:
    """The code of an error that another headrace engine answered."""
    try:
        body = msgspec.json.decode(content, type=_OwnError)
    except ValueError:
        return None
    return body.error.code if body.error.code in _OWN_CODES else None


def message_of(content: bytes) -> str:
    """The one line that matters in a server's error body."""
    try:
        body = msgspec.json.decode(content)
    except ValueError:
        body = content.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    text = " ".join(str(body).split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."
