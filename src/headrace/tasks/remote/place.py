"""Where a task service is served: at an address somebody else looks after, or in a process of ours.

A place says where to ask and notices when there is nobody any more. It knows nothing of tasks.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.cluster.types import Cluster, WorkerDied, WorkerFailure, WorkerHandle, WorkerSpec
from headrace.errors import UserError
from headrace.tasks.remote.client import Unreachable

WORKER = "headrace.tasks.serving.worker:TaskWorker"


class Place(Protocol):
    """See the module."""

    name: str
    """For messages."""

    async def locate(self) -> tuple[str, str | None]:
        """URL and token, once the service is there; starts it where that is this place's business.

        Raises:
            Unreachable: it cannot be started now.
            UserError: it can never be started like this.
        """
        ...

    async def gone(self) -> str:
        """Return when the service has ended, with how. Waits for ever where that is unknown."""
        ...

    async def reset(self) -> None:
        """End a service that does not answer, where that is this place's business."""
        ...

    async def close(self) -> None:
        """End what was started. Safe to repeat."""
        ...


class FixedPlace:
    """An address that somebody else looks after."""

    def __init__(self, url: str, token: str | None) -> None:
        self.name = url
        self._where = url, token

    async def locate(self) -> tuple[str, str | None]:
        """See `Place`."""
        return self._where

    async def gone(self) -> str:
        """See `Place`."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def reset(self) -> None:
        """See `Place`."""

    async def close(self) -> None:
        """See `Place`."""


class ProcessPlace:
    """A child process of this one, on loopback, with a token of its own.

    Args:
        name: of the task.
        arguments: of `TaskWorker`.
        cluster: starts it.
        log_path: takes its output; None leaves it with this process's.
        start_s: longest wait until it serves.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        cluster: Cluster,
        log_path: str | None,
        start_s: float,
    ) -> None:
        self.name = f"process of task {name}"
        self._spec = WorkerSpec(f"task-{name}", WORKER, dict(arguments), log_path=log_path)
        self._cluster = cluster
        self._start_s = start_s
        self._handle: WorkerHandle | None = None
        self._where = ("", None)

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._handle is None else self._handle.pid

    async def locate(self) -> tuple[str, str | None]:
        """See `Place`."""
        if self._handle is not None and self._handle.alive:
            return self._where
        await self.reset()
        self._handle = await self._cluster.start(self._spec)
        see = f"; see {self._spec.log_path}" if self._spec.log_path else ""
        try:
            url, token = await self._handle.request("serve", timeout_s=self._start_s)
        except WorkerFailure as failure:
            await self.reset()
            raise UserError(failure.message) from failure
        except WorkerDied as died:
            await self.reset()
            raise Unreachable(f"{self.name} ended before it served{see}") from died
        except TimeoutError as error:
            await self.reset()
            raise Unreachable(
                f"{self.name} did not serve within {self._start_s:g} s{see}"
            ) from error
        self._where = url, token
        return self._where

    async def gone(self) -> str:
        """See `Place`."""
        handle = self._handle
        if handle is not None:
            await handle.wait_dead()
        return f"{self.name} ended"

    async def reset(self) -> None:
        """See `Place`."""
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.stop()

    async def close(self) -> None:
        """See `Place`."""
        await self.reset()
