"""Two engines that act as one: one computes long prompts, the other one samples.

A prompt computed beside running requests slows every one of them down. Here the sampling engine is
given the prompt's keys and values by the other one, on cores of its own, and computes the rest: its
last token and what was too little to be worth the way. All tokens, logprobs and versions are the
sampling engine's, so that they are what it would say without the other one; whatever goes wrong
with that one costs time and never a request.

It knows neither torch nor what is in the files it passes on.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from headrace.engine.cache.handover import HandoverFiles, Prefilled
from headrace.engine.client import ANSWER_GRACE_S
from headrace.engine.config import UpdatePolicy
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    PolicyEngine,
)
from headrace.errors import UserError
from headrace.rollout.types import FinishReason

MIN_TOKENS = 64
"""Prompts that lack fewer tokens are left to the sampling engine."""
_FALLS_BACK = (EngineError.CLOSED, EngineError.FAILED)


class RoleEngine(PolicyEngine, Protocol):
    """One of the two: an `EngineWorker`'s client."""

    async def start(self) -> None: ...

    async def ask(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        """See `WorkerClient.ask`."""
        ...


class SplitEngine:
    """See the module. An `EngineClient` over two others, which it closes.

    Attributes:
        handed_over: requests whose prompt the sampling engine did not have to compute.
        kept: requests that lacked fewer than `min_tokens`, or whose prompt has to be scored.
        fell_back: requests that the sampling engine computed because the other one could not.

    Args:
        prefill: computes prompts. Its configuration has the same cache layout, weights and context
            as the other one's.
        decode: samples.
        min_tokens: prompt tokens missing in the sampling engine from which on a prompt is computed
            by the other one.

    Raises:
        ValueError: min_tokens below 1.
    """

    def __init__(
        self, prefill: RoleEngine, decode: RoleEngine, *, min_tokens: int = MIN_TOKENS
    ) -> None:
        if min_tokens < 1:
            raise ValueError(f"min_tokens is {min_tokens}; it must be >= 1")
        self._prefill = prefill
        self._decode = decode
        self._min_tokens = min_tokens
        self._files = HandoverFiles()
        self._closed = False
        self._loading = asyncio.Lock()
        # By request id, all that run; a task while its prompt is prepared.
        self._open: dict[str, asyncio.Task[Prefilled] | None] = {}
        self._aborted: set[str] = set()
        # Prompts on their way: several requests with one prompt need it only once.
        self._under_way: dict[tuple[int, ...], asyncio.Future[bool]] = {}
        self.handed_over = 0
        self.kept = 0
        self.fell_back = 0

    @property
    def weight_version(self) -> int:
        """See `EngineClient.weight_version`: what is sampled from."""
        return self._decode.weight_version

    @property
    def max_context(self) -> int:
        """See `EngineClient.max_context`."""
        return self._decode.max_context

    async def start(self) -> None:
        """Start both; see `ProcessEngine.start`."""
        await asyncio.gather(self._prefill.start(), self._decode.start())

    async def close(self) -> None:
        """Stop both. Open requests fail with CLOSED. Safe to repeat."""
        self._closed = True
        await asyncio.gather(self._prefill.close(), self._decode.close())
        self._files.close()

    async def stats(self) -> dict[str, Any]:
        """The sampling engine's, and "prefill_engine": the other one's, or None while it is down;
        "handed_over", "kept" and "fell_back" as the attributes."""
        own, other = await asyncio.gather(self._decode.stats(), self._prefill_stats())
        return {
            **own,
            "prefill_engine": other,
            "handed_over": self.handed_over,
            "kept": self.kept,
            "fell_back": self.fell_back,
        }

    async def _prefill_stats(self) -> dict[str, Any] | None:
        try:
            return await self._prefill.ask("stats", {}, ANSWER_GRACE_S)
        except EngineError:
            return None

    async def load_weights(
        self,
        path: str,
        version: int,
        policy: UpdatePolicy = "continue",
        *,
        checkpoint: str | None = None,
    ) -> None:
        """See `ProcessEngine.load_weights`; both at once. If only the engine that computes prompts
        cannot load them, the other one does without it until the next update.

        Raises:
            UserError: the weights cannot be read or do not fit.
            EngineError: INVALID version or policy, CLOSED or FAILED.
        """
        async with self._loading:
            _, error = await asyncio.gather(
                self._prefill_load(path, version, policy, checkpoint),
                _outcome(self._decode.load_weights(path, version, policy, checkpoint=checkpoint)),
            )
        if error is not None:
            raise error

    async def _prefill_load(
        self, path: str, version: int, policy: UpdatePolicy, checkpoint: str | None
    ) -> None:
        # Versions that differ say enough: it is asked for nothing then.
        await _outcome(self._prefill.load_weights(path, version, policy, checkpoint=checkpoint))

    # -- requests -------------------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if request_id not in self._open:
            return
        self._aborted.add(request_id)
        preparing = self._open[request_id]
        if preparing is None:
            await self._decode.abort(request_id)
        else:
            preparing.cancel()

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        """See `EngineClient.generate`. Survives the death of either engine.

        Raises:
            EngineError: refused, or FAILED when the sampling engine keeps dying.
        """
        if self._closed:
            raise EngineError(EngineError.CLOSED, "the engine is closed")
        if request.id in self._open:
            raise EngineError(EngineError.INVALID, f"id {request.id!r} is in use")
        arrived = time.monotonic()
        preparing = asyncio.create_task(self._prepare(request, arrived + request.timeout_s))
        self._open[request.id] = preparing
        try:
            prepared = await _unless_cancelled(preparing)
            elapsed = time.monotonic() - arrived
            if request.id in self._aborted or prepared is None:
                return _empty(request.id, FinishReason.ABORTED, elapsed)
            self._open[request.id] = None
            left = request.timeout_s - elapsed
            if left <= 0:
                return _empty(request.id, FinishReason.DEADLINE, elapsed)
            remaining = msgspec.structs.replace(request, timeout_s=left)
            result = await self._decode.generate(remaining, on_progress)
        finally:
            del self._open[request.id]
            self._aborted.discard(request.id)
        if prepared.handover is None:
            return msgspec.structs.replace(
                result, queue_s=result.queue_s + elapsed, total_s=result.total_s + elapsed
            )
        return msgspec.structs.replace(
            result,
            queue_s=prepared.queue_s,
            total_s=result.total_s + elapsed,
            # Not what the other engine computed for this request.
            reused_tokens=min(result.reused_tokens, prepared.reused_tokens),
        )

    async def _prepare(self, request: GenerationRequest, deadline: float) -> Prefilled:
        """Bring the prompt to the sampling engine if that is worth it and possible.

        Returns:
            With a handover if there was one; its file is gone. "reused_tokens" counts what either
            engine held, "queue_s" from the arrival of the request.

        Raises:
            EngineError: refused, or too much waits already.
        """
        nothing = Prefilled(None)
        prompt = request.prompt_ids
        if len(prompt) <= self._min_tokens or request.sampling.prompt_logprobs is not None:
            self.kept += 1
            return nothing
        while (same := self._under_way.get(prompt)) is not None:
            await asyncio.wait((same,), timeout=max(0.0, deadline - time.monotonic()))
            if not same.done():
                return nothing
            if same.result():
                self.handed_over += 1
                return nothing
        done = self._under_way[prompt] = asyncio.get_running_loop().create_future()
        prepared = nothing
        try:
            prepared = await self._hand_over(request, deadline)
        except EngineError as error:
            if error.code not in _FALLS_BACK:
                raise
            self.fell_back += 1
        finally:
            done.set_result(prepared.handover is not None)
            del self._under_way[prompt]
        return prepared

    async def _hand_over(self, request: GenerationRequest, deadline: float) -> Prefilled:
        began = time.monotonic()
        if self._prefill.weight_version != self._decode.weight_version:
            self.fell_back += 1
            return Prefilled(None)
        ids = request.prompt_ids
        answer = await self._decode.ask("held", {"ids": ids}, _left(deadline))
        held: int = answer["tokens"]
        if len(ids) - held < self._min_tokens:
            self.kept += 1
            return Prefilled(None)
        with self._files.file() as path:
            asked = time.monotonic()
            prefilled = await self._compute(request, held, str(path), deadline)
            if prefilled.handover is None:
                self.fell_back += 1
                return prefilled
            payload = {"ids": ids, "handover": msgspec.to_builtins(prefilled.handover)}
            answer = await self._decode.ask("adopt", payload, _left(deadline))
        if answer["tokens"] <= held:
            self.fell_back += 1
            return Prefilled(None)
        self.handed_over += 1
        return msgspec.structs.replace(
            prefilled,
            reused_tokens=max(held, prefilled.reused_tokens),
            queue_s=asked - began + prefilled.queue_s,
        )

    async def _compute(
        self, request: GenerationRequest, first: int, path: str, deadline: float
    ) -> Prefilled:
        """Have the prompt computed and written from position `first` on."""
        # Whoever is too late is told so by that engine.
        left = max(1e-3, deadline - time.monotonic())
        asked = msgspec.structs.replace(request, timeout_s=left)
        payload = {"request": msgspec.to_builtins(asked), "first": first, "path": path}
        try:
            answer = await self._prefill.ask("prefill", payload, _left(deadline))
        except asyncio.CancelledError:
            # Answered once nothing can be written any more.
            with contextlib.suppress(EngineError, UserError):
                await asyncio.shield(self._prefill.ask("abort", {"id": request.id}, ANSWER_GRACE_S))
            raise
        return msgspec.convert(answer, Prefilled)


async def _unless_cancelled(task: asyncio.Task[Prefilled]) -> Prefilled | None:
    """The task's result, None if it was cancelled, but not if its caller was."""
    try:
        return await task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        return None


async def _outcome(loading: Awaitable[None]) -> Exception | None:
    """Await it; its error if it is one that engines report."""
    try:
        await loading
    except (EngineError, UserError) as error:
        return error
    return None


def _left(deadline: float) -> float:
    """Seconds to wait for an answer: an engine that is silent for longer is hung."""
    return max(0.0, deadline - time.monotonic()) + ANSWER_GRACE_S


def _empty(request_id: str, reason: FinishReason, elapsed_s: float) -> GenerationResult:
    return GenerationResult(request_id, (), reason, queue_s=elapsed_s, total_s=elapsed_s)
