"""The one interface through which processes are placed, and the frames they exchange.

A worker is a class living in its own process; its parent holds a handle and sends it requests.
Which machine, cores and threads it gets is the cluster's business, not the worker's.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec


class WorkerSpec(msgspec.Struct, frozen=True):
    """What to start and where.

    Attributes:
        name: for logs and messages, e.g. "engine-0".
        target: "module:Class". The class is called with (connection, **kwargs) and then `run()`.
        kwargs: msgpack-able keyword arguments.
        cores: CPU cores the process is pinned to; empty leaves it to the scheduler.
        threads: compute threads it may use (OMP, MKL); never more than the cores it owns.
        log_path: file its stdout and stderr are appended to; None inherits the parent's.
    """

    name: str
    target: str
    kwargs: dict[str, Any] = {}
    cores: tuple[int, ...] = ()
    threads: int = 1
    log_path: str | None = None


class Request(msgspec.Struct, frozen=True):
    """One request as the worker sees it."""

    id: int
    method: str
    payload: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        id: of the request.
        result: anything msgpack-able.
        error: (code, message) or None.
        more: this is a part, and the answer itself is still to come.
    """

    id: int
    result: Any = None
    error: tuple[str, str] | None = None
    more: bool = False


OnPart = Callable[[Any], None]
"""Called in the event loop with every part of an answer that is sent ahead of it."""
UNSENDABLE = "unsendable"
"""Code of a `WorkerFailure` for a request that never reached the worker: msgpack cannot hold it."""


class WorkerDied(Exception):
    """The process ended while requests were open, or before one was sent."""


class WorkerFailure(Exception):
    """The worker refused or failed one request; it goes on running."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Requests(Protocol):
    """Whatever answers requests: a worker, or several that act as one."""

    async def request(
        self, method: str, payload: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> Any:
        """See `WorkerHandle.request`."""
        ...


class WorkerHandle(Protocol):
    """The parent's end of a worker."""

    name: str
    pid: int

    @property
    def alive(self) -> bool: ...

    async def request(
        self,
        method: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        on_part: OnPart | None = None,
    ) -> Any:
        """Send one request and wait for its answer. Many may be open at once.

        Args:
            method: what the worker knows it by.
            payload: msgpack-able.
            timeout_s: longest wait for the answer; parts do not extend it.
            on_part: called in the event loop with every part of the answer that the worker sends
                ahead, in order; without it they are dropped. What it raises is raised here, and
                later parts are dropped.

        Raises:
            WorkerDied: the process ended.
            WorkerFailure: the worker answered with an error, or the payload is UNSENDABLE.
            TimeoutError: no answer within timeout_s.
        """
        ...

    async def wait_dead(self) -> None:
        """Return when the process has ended."""
        ...

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Close the connection, wait, then kill. Safe to repeat."""
        ...


class Cluster(Protocol):
    """Starts workers."""

    async def start(self, spec: WorkerSpec) -> WorkerHandle: ...

    async def close(self) -> None:
        """Stop every worker this cluster started."""
        ...
