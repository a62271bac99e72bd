"""An `EngineClient` without a model, whose tokens, pace and troubles a test decides."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    Progress,
)
from headrace.rollout.types import FinishReason, Span


class FakeEngine:
    """Samples 1, 2, 3, ... with logprob -id / 10 and raw logprob -id.

    Attributes:
        gate: while cleared, no token is sampled.
        refusal: raised instead of sampling.
        restart_after: every streamed request begins again after this many tokens, once.
        per_progress: tokens told together.
        started: ids of all requests that came, in order.
        cancelled: ids whose caller was cancelled.
    """

    def __init__(self, max_context: int = 64) -> None:
        self.max_context = max_context
        self.weight_version = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: Exception | None = None
        self.restart_after: int | None = None
        self.per_progress = 1
        self.started: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self._changed = asyncio.Event()
        self.loads: list[tuple[str, int, str]] = []
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.stats_gate = asyncio.Event()
        self.stats_gate.set()
        self.stats_error: Exception | None = None
        self.stats_calls = 0
        self.more_stats: dict[str, Any] = {}
        self._running: dict[str, asyncio.Event] = {}

    async def until(self, condition: Callable[[], object]) -> None:
        """Return when `condition` holds, which is looked at whenever something happened here."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        self.started.append(request.id)
        self.requests.append(request)
        self._changed.set()
        if self.refusal is not None:
            raise self.refusal
        self._running[request.id] = asyncio.Event()
        try:
            return await self._sample(request, on_progress)
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            self._changed.set()
            raise
        finally:
            del self._running[request.id]

    async def _sample(
        self, request: GenerationRequest, on_progress: OnProgress | None
    ) -> GenerationResult:
        limit = min(request.sampling.max_tokens, self.max_context - len(request.prompt_ids))
        ids: list[int] = []
        aborted = self._running[request.id]
        restart, told = self.restart_after, 0
        reason = FinishReason.LENGTH
        while len(ids) < limit:
            await self._open_gate(aborted)
            if aborted.is_set():
                reason = FinishReason.ABORTED
                break
            ids.append(len(ids) + 1)
            if on_progress and (len(ids) - told >= self.per_progress or len(ids) == limit):
                on_progress(_progress(request.id, ids[told:], self.weight_version))
                told = len(ids)
                if restart is not None and told >= restart:
                    restart, told, ids = None, 0, []
                    on_progress(_progress(request.id, [], self.weight_version, restart=True))
        spans = (Span(tuple(ids), _logprobs(ids), self.weight_version, "fake"),) if ids else ()
        scored = request.sampling.prompt_logprobs is not None
        return GenerationResult(
            request.id,
            spans,
            reason,
            queue_s=0.001,
            total_s=0.002,
            raw_logprobs=tuple(-float(i) for i in ids),
            alternatives=tuple(((i, -1.0), (0, -math.inf)) for i in ids)
            if request.sampling.logprobs
            else (),
            prompt_logprobs=(math.nan, *(-2.0 for _ in request.prompt_ids[1:])) if scored else (),
        )

    async def _open_gate(self, aborted: asyncio.Event) -> None:
        if self.gate.is_set() or aborted.is_set():
            await asyncio.sleep(0)
            return
        waits = [asyncio.create_task(event.wait()) for event in (self.gate, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    async def load_weights(self, path: str, version: int, policy: str = "continue") -> None:
        self.loads.append((path, version, policy))
        self._changed.set()
        await self.load_gate.wait()
        if self.refusal is not None:
            raise self.refusal
        self.weight_version = version
        self._changed.set()

    async def stats(self) -> dict[str, Any]:
        self.stats_calls += 1
        await self.stats_gate.wait()
        if self.stats_error is not None:
            raise self.stats_error
        return {
            "version": self.weight_version,
            "running": len(self._running),
            "waiting": 0,
            "updates": len(self.loads),
            "last_update_pause_s": 0.25,
            "update_bytes": 7,
            "tokens_sampled": 12,
            "busy_s": 1.5,
            "restarts": 3,
            "pid": 1,
            **self.more_stats,
        }

    async def close(self) -> None:
        self.refusal = EngineError(EngineError.CLOSED, "closed")


def _logprobs(ids: list[int]) -> tuple[float, ...]:
    return tuple(-i / 10 for i in ids)


def _progress(name: str, ids: list[int], version: int, *, restart: bool = False) -> Progress:
    raw = tuple(-float(i) for i in ids)
    return Progress(name, tuple(ids), _logprobs(ids), raw, version, restart)
