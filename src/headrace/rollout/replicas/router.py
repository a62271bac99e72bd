"""Several engines as one: requests go where their session's prefix is, and outlive any replica.

The router is an `EngineClient` over replicas. It watches each by heartbeats, takes a faulty one out
of service, ends it and starts it again with the present weights, waiting longer each time. A
request that was in flight there goes on elsewhere: what it had already been told of its output is
kept, and the next replica continues behind it, with the same draws; where that cannot be done
exactly, those tokens are dropped and counted, and nobody trains on them.

Who goes where is decided in `routing`, who is dead in `health`; this module waits and acts.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from headrace.engine.config import UpdatePolicy
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    Progress,
)
from headrace.rollout.replicas.health import HealthPolicy
from headrace.rollout.replicas.pool import CANCEL_S, ReplicaPool
from headrace.rollout.replicas.replica import Replica, StartReplica, Weights
from headrace.rollout.replicas.resuming import Received
from headrace.rollout.replicas.routing import RoutingTable


class _Flight:
    """A request between its arrival and its end."""

    def __init__(self) -> None:
        self.aborted = False
        self.replica: Replica | None = None


class Router:
    """See the module. Construct it in a running event loop, `add` replicas, then `ready`.

    Args:
        weights: what replicas start with.
        policy: when a replica counts as dead.
        table: where sessions go.
        retries: how often one request is taken elsewhere before it fails.
        clock: monotonic seconds.
        report: told, in words for people, when a replica fails and when it is back.

    Attributes:
        counters: faults by kind, retries, and tokens resumed and dropped by reason.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        policy: HealthPolicy | None = None,
        table: RoutingTable | None = None,
        retries: int = 5,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._table = table or RoutingTable()
        self._pool = ReplicaPool(weights, policy or HealthPolicy(), self._table, clock, report)
        self.counters = self._pool.counters
        self._retries = retries
        self._clock = clock
        self._flights: dict[str, _Flight] = {}

    # -- EngineClient ---------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Version that every replica in service has."""
        return self._pool.weights.version

    @property
    def max_context(self) -> int:
        """Of the replicas, the smallest."""
        return self._pool.max_context

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> GenerationResult:
        """See `EngineClient.generate`. Survives the death of replicas.

        Raises:
            EngineError: refused by a replica (INVALID, TOO_LONG), by all of them (OVERLOADED), or
                FAILED after `retries` replicas failed under it, CLOSED.
        """
        if request.id in self._flights:
            raise EngineError(EngineError.INVALID, f"id {request.id!r} is in use")
        flight = self._flights[request.id] = _Flight()
        try:
            return await self._carry(request, flight, on_progress)
        finally:
            del self._flights[request.id]
            if not request.session:
                self.release(request.id)

    def _session(self, request: GenerationRequest) -> str:
        """What the request is routed by; one without a session is a session of its own."""
        return request.session or request.id

    async def _carry(
        self,
        request: GenerationRequest,
        flight: _Flight,
        on_progress: Callable[[Progress], None] | None,
    ) -> GenerationResult:
        began = self._clock()
        received = Received(request, on_progress)
        refused: set[str] = set()
        session = self._session(request)
        problem, failures = "no replica served it", 0
        while failures <= self._retries:
            left = request.timeout_s - (self._clock() - began)
            ended = received.end(aborted=flight.aborted, expired=left <= 0)
            if ended is not None:
                return received.without_engine(ended, self._clock() - began)
            replica = await self._pool.find(session, refused, left)
            if replica is None:
                continue
            flight.replica = replica
            try:
                result = await self._attempt(replica, received, left)
            except EngineError as error:
                if error.code == EngineError.OVERLOADED:
                    refused.add(replica.name)
                    if refused >= set(self._table.names):
                        raise
                    continue
                if error.code not in (EngineError.FAILED, EngineError.CLOSED):
                    raise
                problem, failures = str(error), failures + 1
                refused = {replica.name}
                self.counters["retried"] += 1
                self.counters.update(received.lose(self._newest(replica)))
                continue
            return received.complete(result, self._clock() - began)
        raise EngineError(
            EngineError.FAILED,
            f"request {request.id!r} was tried {failures} times; the last one: {problem}",
        )

    def _newest(self, lost: Replica) -> int:
        """Version that the next replica will have at least."""
        versions = [replica.version for replica in self._pool.serving if replica is not lost]
        return min(versions, default=self.weight_version)

    async def _attempt(self, replica: Replica, received: Received, left: float) -> GenerationResult:
        """Let one replica go on with the request, as long as it lives.

        Raises:
            EngineError: as the engine raised it; FAILED when the replica was taken out of service.
        """
        engine, fault = replica.engine, replica.fault
        assert engine is not None, "the table holds living replicas only"
        assert fault is not None
        self._pool.begin(replica)
        task = asyncio.create_task(
            engine.generate(received.rest(left), received.listener(replica.name))
        )
        try:
            await asyncio.wait({task, fault}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError(
                    EngineError.FAILED, f"replica {replica.name} was given up: {fault.result()}"
                )
            return task.result()
        except EngineError as error:
            if error.code in (EngineError.FAILED, EngineError.CLOSED):
                self._pool.failed(replica, error)
            raise
        finally:
            await self._pool.end(replica)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_S)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.aborted = True
        if flight.replica is not None and flight.replica.engine is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self._pool.policy.beat_timeout_s):
                    await flight.replica.engine.abort(request_id)

    async def load_weights(
        self,
        path: str,
        version: int,
        policy: UpdatePolicy = "continue",
        *,
        checkpoint: str | None = None,
    ) -> None:
        """See `ReplicaPool.load_weights`."""
        await self._pool.load_weights(path, version, policy, checkpoint=checkpoint)

    async def stats(self) -> dict[str, Any]:
        """See `ReplicaPool.stats`; and "replicas", what each is doing, "serving", how many do."""
        return {
            **await self._pool.stats(),
            "version": self.weight_version,
            "max_context": self.max_context,
            "imbalance": self._table.imbalance(),
            "serving": len(self._pool.serving),
            "replicas": self.replicas(),
            "restarts": sum(replica["restarts"] for replica in self.replicas()),
            "counters": dict(self.counters),
        }

    async def close(self) -> None:
        """End all replicas. Open requests fail with CLOSED. Safe to repeat."""
        await self._pool.close()

    # -- replicas -------------------------------------------------------------------------------

    def add(self, name: str, start: StartReplica, *, weight: int = 1) -> None:
        """See `ReplicaPool.add`."""
        self._pool.add(name, start, weight=weight)

    async def remove(self, name: str, *, grace_s: float = 0.0) -> None:
        """See `ReplicaPool.remove`."""
        await self._pool.remove(name, grace_s=grace_s)

    def drain(self, name: str) -> None:
        """See `ReplicaPool.drain`."""
        self._pool.drain(name)

    async def ready(self, count: int = 1, *, timeout_s: float | None = None) -> None:
        """See `ReplicaPool.ready`."""
        await self._pool.ready(count, timeout_s=timeout_s)

    def replicas(self) -> list[dict[str, Any]]:
        """See `ReplicaPool.describe`."""
        return self._pool.describe()

    @property
    def moved(self) -> int:
        """Sessions that were sent elsewhere than at their last turn, so far."""
        return self._table.moved

    def release(self, session: str) -> None:
        """The session has ended: it counts no longer for its replica."""
        self._table.release(session)
