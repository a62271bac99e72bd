"""Requests that wait for their answers, on the caller's side of a worker.

Handles of processes and of threads share it; it knows nothing of how replies travel.
"""

import asyncio
from typing import Any

from headrace.cluster.types import OnPart, Reply, WorkerFailure


class PendingRequests:
    """Futures by request id. Everything happens in one event loop."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[asyncio.Future[Any], OnPart | None]] = {}

    def open(self, request_id: int, on_part: OnPart | None = None) -> asyncio.Future[Any]:
        """A future of the answer. What `on_part` raises becomes its exception."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[request_id] = future, on_part
        return future

    def forget(self, request_id: int) -> None:
        """Nobody waits any more; what still comes is dropped."""
        self._open.pop(request_id, None)

    def take(self, reply: Reply) -> None:
        """A reply has come."""
        if reply.id not in self._open:
            return
        future, on_part = self._open[reply.id] if reply.more else self._open.pop(reply.id)
        if future.done():
            return
        if reply.more:
            if on_part is not None:
                try:
                    on_part(reply.result)
                except Exception as error:
                    future.set_exception(error)
        elif reply.error is not None:
            future.set_exception(WorkerFailure(*reply.error))
        else:
            future.set_result(reply.result)

    def fail_all(self, error: Exception) -> None:
        """No more replies will come."""
        for future, _ in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()
