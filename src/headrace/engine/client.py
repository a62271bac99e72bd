"""The engine as the rest of the system holds it: an asyncio client of an `EngineWorker`.

`ProcessEngine` runs the worker in its own process, restarts it when it dies and resubmits what was
in flight from its untouched prompt, so a killed engine costs time and never a request. This module
does not import torch: the process that holds it starts many commands and must stay small.
"""

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from headrace.cluster.types import (
    UNSENDABLE,
    Cluster,
    WorkerDied,
    WorkerFailure,
    WorkerHandle,
    WorkerSpec,
)
from headrace.engine.config import USER_ERROR, EngineConfig, UpdatePolicy
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    Progress,
)
from headrace.errors import UserError
from headrace.rollout.types import FinishReason

LOAD_TIMEOUT_S = 600.0
"""Longest wait for an engine to have new weights."""
ANSWER_GRACE_S = 60.0
"""An engine that answers this much after a request's deadline is hung, not slow."""


def refusal(failure: WorkerFailure) -> Exception:
    """A worker's failure as what the caller knows."""
    if failure.code == USER_ERROR:
        return UserError(failure.message)
    if failure.code == UNSENDABLE:
        return EngineError(EngineError.INVALID, failure.message)
    return EngineError(failure.code, failure.message)


class WorkerClient:
    """What both engines share: one call at a time is mapped to one worker request."""

    def __init__(self, *, version: int, max_context: int) -> None:
        self._version = version
        self._max_context = max_context
        self._loading = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """See `EngineClient.weight_version`."""
        return self._version

    @property
    def max_context(self) -> int:
        """See `EngineClient.max_context`."""
        return self._max_context

    async def _call(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        raise NotImplementedError

    async def ask(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        """One request to the worker as it is now; nobody waits for a dead one to be replaced.

        Raises:
            EngineError: refused; CLOSED or FAILED if no worker could answer.
        """
        raise NotImplementedError

    async def stats(self) -> dict[str, Any]:
        """`EngineStats` as a dict, plus "max_context" and "pid"."""
        return await self._call("stats", {}, ANSWER_GRACE_S)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        await self._call("abort", {"id": request_id}, ANSWER_GRACE_S)


class ProcessEngine(WorkerClient):
    """An engine in its own process.

    Args:
        cluster: starts the process.
        config: sizes of the engine.
        checkpoint: directory of the first weights, of a checkpoint or published.
        version: their stamp.
        tokenizer: directory of the tokenizer, which requests with stop texts need; None is
            `checkpoint`.
        cores: CPU cores the process owns; empty leaves it to the scheduler.
        threads: its compute threads.
        log_path: file for its output; None inherits this process's.
        retries: how often one request is resubmitted before it is given up.
        one_life: a process that died is not replaced; everything fails with CLOSED then. For those
            who look after engines themselves.
        start_timeout_s: longest wait for a started process to have loaded its weights.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: EngineConfig,
        *,
        checkpoint: str,
        version: int = 0,
        tokenizer: str | None = None,
        cores: tuple[int, ...] = (),
        threads: int = 1,
        log_path: str | None = None,
        retries: int = 3,
        one_life: bool = False,
        start_timeout_s: float = 180.0,
    ) -> None:
        super().__init__(version=version, max_context=config.max_context)
        self._cluster = cluster
        self._config = config
        self._checkpoint = checkpoint
        # Later checkpoints may come without one.
        self._tokenizer = tokenizer or checkpoint
        self._cores = cores
        self._threads = threads
        self._log_path = log_path
        self._retries = retries
        self._one_life = one_life
        self._start_timeout_s = start_timeout_s
        self._handle: WorkerHandle | None = None
        self._starting: asyncio.Task[WorkerHandle] | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._closed = False
        self._in_flight: set[str] = set()
        self._aborted: set[str] = set()
        self.restarts = 0
        """Times the process was replaced after it died."""

    @property
    def pid(self) -> int | None:
        """Of the present process; None before `start` and after `close`."""
        return self._handle.pid if self._handle is not None else None

    async def start(self) -> None:
        """Start the process and wait until it has loaded its weights.

        Raises:
            UserError: the checkpoint cannot be used.
            EngineError: CLOSED, or the process died while starting.
        """
        await self._living(None)

    async def close(self) -> None:
        """Stop the process. Open requests fail with CLOSED. Safe to repeat."""
        self._closed = True
        for task in (self._reviving, self._starting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.stop()

    async def stats(self) -> dict[str, Any]:
        """See `WorkerClient.stats`; plus "restarts"."""
        return {**await super().stats(), "restarts": self.restarts}

    async def _living(self, dead: WorkerHandle | None) -> WorkerHandle:
        """The process to talk to; replaces `dead` if nobody has yet.

        A start belongs to all who wait for it. Callers that lose patience leave it alone, or a few
        of them could keep an engine from ever coming up.
        """
        if self._closed:
            raise EngineError(EngineError.CLOSED, "the engine is closed")
        if self._starting is None:
            handle = self._handle
            if handle is not None and handle is not dead and handle.alive:
                return handle
            if handle is not None and self._one_life:
                raise EngineError(EngineError.CLOSED, f"{handle.name} (pid {handle.pid}) has ended")
            self._starting = asyncio.create_task(self._replace(), name=self._config.engine_id)
        starting = self._starting
        await asyncio.wait({starting})
        if starting.cancelled():
            raise EngineError(EngineError.CLOSED, "the engine was closed while it started")
        return starting.result()

    async def _replace(self) -> WorkerHandle:
        try:
            if self._handle is not None:
                self.restarts += 1
                await self._handle.stop(grace_s=0.0)
                self._handle = None
            self._handle = await self._spawn()
            return self._handle
        finally:
            self._starting = None

    async def _spawn(self) -> WorkerHandle:
        spec = WorkerSpec(
            name=self._config.engine_id,
            target="headrace.engine.worker:EngineWorker",
            kwargs={
                "checkpoint": self._checkpoint,
                "version": self._version,
                "config": msgspec.to_builtins(self._config),
                "threads": self._threads,
                "tokenizer": self._tokenizer,
            },
            cores=self._cores,
            threads=self._threads,
            log_path=self._log_path,
        )
        handle = await self._cluster.start(spec)
        try:
            await handle.request("stats", timeout_s=self._start_timeout_s)
        except WorkerFailure as failure:
            await handle.stop()
            raise refusal(failure) from failure
        except (WorkerDied, TimeoutError) as error:
            await handle.stop(grace_s=0.0)
            raise EngineError(
                EngineError.CLOSED, f"{spec.name} ended while loading {self._checkpoint}: {error}"
            ) from error
        except asyncio.CancelledError:
            await asyncio.shield(handle.stop(grace_s=0.0))
            raise
        return handle

    async def _call(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        """One request to whichever process lives; a death in between is retried."""
        dead: WorkerHandle | None = None
        for _ in range(self._retries + 1):
            dead = handle = await self._living(dead)
            try:
                return await handle.request(method, payload, timeout_s=timeout_s)
            except WorkerFailure as failure:
                raise refusal(failure) from failure
            except WorkerDied:
                continue
            except TimeoutError:
                # Alive but silent: as good as dead, and `_living` ends it.
                continue
        raise EngineError(
            EngineError.FAILED,
            f"{method}: the engine process died {self._retries + 1} times while it was open",
        )

    async def ask(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        """See `WorkerClient.ask`. A dead or silent process is replaced meanwhile."""
        handle = self._handle
        if self._closed:
            raise EngineError(EngineError.CLOSED, "the engine is closed")
        try:
            if handle is None:
                raise WorkerDied(f"{self._config.engine_id} is being started")
            return await handle.request(method, payload, timeout_s=timeout_s)
        except WorkerFailure as failure:
            raise refusal(failure) from failure
        except (WorkerDied, TimeoutError) as error:
            if handle is not None and handle.alive:
                # What it was asked for must not happen any more.
                await handle.stop(grace_s=0.0)
            if self._reviving is None or self._reviving.done():
                self._reviving = asyncio.create_task(self._revive(handle))
            raise EngineError(EngineError.FAILED, f"{method}: {error or 'no answer'}") from error

    async def _revive(self, dead: WorkerHandle | None) -> None:
        # Whoever needs the process next is told what is wrong with it.
        with contextlib.suppress(EngineError, UserError):
            await self._living(dead)

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        """See `EngineClient.generate`. Survives the death of the process; who watches is told to
        forget what was sampled there.

        Raises:
            EngineError: refused, or FAILED after `retries` resubmissions.
        """
        if request.id in self._in_flight:
            raise EngineError(EngineError.INVALID, f"id {request.id!r} is in use")
        self._in_flight.add(request.id)
        try:
            return await self._generate(
                request, None if on_progress is None else Watch(on_progress)
            )
        except (EngineError, UserError):
            raise
        except BaseException:
            # Cancelled, or `on_progress` failed: the engine does not know.
            handle = self._handle
            if handle is not None and handle.alive:
                # Nobody waits for the tokens any more; a dead handle has none to stop.
                await asyncio.shield(self._give_up(handle, request.id))
            raise
        finally:
            self._in_flight.discard(request.id)
            self._aborted.discard(request.id)

    async def _generate(
        self, request: GenerationRequest, watch: "Watch | None"
    ) -> GenerationResult:
        arrived = time.monotonic()
        dead: WorkerHandle | None = None
        for _ in range(self._retries + 1):
            dead = handle = await self._living(dead)
            elapsed = time.monotonic() - arrived
            if request.id in self._aborted:
                return _empty(request.id, FinishReason.ABORTED, elapsed)
            left = request.timeout_s - elapsed
            if left <= 0:
                return _empty(request.id, FinishReason.DEADLINE, elapsed)
            if watch is not None:
                watch.begin_again(request.id, self._version)
            payload = generate_payload(request, watch, timeout_s=left)
            try:
                result = await handle.request(
                    "generate", payload, timeout_s=left + ANSWER_GRACE_S, on_part=watch
                )
            except WorkerFailure as failure:
                raise refusal(failure) from failure
            except (WorkerDied, TimeoutError):
                continue
            generated = msgspec.convert(result, GenerationResult)
            return msgspec.structs.replace(
                generated,
                queue_s=generated.queue_s + elapsed,
                total_s=generated.total_s + elapsed,
            )
        raise EngineError(
            EngineError.FAILED,
            f"request {request.id!r}: the engine process died {self._retries + 1} times under it",
        )

    async def _give_up(self, handle: WorkerHandle, request_id: str) -> None:
        try:
            await handle.request("abort", {"id": request_id}, timeout_s=ANSWER_GRACE_S)
        except (WorkerDied, WorkerFailure, TimeoutError):
            return

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if request_id not in self._in_flight:
            return
        self._aborted.add(request_id)
        handle = self._handle
        if handle is not None and handle.alive:
            await self._give_up(handle, request_id)

    async def load_weights(
        self,
        path: str,
        version: int,
        policy: UpdatePolicy = "continue",
        *,
        checkpoint: str | None = None,
    ) -> None:
        """See `EngineCore.load_weights`. A process started from now on starts with these weights.

        Args:
            path: a checkpoint directory or a published version.
            version: their stamp.
            policy: what becomes of running requests.
            checkpoint: directory of the same weights for a process that has to replace this one,
                since a published version may be gone by then; None is `path`.

        Raises:
            UserError: the weights cannot be read or do not fit; the old ones stay.
            EngineError: INVALID version or policy, CLOSED or FAILED.
        """
        payload = {"path": path, "version": version, "policy": policy}
        async with self._loading:
            await self._call("load_weights", payload, LOAD_TIMEOUT_S)
            self._checkpoint, self._version = checkpoint or path, version


def generate_payload(
    request: GenerationRequest, watch: "Watch | None", *, timeout_s: float
) -> dict[str, Any]:
    """What `EngineWorker` is asked for; it streams if anybody watches."""
    changed = msgspec.structs.replace(request, timeout_s=timeout_s, stream=watch is not None)
    return msgspec.to_builtins(changed)


class Watch:
    """Hands parts of a worker's answer to whoever watches a request."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._told = False

    def __call__(self, part: Any) -> None:
        progress = msgspec.convert(part, Progress)
        self._told = bool(progress.ids) or (self._told and not progress.restart)
        self._on_progress(progress)

    def begin_again(self, request_id: str, version: int) -> None:
        """A process that has not seen the request takes it; what another one said is void."""
        if self._told:
            self._told = False
            self._on_progress(Progress(request_id, (), (), (), version, restart=True))


def _empty(request_id: str, reason: FinishReason, elapsed_s: float) -> GenerationResult:
    return GenerationResult(request_id, (), reason, queue_s=elapsed_s, total_s=elapsed_s)
