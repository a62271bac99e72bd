"""Generation as server-sent events: what is on its way to a reader, and the response it leaves by.

A reader slower than the engine makes neither of them wait: what is pending for one output and one
weight version is one event that grows, so that at most the output itself is held. Errors before
the first event are ordinary HTTP errors.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.engine.serving.wire import RestartEvent, TokenEvent, finite
from headrace.engine.types import Progress

MEDIA_TYPE = "text/event-stream"
_LET_GO_S = 90.0
"""Longest wait for an engine to have ended what nobody wants any more."""

OnOutput = Callable[[int, Progress], None]
"""Told the index of an output and what it grew by."""


class PendingEvents:
    """Events on their way to one reader."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        """Set while there are any."""
        self._outputs: dict[int, list[TokenEvent | RestartEvent]] = {}

    def add(self, index: int, progress: Progress) -> None:
        """Output `index` grew."""
        events = self._outputs.setdefault(index, [])
        if progress.restart:
            # Nothing pending is of any use to whoever is told to forget it.
            events[:] = [RestartEvent(index=index)]
        if progress.ids:
            last = events[-1] if events else None
            if (
                not isinstance(last, TokenEvent)
                or last.weight_version != progress.weight_version
                or bool(last.raw_logprobs) != bool(progress.raw_logprobs)
            ):
                last = TokenEvent(
                    index=index,
                    ids=[],
                    logprobs=[],
                    raw_logprobs=[],
                    weight_version=progress.weight_version,
                )
                events.append(last)
            last.ids += progress.ids
            last.logprobs += finite(progress.logprobs)
            last.raw_logprobs += finite(progress.raw_logprobs)
        if events:
            self.arrived.set()

    def take(self) -> bytes:
        """All of them as text/event-stream, oldest first within an output."""
        self.arrived.clear()
        outputs, self._outputs = self._outputs, {}
        return b"".join(
            event("token" if isinstance(one, TokenEvent) else "restart", _json(one))
            for events in outputs.values()
            for one in events
        )


class EventStream(Response):
    """Runs a generation and sends what comes of it as it comes.

    Events: `token` and `restart` as they happen, then `done` with what `run` returned, or `error`.
    The response starts with the first of them, or with a comment after `keepalive_s`; if `run`
    raises before that, what `refuse` makes of it is the response. A reader that goes away cancels
    `run`.

    Args:
        run: generates, telling its argument what was sampled; returns the data of `done`.
        refuse: the ordinary response to an exception, whose body is an `ErrorAnswer`.
        keepalive_s: seconds of silence after which a comment is sent.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        run: Callable[[OnOutput], Awaitable[bytes]],
        refuse: Callable[[Exception], Response],
        keepalive_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._refuse = refuse
        self._keepalive_s = keepalive_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        pending = PendingEvents()
        async with reader(receive) as gone:
            work = asyncio.ensure_future(self._run(pending.add))
            try:
                while not work.done():
                    arrived = asyncio.ensure_future(pending.arrived.wait())
                    await asyncio.wait(
                        {work, gone, arrived},
                        timeout=self._keepalive_s,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    arrived.cancel()
                    if gone.done():
                        return
                    if not work.done():
                        await self._send(send, pending.take() or b": waiting\n\n")
                try:
                    last = event("done", work.result())
                except Exception as error:
                    refusal = self._refuse(error)
                    if not self._started:
                        await refusal(scope, receive, send)
                        return
                    last = event("error", bytes(refusal.body))
                await self._send(send, pending.take() + last)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await end(work)

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": data, "more_body": True})


@contextlib.asynccontextmanager
async def reader(receive: Receive) -> AsyncGenerator["asyncio.Future[None]"]:
    """A task that ends when the other side of a request, whose body was read, has gone."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(wait())
    try:
        yield gone
    finally:
        gone.cancel()


async def end(work: "asyncio.Future[bytes]") -> None:
    """Cancel `work` and wait until it has let go of the engine."""
    work.cancel()
    await asyncio.wait({work}, timeout=_LET_GO_S)
    if work.done() and not work.cancelled():
        work.exception()  # seen: nobody is left to be told


async def unless_gone(request: Request, run: Awaitable[bytes]) -> bytes | None:
    """What `run` returns, or None when the other side went away, which cancels it."""
    work = asyncio.ensure_future(run)
    async with reader(request.receive) as gone:
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            await end(work)


def event(name: str, data: bytes) -> bytes:
    """One event. `data` is JSON on one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _json(model: TokenEvent | RestartEvent) -> bytes:
    return model.model_dump_json().encode()
