"""HTTP calls to one task service: whole answers, within a size and a time.

Blocking calls for what a service's instances are asked through, asynchronous ones for rollouts. It
knows no route and retries nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec

from headrace.errors import UserError
from headrace.http.client import HttpClient
from headrace.tasks.remote.checking import MOST_BYTES, Misreport
from headrace.tasks.serving.wire import PROTOCOL, VERSION_HEADER, ErrorAnswer

_CONNECT_S = 5.0
_MOST_ERROR_BYTES = 65_536
_DOWN = (502, 503, 504)
"""Statuses of whoever stands before a service that is not there."""


class Unreachable(Exception):
    """No answer: the service is not there, or does not answer in time (`hung`)."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


class Refused(Exception):
    """The service answered with an error."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message} (HTTP {status}, {code})")
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def check_url(url: str, place: str) -> str:
    """`url` without a slash at its end.

    Raises:
        UserError: it is no http(s) address.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UserError(f"{place} {url!r}: not a URL ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise UserError(f"{place} {url!r}: give one like http://127.0.0.1:8700")
    return url.rstrip("/")


class TaskClient:
    """One service at one address.

    Args:
        url: see `check_url`.
        token: sent as a bearer token; None sends none.
        connections: most that are open at once, by asynchronous calls.
        answer_s: longest wait for an answer, beyond what the call itself says.
    """

    def __init__(self, url: str, token: str | None, *, connections: int, answer_s: float) -> None:
        self.url = url
        self._answer_s = answer_s
        headers = {VERSION_HEADER: str(PROTOCOL)}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        headers["Accept-Encoding"] = "identity"
        options: dict[str, Any] = {"base_url": url, "headers": headers, "trust_env": False}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=64)
        self._async = HttpClient(limits=limits, **options)
        self._sync = httpx.Client(**options)

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
        self._sync.close()
        await self._async.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        extra_s: float = 0.0,
        most: int = MOST_BYTES,
    ) -> bytes:
        """The body of a successful answer.

        Args:
            method: of HTTP.
            path: with its query.
            body: sent as JSON, if any.
            extra_s: the answer may take that much longer.
            most: bytes of it.

        Raises:
            Unreachable, Refused: see there.
            Misreport: the answer is larger than `most`.
        """
        timeout = self._timeout(extra_s)
        try:
            # A service may also let its answer trickle in.
            async with (
                asyncio.timeout(self._answer_s + extra_s + _CONNECT_S),
                self._async.stream(method, path, **_content(body), timeout=timeout) as response,
            ):
                parts = [part async for part in _bounded(response.aiter_raw(), most)]
                return _whole(response, parts, most)
        except TimeoutError as error:
            raise Unreachable(f"{self.url}: no answer in time", hung=True) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except RuntimeError as error:
            raise Unreachable(f"{self.url}: the client is closed ({error})") from error

    def ask_blocking(self, method: str, path: str, body: Any = None) -> bytes:
        """The same, in any thread but blocking it."""
        deadline = time.monotonic() + self._answer_s + _CONNECT_S
        try:
            with self._sync.stream(
                method, path, **_content(body), timeout=self._timeout(0.0)
            ) as response:
                parts = list(_bounded_blocking(response.iter_raw(), MOST_BYTES, deadline))
                return _whole(response, parts, MOST_BYTES)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except RuntimeError as error:
            raise Unreachable(f"{self.url}: the client is closed ({error})") from error

    def _timeout(self, extra_s: float) -> httpx.Timeout:
        answer_s = self._answer_s + extra_s
        return httpx.Timeout(answer_s, connect=_CONNECT_S, pool=answer_s)

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        hung = isinstance(error, httpx.TimeoutException) and not isinstance(
            error, httpx.ConnectTimeout
        )
        words = "no answer in time" if hung else (str(error) or type(error).__name__)
        return Unreachable(f"{self.url}: {words}", hung=hung)


def _content(body: Any) -> dict[str, Any]:
    if body is None:
        return {}
    return {
        "content": msgspec.json.encode(body),
        "headers": {"Content-Type": "application/json"},
    }


async def _bounded(parts: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    """Parts until there are more than `most` bytes, the one that is too much included."""
    size = 0
    async for part in parts:
        yield part
        size += len(part)
        if size > most:
            return


def _bounded_blocking(parts: Iterator[bytes], most: int, deadline: float) -> Iterator[bytes]:
    size = 0
    for part in parts:
        yield part
        size += len(part)
        if size > most:
            return
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout("the answer trickles in")


def _whole(response: httpx.Response, parts: list[bytes], most: int) -> bytes:
    """The body of a success; anything else becomes the exception it means."""
    data = b"".join(parts)
    if response.is_success:
        if len(data) > most:
            raise Misreport(f"the answer has more than {most} bytes")
        return data
    if response.status_code in _DOWN:
        raise Unreachable(f"{response.url.host}: HTTP {response.status_code}")
    code, message = "", response.reason_phrase or "an error"
    try:
        said = msgspec.json.decode(data[:_MOST_ERROR_BYTES], type=ErrorAnswer).error
        code, message = said.code[:60], " ".join(said.message[:400].split())
    except msgspec.MsgspecError:
        pass  # an error all the same, in words of somebody else's
    raise Refused(response.status_code, code, message, _retry_after(response))


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(60.0, max(0.1, float(response.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0
