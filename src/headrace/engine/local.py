"""An engine inside this process: the same worker loop in a thread, for tests and small tools."""

import asyncio
import contextlib
import queue
import threading
from typing import Any

import msgspec

from headrace.cluster.pending import PendingRequests
from headrace.cluster.types import OnPart, Reply, Request, WorkerFailure
from headrace.engine.client import (
    ANSWER_GRACE_S,
    LOAD_TIMEOUT_S,
    Watch,
    WorkerClient,
    generate_payload,
    refusal,
)
from headrace.engine.config import UpdatePolicy
from headrace.engine.core import EngineCore
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult, OnProgress
from headrace.engine.worker import EngineWorker
from headrace.errors import UserError


class _ThreadConnection:
    """A worker connection whose caller is an event loop of the same process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.closed = False
        self._loop = loop
        self._requests: queue.Queue[Request | None] = queue.Queue(limit)
        self._open = PendingRequests()
        self._next_id = 0

    # The loop's side.

    def send(
        self, method: str, payload: dict[str, Any], on_part: OnPart | None = None
    ) -> "asyncio.Future[Any]":
        self._next_id += 1
        try:
            self._requests.put_nowait(Request(self._next_id, method, payload))
        except queue.Full:
            raise EngineError(EngineError.OVERLOADED, "too many calls are open") from None
        return self._open.open(self._next_id, on_part)

    def hang_up(self) -> None:
        self.closed = True
        # A full queue means the worker is not idle, so nothing needs to wake it.
        with contextlib.suppress(queue.Full):
            self._requests.put_nowait(None)

    def end(self, error: Exception) -> None:
        """Fail everything open."""
        self.closed = True
        self._open.fail_all(error)

    # The worker's side.

    def poll(self, timeout_s: float) -> Request | None:
        try:
            if timeout_s <= 0:
                return self._requests.get_nowait()
            return self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def reply(self, request_id: int, result: Any = None, more: bool = False) -> None:
        self._send(Reply(request_id, result, None, more))

    def fail(self, request_id: int, code: str, message: str) -> None:
        self._send(Reply(request_id, None, (code, message)))

    def _send(self, reply: Reply) -> None:
        self._loop.call_soon_threadsafe(self._open.take, reply)


class LocalEngine(WorkerClient):
    """An engine in a thread of this process. Construct it inside a running event loop.

    Args:
        core: the engine; this client is its only driver from now on.
    """

    def __init__(self, core: EngineCore) -> None:
        super().__init__(version=core.version, max_context=core.config.max_context)
        self._loop = asyncio.get_running_loop()
        limit = 2 * (core.config.max_waiting + core.config.max_running) + 64
        self._connection = _ThreadConnection(self._loop, limit)
        self._worker = EngineWorker(self._connection, core=core)
        self._thread = threading.Thread(target=self._run, name=core.config.engine_id, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: Exception = EngineError(EngineError.CLOSED, "the engine is closed")
        try:
            self._worker.run()
        except Exception as crash:
            error = EngineError(EngineError.FAILED, f"the engine crashed: {crash!r}")
            error.__cause__ = crash
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._connection.end, error)

    async def _call(
        self,
        method: str,
        payload: dict[str, Any],
        timeout_s: float,
        on_part: OnPart | None = None,
    ) -> Any:
        if self._connection.closed:
            raise EngineError(EngineError.CLOSED, "the engine is closed")
        try:
            answer = self._connection.send(method, payload, on_part)
            async with asyncio.timeout(timeout_s):
                return await answer
        except WorkerFailure as failure:
            raise refusal(failure) from failure

    async def ask(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        """See `WorkerClient.ask`."""
        return await self._call(method, payload, timeout_s)

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        """See `EngineClient.generate`."""
        watch = None if on_progress is None else Watch(on_progress)
        payload = generate_payload(request, watch, timeout_s=request.timeout_s)
        timeout_s = request.timeout_s + ANSWER_GRACE_S
        try:
            result = await self._call("generate", payload, timeout_s, watch)
        except (EngineError, UserError):
            raise
        except BaseException:
            # Cancelled, or `on_progress` failed: the engine does not know.
            if not self._connection.closed:
                self._connection.send("abort", {"id": request.id})
            raise
        return msgspec.convert(result, GenerationResult)

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        """See `EngineCore.load_weights`."""
        payload = {"path": path, "version": version, "policy": policy}
        async with self._loading:
            await self._call("load_weights", payload, LOAD_TIMEOUT_S)
            self._version = version

    async def close(self) -> None:
        """Stop the thread after its present step. Open requests fail with CLOSED."""
        self._connection.hang_up()
        await asyncio.to_thread(self._thread.join, ANSWER_GRACE_S)
