"""Several engines behind one server's door: what `--replicas` and several `--engine-url` stand on.

Cores are divided among embedded engines, servers of another make are only watched. A replica that
dies is started, or connected to, again, and its requests go on elsewhere. Training has its own way
to replicas (`engines`), which knows recipes; this module knows command lines.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig, UpdatePolicy
from headrace.engine.servers.engine import HttpEngine
from headrace.engine.types import (
    EngineClient,
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
)
from headrace.engines import HEALTH, divide
from headrace.errors import UserError
from headrace.rollout.replicas.affinity import PromptAffinity
from headrace.rollout.replicas.health import HealthPolicy
from headrace.rollout.replicas.replica import StartReplica, Weights
from headrace.rollout.replicas.router import Router

_Started = TypeVar("_Started", ProcessEngine, HttpEngine)

MOST_REPLICAS = 64
"""More processes than one machine serves well from."""
_PROMPTS_PER_PLACE = 4
"""Conversations remembered for each request that may run: a cache holds few more than those."""
# A server tells its tokens at the end only, so nothing can be said of its progress before that.
_SERVER_HEALTH = HealthPolicy(beat_timeout_s=10.0, stuck_s=24 * 3600.0)


class ServedEngine(EngineClient, Protocol):
    """An engine that has to be started."""

    async def start(self) -> None:
        """Returns once it answers.

        Raises:
            UserError: the checkpoint or the server cannot be used.
        """
        ...


class ReplicatedEngine(Router):
    """Replicas that start together, as one engine.

    Requests of a session stay on one replica; those without one, as plain clients send them, go
    where the prompt that they continue was computed.

    Args:
        starts: how to start each replica, by name.
        checkpoint: what they serve.
        max_context: tokens of a request before the first replica has said what it takes.
        running: requests that all of them run together.
        policy: when a replica counts as dead.
        words: where they run, for people.
        report: told, in words for people, when a replica fails and when it is back.
    """

    def __init__(
        self,
        starts: Mapping[str, StartReplica],
        checkpoint: Path,
        *,
        max_context: int,
        running: int,
        policy: HealthPolicy = HEALTH,
        words: str = "",
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(Weights(str(checkpoint), 0), policy=policy, report=report)
        self.words = words
        self._starts = dict(starts)
        self._asked_context = max_context
        self._prompts = PromptAffinity(_PROMPTS_PER_PLACE * running, self.release)

    @property
    def max_context(self) -> int:
        """See `Router.max_context`."""
        return super().max_context or self._asked_context

    async def start(self) -> None:
        """Start all replicas; returns once all of them serve.

        Raises:
            UserError: they cannot be started.
        """
        for name, start in self._starts.items():
            self.add(name, start)
        try:
            await self.ready(len(self._starts))
        except EngineError as error:
            raise UserError(f"replicas: {error}") from error

    def _session(self, request: GenerationRequest) -> str:
        return request.session or self._prompts.conversation(request.prompt_ids)


class WatchedServer:
    """A server's engine whose heartbeat asks the server. See `EngineClient`."""

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    @property
    def weight_version(self) -> int:
        """See `EngineClient.weight_version`."""
        return self._engine.weight_version

    @property
    def max_context(self) -> int:
        """See `EngineClient.max_context`."""
        return self._engine.max_context

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        """See `EngineClient.generate`."""
        return await self._engine.generate(request, on_progress)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        await self._engine.abort(request_id)

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        """See `EngineClient.load_weights`."""
        await self._engine.load_weights(path, version, policy)

    async def stats(self) -> dict[str, Any]:
        """See `HttpEngine.stats`.

        Raises:
            TimeoutError: the server does not answer.
        """
        if not await self._engine.answers():
            raise TimeoutError
        return {"tokens_prefilled": 0, **await self._engine.stats()}

    async def close(self) -> None:
        """See `EngineClient.close`."""
        await self._engine.close()


