"""One place in a pool of engines: who serves there now, and what all who served there counted.

Bookkeeping only. Who starts, watches and ends engines is `pool`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from headrace.engine.config import EngineStats
from headrace.engine.types import EngineClient
from headrace.rollout.replicas.health import Fault, Health

StartReplica = Callable[[str, int], Awaitable[EngineClient]]
"""Starts an engine over (checkpoint, version); returns once it can serve, raises EngineError,
UserError or OSError if it cannot."""

_NOT_ADDED = frozenset({"version", "max_context", "pid", "last_update_pause_s"})
"""Numbers of an engine that make no sense as a sum."""
_PRESENT = frozenset(
    {
        "waiting",
        "running",
        "blocks",
        "blocks_free",
        "blocks_cached",
        "cache_bytes",
        "weights_bytes",
    }
)
"""Numbers that are of this moment: they end with the engine. All others only ever rise."""
ZERO = {
    name: value
    for name, value in msgspec.to_builtins(EngineStats()).items()
    if name not in _NOT_ADDED
}
"""The sum over no engines."""


class Weights(msgspec.Struct, frozen=True):
    """What all replicas are to serve.

    Attributes:
        checkpoint: a directory that a replica can be started from.
        version: its stamp.
    """

    checkpoint: str
    version: int


class Replica:
    """One place in the pool: an engine now and then, and a task that looks after it."""

    def __init__(self, name: str, start: StartReplica, weight: int) -> None:
        self.name = name
        self.start = start
        self.weight = weight
        self.engine: EngineClient | None = None
        self.health: Health | None = None
        self.fault: asyncio.Future[Fault] | None = None
        """Of the present life; done when it has to end."""
        self.last_fault: Fault | None = None
        self.problem: Exception | None = None
        """Why the last start failed; None after one that did not."""
        self.failures = 0
        self.restarts = 0
        self.version = -1
        self.leaving = False
        self.loading = False
        self.task: asyncio.Task[None] | None = None
        self.counted: Counter[str] = Counter()
        """What the present engine said of itself so far: numbers that only rise."""

    @property
    def state(self) -> str:
        """For people: "serving", "starting" or "leaving"."""
        return "leaving" if self.leaving else "starting" if self.engine is None else "serving"

    def heard(self, numbers: Mapping[str, Any]) -> Counter[str]:
        """Take down what the engine says of itself; returns its numbers of this moment."""
        present: Counter[str] = Counter()
        for name, value in numbers.items():
            if name in _NOT_ADDED or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in _PRESENT:
                present[name] = value  # pyright: ignore[reportArgumentType] -- seconds are floats
            elif value > self.counted[name]:
                self.counted[name] = value  # pyright: ignore[reportArgumentType] -- likewise
        return present
