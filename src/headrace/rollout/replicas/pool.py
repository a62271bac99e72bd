"""Engines that are looked after: started, watched by heartbeats, ended when faulty, started again.

The pool keeps the routing table to those that serve and wakes whoever waits when that changes. What
makes a replica faulty is decided in `health`, where sessions go in `routing`.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.engine.config import UpdatePolicy
from headrace.engine.types import EngineClient, EngineError
from headrace.errors import UserError
from headrace.rollout.replicas.health import Fault, Health, HealthPolicy, backoff
from headrace.rollout.replicas.replica import ZERO, Replica, StartReplica, Weights
from headrace.rollout.replicas.routing import NoReplica, RoutingTable

_log = logging.getLogger(__name__)

_CLOSE_S = 20.0
"""Longest wait for a replica to end."""
CANCEL_S = 5.0
"""Longest wait for a request that was given up."""


_WORDS = {
    Fault.START: "did not start",
    Fault.BEATS: "does not answer",
    Fault.STUCK: "computes nothing",
    Fault.ERRORS: "fails too many requests",
    Fault.DIED: "died",
    Fault.VERSION: "has other weights than it should",
}


def _is_death(problem: Exception) -> bool:
    """Whether a replica did not refuse something but is gone."""
    return isinstance(problem, EngineError) and problem.code in (
        EngineError.CLOSED,
        EngineError.FAILED,
    )


class ReplicaPool:
    """See the module. Construct it in a running event loop.

    Args:
        weights: what replicas start with.
        policy: when a replica counts as dead.
        table: where sessions go.
        clock: monotonic seconds.
        report: told, in words for people, when a replica fails and when it is back.

    Attributes:
        counters: faults by kind, and what a router counts.
        weights: what replicas are to serve now.
        max_context: of the replicas that served so far, the smallest.
    """

    def __init__(
        self,
        weights: Weights,
        policy: HealthPolicy,
        table: RoutingTable,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.weights = weights
        self.max_context = 0
        self.policy = policy
        self._table = table
        self._clock = clock
        self._report = report or _log.warning
        # What engines had counted that are gone.
        self._retired: Counter[str] = Counter()
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._closing = asyncio.Event()

    @property
    def serving(self) -> list[Replica]:
        """Replicas that have an engine."""
        return [replica for replica in self._replicas.values() if replica.engine is not None]

    async def stats(self) -> dict[str, Any]:
        """Sums over the engines in service; what only rises includes those that are gone.

        An engine that does not answer in time counts with what it last said.
        """
        present: Counter[str] = Counter(ZERO)

        async def ask(replica: Replica, engine: EngineClient) -> None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self.policy.beat_timeout_s):
                    numbers = await engine.stats()
                if replica.engine is engine:
                    present.update(replica.heard(numbers))

        await asyncio.gather(*(ask(r, r.engine) for r in self.serving if r.engine is not None))
        total = present
        for counted in (self._retired, *(r.counted for r in self._replicas.values())):
            total.update(counted)
        return dict(total)

    async def find(self, session: str, refused: set[str], left_s: float) -> Replica | None:
        """The replica for a session; None when there was none within the time left.

        Args:
            refused: replicas to pass over; emptied when no other is left.

        Raises:
            EngineError: CLOSED.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s), self._changed:
                while True:
                    if self._closing.is_set():
                        raise EngineError(EngineError.CLOSED, "the router is closed")
                    with contextlib.suppress(NoReplica):
                        return self._replicas[self._table.assign(session, without=refused)]
                    if refused:
                        refused.clear()
                    else:
                        await self._changed.wait()
        return None

    def begin(self, replica: Replica) -> None:
        """A request goes to the replica."""
        self._table.begin(replica.name)

    async def end(self, replica: Replica) -> None:
        """It came back, or was given up."""
        self._table.end(replica.name)
        if replica.leaving:
            await self._notify()

    def failed(self, replica: Replica, error: EngineError) -> None:
        """A request failed through the replica's fault: count it, or see that it is dead."""
        if error.code == EngineError.CLOSED:
            self._condemn(replica, Fault.DIED)
        elif replica.fault is not None and not replica.fault.done() and replica.health:
            found = replica.health.failed(self._clock())
            if found is not None:
                self._condemn(replica, found)

    async def load_weights(
        self,
        path: str,
        version: int,
        policy: UpdatePolicy = "continue",
        *,
        checkpoint: str | None = None,
    ) -> None:
        """Give all replicas other weights; one that cannot take them is started again with them.

        Args:
            path, version, policy: see `EngineClient.load_weights`.
            checkpoint: directory of the same weights for replicas that start later; None is `path`.

        Raises:
            UserError, EngineError: all replicas refused them; the old ones stay. Replicas that
                died start again with the new ones.
        """
        async with self._loading:
            serving = [r for r in self._replicas.values() if r.engine is not None]
            before = self.weights
            # Whoever starts from here on starts with these.
            self.weights = Weights(checkpoint or path, version)
            for replica in serving:
                replica.loading = True
            try:
                outcomes = await asyncio.gather(
                    *(self._load(replica, path, version, policy) for replica in serving)
                )
            finally:
                for replica in serving:
                    replica.loading = False
            problems = [outcome for outcome in outcomes if outcome is not None]
            if serving and len(problems) == len(serving) and not any(map(_is_death, problems)):
                self.weights = before
                raise problems[0]
            for replica, outcome in zip(serving, outcomes, strict=True):
                if outcome is not None:
                    self._report(f"{replica.name} did not load version {version}: {outcome}")
                    self._condemn(replica, Fault.VERSION)

    async def _load(
        self, replica: Replica, path: str, version: int, policy: UpdatePolicy
    ) -> Exception | None:
        engine, fault = replica.engine, replica.fault
        assert engine is not None
        assert fault is not None
        task = asyncio.create_task(engine.load_weights(path, version, policy))
        await asyncio.wait({task, fault}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            return EngineError(EngineError.CLOSED, f"replica {replica.name} is gone")
        problem = task.exception()
        if problem is None:
            replica.version = version
            return None
        if isinstance(problem, EngineError | UserError):
            return problem
        raise problem

    async def close(self) -> None:
        """End all replicas. Open requests fail with CLOSED. Safe to repeat."""
        self._closing.set()
        for replica in self._replicas.values():
            replica.leaving = True
            self._condemn(replica, Fault.DIED)
        await self._notify()
        tasks = [r.task for r in self._replicas.values() if r.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=2 * _CLOSE_S)
            for task in late:
                task.cancel()
        self._replicas.clear()

    # -- members --------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """What each replica is doing, for people and metrics."""
        return [
            {
                "name": replica.name,
                "state": replica.state,
                "weight": replica.weight,
                "version": replica.version,
                "sessions": self._table.sessions(name) if name in self._table else 0,
                "requests": self._table.requests(name) if name in self._table else 0,
                "restarts": replica.restarts,
                "last_fault": replica.last_fault,
                "pid": getattr(replica.engine, "pid", None),
            }
            for name, replica in self._replicas.items()
        ]

    def add(self, name: str, start: StartReplica, *, weight: int = 1) -> None:
        """Start a replica beside the others; it takes sessions once it is up.

        Raises:
            ValueError: the name is taken, or the weight is below 1.
        """
        if name in self._replicas:
            raise ValueError(f"replica {name!r} exists already")
        if weight < 1:
            raise ValueError(f"replica {name!r} has weight {weight}; it must be at least 1")
        replica = self._replicas[name] = Replica(name, start, weight)
        replica.task = asyncio.create_task(self._look_after(replica), name=f"replica {name}")

    async def ready(self, count: int = 1, *, timeout_s: float | None = None) -> None:
        """Wait until so many replicas serve.

        Raises:
            UserError: none serves and none can be started, through a mistake of the user.
            EngineError: CLOSED when they did not within `timeout_s` (None: the policy's time for a
                start), with what the others are doing.
        """
        limit = self.policy.start_timeout_s if timeout_s is None else timeout_s

        def enough() -> bool:
            return len(self._table.names) >= count

        try:
            async with asyncio.timeout(limit), self._changed:
                await self._changed.wait_for(lambda: enough() or self._mistake() is not None)
            mistake = None if enough() else self._mistake()
            if mistake is not None:
                raise mistake
        except TimeoutError:
            raise EngineError(
                EngineError.CLOSED,
                f"{len(self._table.names)} of {count} replicas serve after {limit:g} s: "
                + ", ".join(
                    f"{r.name} {r.state} (last fault: {r.last_fault})"
                    for r in self._replicas.values()
                ),
            ) from None

    def _mistake(self) -> UserError | None:
        """What keeps every replica from starting, if that is the user's to mend."""
        problems = [replica.problem for replica in self._replicas.values()]
        if not problems or not all(isinstance(problem, UserError) for problem in problems):
            return None
        assert isinstance(problems[0], UserError)
        return problems[0]

    def drain(self, name: str) -> None:
        """Give a replica no new sessions.

        Raises:
            KeyError: no such replica is in service.
        """
        self._table.drain(name)

    async def remove(self, name: str, *, grace_s: float = 0.0) -> None:
        """Take a replica out for good: no new sessions, then `grace_s` for requests in flight.

        What is not done by then goes on elsewhere.

        Raises:
            KeyError: no such replica.
        """
        replica = self._replicas[name]
        replica.leaving = True
        if name in self._table:
            self._table.drain(name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s), self._changed:
                    await self._changed.wait_for(lambda: not self._busy(name))
        self._condemn(replica, Fault.DIED)
        if replica.task is not None:
            await asyncio.wait({replica.task}, timeout=2 * _CLOSE_S)
        self._replicas.pop(name, None)

    def _busy(self, name: str) -> bool:
        return name in self._table and self._table.requests(name) > 0

    def release(self, session: str) -> None:
        """The session has ended: it counts no longer for its replica."""
        self._table.release(session)

    def _condemn(self, replica: Replica, fault: Fault) -> None:
        """End a replica's present life; nobody is sent there from now on."""
        if replica.fault is not None and not replica.fault.done():
            replica.fault.set_result(fault)
        if replica.name in self._table:
            self._table.remove(replica.name)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- one replica ----------------------------------------------------------------------------

    async def _look_after(self, replica: Replica) -> None:
        """Life after life, until it is to leave."""
        while not replica.leaving:
            began = self._clock()
            fault = await self._live(replica)
            if replica.leaving:
                return
            replica.last_fault = fault
            self.counters[f"fault.{fault}"] += 1
            if self._clock() - began > self.policy.backoff_most_s:
                replica.failures = 0
            replica.failures += 1
            wait = backoff(self.policy, replica.failures)
            self._report(f"{replica.name} {_WORDS[fault]}; starts again in {wait:.1f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._closing.wait()
            replica.restarts += 1

    async def _live(self, replica: Replica) -> Fault:
        """From start to end; returns why it ended."""
        weights = self.weights
        try:
            async with asyncio.timeout(self.policy.start_timeout_s):
                engine = await replica.start(weights.checkpoint, weights.version)
        except (EngineError, UserError, OSError, TimeoutError) as error:
            _log.warning("replica %s did not start: %s", replica.name, error)
            replica.problem = error
            await self._notify()
            return Fault.START
        try:
            async with self._loading:
                if weights != self.weights:
                    weights = self.weights
                    await engine.load_weights(weights.checkpoint, weights.version)
                await self._enter(replica, engine, weights.version)
            return await self._watch(replica, engine)
        except (EngineError, UserError, TimeoutError) as error:
            _log.warning("replica %s: %s", replica.name, error)
            return Fault.START
        finally:
            await self._leave(replica, engine)

    async def _enter(self, replica: Replica, engine: EngineClient, version: int) -> None:
        replica.health = Health(self.policy, self._clock())
        replica.fault = asyncio.get_running_loop().create_future()
        replica.version, replica.engine, replica.problem = version, engine, None
        contexts = [r.engine.max_context for r in self._replicas.values() if r.engine is not None]
        self.max_context = min(contexts)
        self._table.add(replica.name, replica.weight)
        if replica.leaving:
            self._condemn(replica, Fault.DIED)
        elif replica.restarts:
            self._report(f"{replica.name} serves again, version {version}")
        await self._notify()

    async def _leave(self, replica: Replica, engine: EngineClient) -> None:
        """Out of the table first, so that nobody is sent to what is being ended."""
        self._condemn(replica, Fault.DIED)
        replica.engine = None
        self._retired.update(replica.counted)
        replica.counted.clear()
        await self._notify()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await engine.close()
        except (EngineError, OSError, TimeoutError) as error:
            _log.warning("replica %s did not end: %r", replica.name, error)

    async def _watch(self, replica: Replica, engine: EngineClient) -> Fault:
        """Heartbeats until something is wrong."""
        fault, health = replica.fault, replica.health
        assert fault is not None
        assert health is not None
        while True:
            await asyncio.wait({fault}, timeout=self.policy.beat_interval_s)
            if fault.done():
                return fault.result()
            if replica.loading:
                continue  # An update may take as long as it likes; its caller has a deadline.
            found: Fault | None
            try:
                async with asyncio.timeout(self.policy.beat_timeout_s):
                    numbers = await engine.stats()
            except TimeoutError:
                found = None if replica.loading else health.missed()
            except EngineError:
                found = Fault.DIED
            else:
                replica.heard(numbers)
                computed = numbers["tokens_sampled"] + numbers["tokens_prefilled"]
                found = health.beat(self._clock(), computed=computed, running=numbers["running"])
                if not replica.loading and numbers["version"] != replica.version:
                    found = Fault.VERSION
            if found is not None:
                self._condemn(replica, found)
                return fault.result()
