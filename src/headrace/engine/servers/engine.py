"""What all adapters of inference servers share: an `EngineClient` over HTTP.

A request is one HTTP call; deadlines, aborts, restarts after a weight update, version bounds
and what is counted are decided here. How a server is asked, and what it cannot do, is its adapter's
business (`vllm`, `sglang`, `remote`); how most take new weights is in `http_updates`. Nothing here
imports torch.
"""

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from headrace.engine.checks import check
from headrace.engine.config import UpdatePolicy
from headrace.engine.servers.answer import NOTHING, Answer
from headrace.engine.servers.checkpoint import ServedCheckpoint
from headrace.engine.servers.client import ServerClient
from headrace.engine.servers.process import ServerProcess
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    Progress,
)
from headrace.errors import UserError
from headrace.rollout.types import FinishReason, Span

ABORT_GRACE_S = 10.0
"""How long a request that was aborted or ran out of time may take to hand over its tokens."""
_ABORT_AGAIN_S = 0.5
"""An abort that arrives before its request finds nothing to end, so it is repeated."""


class Call:
    """A request between arrival and end.

    `oldest` and `newest` bound the versions that its tokens may be of. `again` says that a weight
    update ends it at the server and that it is to be asked again.
    """

    __slots__ = ("again", "early", "error", "newest", "oldest")

    def __init__(self) -> None:
        self.oldest = self.newest = 0
        self.early = asyncio.Event()
        self.error: EngineError | None = None
        self.again = False

    def widen(self, version: int) -> None:
        """Tokens may be of this version, too."""
        self.oldest = min(self.oldest, version)
        self.newest = max(self.newest, version)

    def end(self, error: EngineError | None = None) -> None:
        """End it early: as aborted, or with `error`."""
        self.error = self.error or error
        self.early.set()


