"""What every request to the engine's HTTP surface passes first, and how requests are refused.

In this order: its time and status are counted, its key is checked, pages in a browser are kept out
where there is no key, and generations over the limit are sent away, all before a byte of the body
is read. Then the body is read, within a size and a time.
"""

import asyncio
import secrets
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.engine.serving.metrics import HttpMetrics
from headrace.engine.serving.wire import ErrorAnswer, Problem
from headrace.engine.types import EngineError

PUBLIC = frozenset({"/health", "/metrics"})
"""Answered without a key: probes and scrapers have none."""
LIMITED = "/generate"

_STATUS = {
    EngineError.INVALID: 422,
    EngineError.TOO_LONG: 422,
    EngineError.OVERLOADED: 429,
    EngineError.CLOSED: 503,
    EngineError.FAILED: 500,
}
_RETRY_AFTER_S = "1"


class Limits(msgspec.Struct, frozen=True):
    """What the HTTP surface gives to its callers.

    Attributes:
        open: generations under way or being answered, over HTTP; one more is a 429. The engine's
            own queue has its own limit.
        body_bytes: largest body; 0 is a mebibyte and 16 bytes for each token of the context.
        body_s: seconds for a body to arrive.
        status_s: seconds that /health, /metrics and /weights wait for the engine.
        keepalive_s: silence in a stream after which a comment is sent.
        grace_s: an engine that has not answered this long after a request's own timeout is hung.
        replays: answers that are kept for their Idempotency-Key.
        replay_s: seconds they are kept.
    """

    open: int = 1024
    body_bytes: int = 0
    body_s: float = 30.0
    status_s: float = 2.0
    keepalive_s: float = 15.0
    grace_s: float = 240.0
    replays: int = 1024
    replay_s: float = 600.0


class Refusal(Exception):
    """An answer that is not a success: its HTTP status, code and text, and headers."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @classmethod
    def of(cls, error: EngineError) -> "Refusal":
        """How an engine's refusal is told."""
        return cls(_STATUS.get(error.code, 500), error.code, str(error))

    def response(self) -> Response:
        """The whole response."""
        headers = dict(self.headers)
        if self.status == 429:
            headers["retry-after"] = _RETRY_AFTER_S
        body = ErrorAnswer(error=Problem(code=self.code, message=self.message))
        return Response(
            body.model_dump_json().encode("utf-8"),
            self.status,
            headers=headers,
            media_type="application/json",
        )


class Doorway:
    """ASGI middleware; see the module.

    Args:
        app: what is behind it.
        metrics: where requests are counted.
        api_key: what clients must send as bearer token; None lets everybody in.
        limits: see `Limits.open`.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: HttpMetrics, api_key: str | None, limits: Limits
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._key = api_key.encode() if api_key is not None else None
        self._limits = limits
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        # Nothing is sent to those who have gone; 499 is what nginx calls that.
        status = 499

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        limited = scope["path"] == LIMITED
        refusal = self._refuse(scope, limited)
        self._open += limited
        self._metrics.open.set(self._open)
        try:
            app = self._app if refusal is None else refusal.response()
            await app(scope, receive, note)
        except BaseException:
            status = 500 if status == 499 else status
            raise
        finally:
            self._open -= limited
            self._metrics.open.set(self._open)
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count(route, status, time.perf_counter() - started)

    def _refuse(self, scope: Scope, limited: bool) -> Refusal | None:
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in PUBLIC:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self._key):
                return Refusal(
                    401,
                    "unauthorized",
                    "send the engine's key as Authorization: Bearer KEY",
                    www_authenticate="Bearer",
                )
        if self._key is None and b"origin" in headers:
            # Any web page could otherwise drive the engine of whoever looks at it.
            return Refusal(
                403, "forbidden", "requests from web pages are refused without an API key"
            )
        if limited and self._open >= self._limits.open:
            return Refusal(
                429,
                EngineError.OVERLOADED,
                f"{self._open} requests are open, which is the limit; try again later",
            )
        return None


async def read_json(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
        Refusal: 415, 413 or 408.
        ClientDisconnect: the client went away.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise Refusal(
            415,
            "unsupported_media_type",
            f"Content-Type is {kind[:80]!r}; send application/json",
        )
    chunks: list[bytes] = []
    size = int(request.headers.get("content-length", "0"))
    try:
        async with asyncio.timeout(timeout_s):
            if size <= limit:
                size = 0
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        break
                    chunks.append(chunk)
    except TimeoutError:
        raise Refusal(
            408, "body_timeout", f"the body did not arrive within {timeout_s} s"
        ) from None
    if size > limit:
        raise Refusal(
            413,
            "body_too_large",
            f"the body is larger than {limit} bytes; shorten it",
        )
    return b"".join(chunks)
