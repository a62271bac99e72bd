"""Calls that may be repeated: one key runs one call, and whoever repeats it gets its outcome.

Knows nothing of HTTP or of what a call is. One event loop owns a `Replays`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from headrace.engine.types import EngineError

T = TypeVar("T")


class _Kept(NamedTuple):
    """What a key stands for."""

    fingerprint: bytes
    since: float
    task: asyncio.Task


class Replays(Generic[T]):
    """Remembers calls by their keys, while they run and for some time after.

    A call that has begun runs to its end, whoever stops waiting for it: the client that was cut off
    is the one that will ask again. Failed calls are forgotten, so that a retry may try.

    Args:
        max_entries: most calls remembered, running ones included; the oldest finished ones go.
        max_age_s: seconds from a call's begin after which, once finished, it is forgotten.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_entries: int = 1024,
        max_age_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_entries < 1 or not max_age_s > 0:
            raise ValueError(
                f"Replays: max_entries is {max_entries} and max_age_s {max_age_s}; "
                "they must be >= 1 and positive"
            )
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._clock = clock
        # Oldest first.
        self._kept: dict[str, _Kept] = {}
        self.repeated = 0
        """Calls answered with the outcome of another."""

    def __len__(self) -> int:
        return len(self._kept)

    async def run(self, key: str, fingerprint: bytes, start: Callable[[], Awaitable[T]]) -> T:
        """The outcome of the call that `key` stands for; begins it if there is none.

        Args:
            key: the client's.
            fingerprint: of everything the outcome depends on.
            start: begins the call.

        Raises:
            EngineError: INVALID if the key was used for another call, OVERLOADED if as many calls
                run as may be remembered.
            Exception: what the call raises.
        """
        self._forget_old()
        kept = self._kept.get(key)
        if kept is not None and kept.fingerprint != fingerprint:
            raise EngineError(
                EngineError.INVALID,
                f"idempotency key {key!r} was used for another request; send a new key",
            )
        if kept is not None:
            self.repeated += 1
        else:
            self._make_room()
            task = asyncio.create_task(_run(start), name=f"idempotent {key}")
            kept = self._kept[key] = _Kept(fingerprint, self._clock(), task)
            task.add_done_callback(lambda task: self._ended(key, task))
        return await asyncio.shield(kept.task)

    def _ended(self, key: str, task: asyncio.Task) -> None:
        if task.cancelled() or task.exception() is not None:
            kept = self._kept.get(key)
            if kept is not None and kept.task is task:
                del self._kept[key]

    def _forget_old(self) -> None:
        too_old = self._clock() - self._max_age_s
        for key, kept in list(self._kept.items()):
            if kept.since > too_old:
                return
            if kept.task.done():
                del self._kept[key]

    def _make_room(self) -> None:
        if len(self._kept) < self._max_entries:
            return
        oldest = next((key for key, kept in self._kept.items() if kept.task.done()), None)
        if oldest is None:
            raise EngineError(
                EngineError.OVERLOADED,
                f"{self._max_entries} calls with idempotency keys are running; try again later",
            )
        del self._kept[oldest]

    async def close(self) -> None:
        """End what runs, and forget everything."""
        running = [kept.task for kept in self._kept.values() if not kept.task.done()]
        self._kept.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(start: Callable[[], Awaitable[T]]) -> T:
    return await start()