class HttpEngine(ABC):
    """An inference server as an engine. `await start()` before use, `await close()` after.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000".
        checkpoint: directory of the weights it serves, as this machine sees it.
        name: of the server's make, for messages.
        engine_id: stamped on every span.
        version: stamp of the served weights; None takes what the server says, else 0.
        max_open: most requests in flight; one more is refused as overloaded.
        max_context: bounds the server's own limit; None takes that.
        api_key: sent as a bearer token.
        server: the process to start first and to stop at the end; None: the server runs already.
        ready_timeout_s: longest wait for that process to answer.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        checkpoint: ServedCheckpoint | None,
        name: str,
        engine_id: str = "engine-0",
        version: int | None = None,
        max_open: int = 1024,
        max_context: int | None = None,
        api_key: str | None = None,
        server: ServerProcess | None = None,
        ready_timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if max_open < 1:
            raise UserError(f"{name}: max_open is {max_open}; it must be >= 1")
        self.name = name
        self._checkpoint = checkpoint
        self._engine_id = engine_id
        self._asked_version = version
        self._asked_context = max_context
        self._max_open = max_open
        self.server = server
        self._ready_timeout_s = ready_timeout_s
        self.url = url.rstrip("/")
        self._http = ServerClient(
            url,
            name=name,
            # Control calls must get through while every generation is open.
            connections=max_open + 8,
            api_key=api_key,
            server=server,
            transport=transport,
        )
        self._max_context = 0
        self._vocab = 0
        self._version = self._newest = version or 0
        self._open: dict[str, Call] = {}
        self._loading = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._connected = self._closed = False
        self._broken: str | None = None
        self._counts: Counter[str] = Counter()
        self._last_pause_s = 0.0

    # -- what an adapter adds ----------------------------------------------------------------

    @abstractmethod
    async def _ready(self) -> bool:
        """Whether the server answers."""

    @abstractmethod
    async def _connect(self) -> tuple[int, int | None]:
        """Learn what the server serves and how.

        Returns:
            Its context, tokens, and its weights' stamp if it has one.

        Raises:
            UserError: it is set up so that it cannot serve as an engine.
        """

    @abstractmethod
    async def _stamp(self, version: int) -> None:
        """Tell the server what the weights it holds are called; it has not said so itself."""

    @abstractmethod
    def _unsupported(self, request: GenerationRequest) -> Iterator[str]:
        """What the server would ignore or do otherwise than `SamplingParams` says."""

    @abstractmethod
    async def _ask(
        self, key: str, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Answer:
        """Run one request at the server, which knows it as `key`, a text of fixed length."""

    @abstractmethod
    async def _abort_at_server(self, key: str) -> None:
        """End a request early. One that is not known there is no error."""

    @abstractmethod
    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        """See `EngineClient.load_weights`."""

    # -- the engine --------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """See `EngineClient.weight_version`."""
        return self._version

    @property
    def max_context(self) -> int:
        """See `EngineClient.max_context`; 0 before `start`."""
        return self._max_context

    async def start(self) -> None:
        """Start the server if it is this engine's own, wait until it answers, and connect.

        Raises:
            UserError: it cannot be started or reached, or cannot serve as an engine.
        """
        try:
            if self.server is not None:
                await self.server.start(self._ready, self._ready_timeout_s)
            context, version = await self._connect()
        except EngineError as error:
            raise UserError(str(error)) from error
        asked = self._asked_version
        if asked is not None and version is not None and asked != version:
            raise UserError(
                f"{self.name} at {self._http.url} holds weights stamped {version}, not {asked}; "
                "load the weights it should hold, or start it again"
            )
        self._version = self._newest = next(v for v in (asked, version, 0) if v is not None)
        if version is None:
            await self._stamp(self._version)
        if self._asked_context is not None and self._asked_context > context:
            raise UserError(
                f"max_context {self._asked_context}: {self.name} at {self._http.url} takes at most "
                f"{context} tokens"
            )
        self._max_context = self._asked_context or context
        # Without its checkpoint, the server has to say which ids it does not know.
        self._vocab = 1 << 31 if self._checkpoint is None else self._checkpoint.vocab_size
        self._connected = True

    async def answers(self) -> bool:
        """Whether the server is there."""
        return await self._ready()

    async def close(self) -> None:
        """See `EngineClient.close`. A server that this engine started is stopped."""
        if self._closed:
            return
        self._closed = True
        for call in self._open.values():
            call.end(EngineError(EngineError.CLOSED, "the engine is closed"))
        await self._http.close()
        if self.server is not None:
            await self.server.stop()

    async def stats(self) -> dict[str, Any]:
        """What this client counted since `start`, named as in `EngineStats`; plus "max_context"."""
        counted = {
            name: self._counts[name]
            for name in (
                "tokens_sampled",
                "tokens_reused",
                "requests_finished",
                "requests_failed",
                "requests_restarted",
                "updates",
            )
        }
        return counted | {
            "version": self._version,
            "running": len(self._open),
            "waiting": 0,
            "last_update_pause_s": self._last_pause_s,
            "max_context": self._max_context,
        }

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        call = self._open.get(request_id)
        if call is not None:
            call.end()

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        """See `EngineClient.generate`.

        Raises:
            EngineError: refused; INVALID also for what the server cannot do as documented.
        """
        self._admit(request)
        call = self._open[request.id] = Call()
        try:
            result = await self._run(request, call, on_progress)
        except EngineError:
            self._counts["requests_failed"] += 1
            raise
        finally:
            del self._open[request.id]
        self._counts["requests_finished"] += 1
        self._counts["tokens_sampled"] += sum(len(span.ids) for span in result.spans)
        self._counts["tokens_reused"] += result.reused_tokens
        return result

    def _admit(self, request: GenerationRequest) -> None:
        self._require_usable()
        if self._broken is not None:
            raise EngineError(EngineError.FAILED, self._broken)
        if request.id in self._open:
            raise EngineError(EngineError.INVALID, f"id {request.id!r} is in use")
        check(request, vocab=self._vocab, max_context=self._max_context)
        for problem in self._unsupported(request):
            raise EngineError(EngineError.INVALID, f"{self.name}: {problem}")
        if len(self._open) >= self._max_open:
            raise EngineError(
                EngineError.OVERLOADED,
                f"{len(self._open)} requests are open at {self.name}, the most allowed; retry "
                "later",
            )

    def _require_usable(self) -> None:
        if self._closed:
            raise EngineError(EngineError.CLOSED, "the engine is closed")
        if not self._connected:
            raise EngineError(EngineError.CLOSED, f"{self.name}: start() was not awaited")

    async def _run(
        self, request: GenerationRequest, call: Call, on_progress: OnProgress | None
    ) -> GenerationResult:
        arrived = time.monotonic()
        told = False

        def tell(progress: Progress) -> None:
            nonlocal told
            told = bool(progress.ids) or (told and not progress.restart)
            if on_progress is not None:
                on_progress(progress)

        while True:
            call.oldest = call.newest = self._version
            call.widen(self._newest)
            left = request.timeout_s - (time.monotonic() - arrived)
            watch = None if on_progress is None else tell
            answer, reason = await self._attempt(request, call, left, watch)
            if reason is not FinishReason.ABORTED or not call.again or call.early.is_set():
                break
            call.again = False
            self._counts["requests_restarted"] += 1
            if told:
                tell(Progress(request.id, (), (), (), self._version, restart=True))
            ended = await self._until_settled(call, arrived + request.timeout_s)
            if ended is not None:
                answer, reason = NOTHING, ended
                break
        if call.error is not None:
            raise call.error
        if reason is FinishReason.ABORTED and not call.early.is_set():
            raise EngineError(
                EngineError.FAILED,
                f"request {request.id!r}: {self.name} ended it without being asked to",
            )
        spans = answer.spans if answer.spans is not None else self._bounded(answer, call)
        if on_progress is not None and not told:
            _tell_all(request.id, spans, answer.raw_logprobs, on_progress)
        return GenerationResult(
            request.id,
            spans,
            reason,
            total_s=time.monotonic() - arrived,
            raw_logprobs=answer.raw_logprobs,
            alternatives=answer.alternatives,
            prompt_logprobs=answer.prompt_logprobs,
            prompt_alternatives=answer.prompt_alternatives,
            reused_tokens=answer.reused_tokens,
            drafted_tokens=answer.drafted_tokens,
            accepted_tokens=answer.accepted_tokens,
            preemptions=answer.preemptions,
            queue_s=answer.queue_s,
            stop=answer.stop,
        )

    def _bounded(self, answer: Answer, call: Call) -> tuple[Span, ...]:
        """One span that says as much of the version as is known."""
        if not answer.ids:
            return ()
        newest = call.newest if call.newest > call.oldest else None
        return (Span(answer.ids, answer.logprobs, call.oldest, self._engine_id, newest),)

    async def _attempt(
        self,
        request: GenerationRequest,
        call: Call,
        left_s: float,
        on_progress: OnProgress | None,
    ) -> tuple[Answer, FinishReason]:
        """Ask once; ends early when `call` does or the time is over."""
        key = secrets.token_hex(16)
        asked = asyncio.create_task(self._ask(key, request, on_progress))
        early = asyncio.create_task(call.early.wait())
        try:
            await asyncio.wait(
                {asked, early}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if asked.done():
                answer = asked.result()
                return answer, answer.reason
            reason = FinishReason.ABORTED if early.done() else FinishReason.DEADLINE
            answer = NOTHING if call.error is not None else await self._end(key, asked)
            # It may have come to its own end at the last moment.
            return answer, reason if answer.reason is FinishReason.ABORTED else answer.reason
        finally:
            early.cancel()
            if not asked.done():
                # Nobody waits for the tokens any more. Closing the connection would do with most
                # servers; saying so does with all.
                if not self._closed:
                    await asyncio.shield(self._give_up(key))
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineError):
                    await asked

    async def _give_up(self, key: str) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(ABORT_GRACE_S):
                await self._abort_at_server(key)

    async def _end(self, key: str, asked: "asyncio.Task[Answer]") -> Answer:
        """What the server sampled until it heard of the end; NOTHING if it is silent."""
        deadline = time.monotonic() + ABORT_GRACE_S
        while not asked.done() and (left := deadline - time.monotonic()) > 0:
            await self._give_up(key)
            await asyncio.wait({asked}, timeout=min(_ABORT_AGAIN_S, left))
        return asked.result() if asked.done() else NOTHING

    async def _until_settled(self, call: Call, deadline: float) -> FinishReason | None:
        """Wait for the update in progress; a reason if the request ends before that."""
        waits = [asyncio.create_task(event.wait()) for event in (self._settled, call.early)]
        try:
            await asyncio.wait(
                waits,
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()
        if call.early.is_set():
            return FinishReason.ABORTED
        return None if self._settled.is_set() else FinishReason.DEADLINE


def _tell_all(
    request_id: str, spans: tuple[Span, ...], raw: tuple[float, ...], on_progress: OnProgress
) -> None:
    start = 0
    for span in spans:
        end = start + len(span.ids)
        on_progress(
            Progress(request_id, span.ids, span.logprobs, raw[start:end], span.weight_version)
        )
        start = end
