"""New weights for servers that stand still while they load: pause, load, verify, resume.

The order of an update, what becomes of running requests, and the way back when a server refuses are
decided here; `vllm` and `sglang` say which routes that takes.
"""

import asyncio
import contextlib
import time
from abc import abstractmethod
from typing import NoReturn, get_args

from headrace.engine.config import UpdatePolicy
from headrace.engine.servers.checkpoint import ServedCheckpoint
from headrace.engine.servers.engine import HttpEngine
from headrace.engine.types import EngineError

LOAD_TIMEOUT_S = 600.0
"""Longest wait for a server to have read new weights."""


class PausingEngine(HttpEngine):
    """An `HttpEngine` over a server that can be paused. It takes what `HttpEngine` takes."""

    def _refuse_update(self, checkpoint: ServedCheckpoint) -> None:
        """Raise EngineError where the server's way of loading is known to be wrong."""

    @abstractmethod
    async def _pause(self, policy: UpdatePolicy) -> None:
        """Keep the server from sampling: running requests wait ("continue") or end ("requeue")."""

    @abstractmethod
    async def _reload(self, path: str, version: int) -> None:
        """Load, empty the cache, stamp, and verify the stamp. The server is paused."""

    @abstractmethod
    async def _resume(self) -> None:
        """Let the server sample again."""

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        """See `EngineClient.load_weights`. `path` must be a checkpoint directory that the server
        sees under the same name.

        Raises:
            UserError: the weights cannot be read or do not fit; nothing has changed.
            EngineError: INVALID version or policy, or a model whose reloading is known to be wrong;
                FAILED if the server did not take them. It says whether the old ones are back; if
                not, the engine refuses requests until weights were loaded.
        """
        if version < 0:
            raise EngineError(EngineError.INVALID, f"version is {version}; it must be >= 0")
        if policy not in get_args(UpdatePolicy):
            raise EngineError(
                EngineError.INVALID,
                f"policy is {policy!r}; it must be one of {', '.join(get_args(UpdatePolicy))}",
            )
        self._require_usable()
        async with self._loading:
            self._require_usable()
            assert self._checkpoint is not None, "adapters of such servers give one"
            checkpoint = await asyncio.to_thread(ServedCheckpoint, path)
            self._checkpoint.require_same_tensors(checkpoint)
            self._refuse_update(checkpoint)
            swap = asyncio.create_task(self._swap(checkpoint, version, policy))
            try:
                await asyncio.shield(swap)
            except asyncio.CancelledError:
                # Half an update would leave the server standing still.
                await asyncio.wait({swap})
                raise
            finally:
                self._newest = self._version
                self._settled.set()

    async def _swap(self, checkpoint: ServedCheckpoint, version: int, policy: UpdatePolicy) -> None:
        """Pause, load, resume; on failure the old weights again."""
        path = str(checkpoint.path)
        started = time.perf_counter()
        self._settled.clear()
        self._newest = version
        for call in self._open.values():
            call.widen(version)
            call.again = policy == "requeue"
        try:
            await self._pause(policy)
        except EngineError:
            with contextlib.suppress(EngineError):
                await self._resume()
            raise
        try:
            await self._reload(path, version)
        except EngineError as error:
            await self._restore(path, error)
        # Nothing is sampled before it resumes, and nothing of the old weights after.
        self._checkpoint, self._version, self._broken = checkpoint, version, None
        try:
            await self._resume()
        except EngineError as error:
            raise self._break(f"{self.name} did not resume after an update: {error}") from error
        self._counts["updates"] += 1
        self._last_pause_s = time.perf_counter() - started

    async def _restore(self, path: str, error: EngineError) -> NoReturn:
        """Put the old weights back, and say how that went."""
        assert self._checkpoint is not None, "adapters of such servers give one"
        old = self._version
        try:
            await self._reload(str(self._checkpoint.path), old)
            await self._resume()
        except EngineError as second:
            raise self._break(
                f"{self.name} failed to load {path} ({error}), and the weights of version {old} "
                f"could not be loaded again ({second}); load weights, or start it again"
            ) from error
        raise EngineError(
            EngineError.FAILED,
            f"{self.name} failed to load {path}: {error}; the weights of version {old} are back",
        ) from error

    def _break(self, problem: str) -> EngineError:
        """Refuse requests from now on, and end those that wait for a server that stands still."""
        self._broken = problem
        broken = EngineError(EngineError.FAILED, problem)
        for call in self._open.values():
            call.end(broken)
        return broken