def share_cores(
    cores: Sequence[int], threads: int | None, replicas: int
) -> tuple[tuple[int, ...], ...]:
    """Cores of each replica; one core each, shared, if there are fewer and nobody chose threads.

    Args:
        threads: compute threads of all replicas together; None uses every core.

    Raises:
        UserError: more threads than cores, or too few for as many or that many replicas.
    """
    if not 1 <= replicas <= MOST_REPLICAS:
        raise UserError(f"--replicas {replicas}: use 1 to {MOST_REPLICAS}")
    if threads is not None and threads > len(cores):
        raise UserError(f"--threads {threads}: only {len(cores)} cores are usable here")
    if threads is not None and threads < replicas:
        raise UserError(
            f"--threads {threads}: {replicas} replicas divide them, one at least for each; ask "
            f"for {replicas} or more, or for fewer --replicas"
        )
    return divide(tuple(cores)[:threads], replicas)


def _placement(shares: Sequence[Sequence[int]]) -> str:
    """Where replicas run, for people."""
    words = " | ".join(", ".join(map(str, share)) for share in shares)
    if len({core for share in shares for core in share}) < len(shares):
        return f"{len(shares)} on cores {words}: fewer cores than replicas, so they share"
    return f"{len(shares)} on cores {words}"


@contextlib.asynccontextmanager
async def open_embedded(
    checkpoint: Path,
    config: EngineConfig,
    shares: Sequence[tuple[int, ...]],
    *,
    report: Callable[[str], None] | None = None,
) -> AsyncIterator[ProcessEngine | ReplicatedEngine]:
    """An engine for each share of the cores, as one, not started; processes end with the context.

    Args:
        config: of each of them.
        report: see `ReplicatedEngine`.
    """
    async with contextlib.AsyncExitStack() as stack:
        cluster = LocalCluster()
        stack.push_async_callback(cluster.close)

        def of(
            name: str, cores: tuple[int, ...], path: str, stamp: int, *, alone: bool
        ) -> ProcessEngine:
            return ProcessEngine(
                cluster,
                msgspec.structs.replace(config, engine_id=name),
                checkpoint=path,
                version=stamp,
                tokenizer=str(checkpoint),
                cores=cores,
                threads=len(cores),
                retries=3 if alone else 0,
                one_life=not alone,
            )

        def starts(name: str, cores: tuple[int, ...]) -> StartReplica:
            async def start(path: str, stamp: int) -> EngineClient:
                return await _started(of(name, cores, path, stamp, alone=False))

            return start

        if len(shares) == 1:
            engine = of("engine-0", shares[0], str(checkpoint), 0, alone=True)
        else:
            named = {f"engine-{i}": cores for i, cores in enumerate(shares)}
            engine = ReplicatedEngine(
                {name: starts(name, cores) for name, cores in named.items()},
                checkpoint,
                max_context=config.max_context,
                running=config.max_running * len(shares),
                words=_placement(shares),
                report=report,
            )
        stack.push_async_callback(engine.close)
        yield engine


@contextlib.asynccontextmanager
async def open_servers(
    connect: Mapping[str, Callable[[], HttpEngine]],
    checkpoint: Path,
    *,
    max_context: int,
    running: int,
    report: Callable[[str], None] | None = None,
) -> AsyncIterator[ReplicatedEngine]:
    """Servers that run already, as one engine, not started.

    Args:
        connect: makes the engine of each server, by name, as often as it has to be reached anew.
        max_context, running, report: see `ReplicatedEngine`.
    """

    def starts(make: Callable[[], HttpEngine]) -> StartReplica:
        async def start(path: str, stamp: int) -> EngineClient:
            return WatchedServer(await _started(make()))

        return start

    engine = ReplicatedEngine(
        {name: starts(make) for name, make in connect.items()},
        checkpoint,
        max_context=max_context,
        running=running,
        policy=_SERVER_HEALTH,
        words=f"{len(connect)} servers",
        report=report,
    )
    try:
        yield engine
    finally:
        await engine.close()


async def _started(engine: _Started) -> _Started:
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine
