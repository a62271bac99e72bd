"""What is known of an engine from outside: its last counters, and whether it still answers.

Questions are asked one at a time, however many want to know, and are never cut short: giving up on
an answer is not a reason to disturb an engine that is loading, updating or being replaced.
"""

import asyncio
from typing import Any, Literal

from headrace.engine.types import EngineClient, EngineError

Status = Literal["ok", "updating", "unresponsive", "closed"]


class Pulse:
    """The pulse of one engine.

    Args:
        engine: whose.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._question: asyncio.Task[dict[str, Any]] | None = None
        self.updating = False
        """While set, nothing is asked: the answer could only come after the update."""
        self.stats: dict[str, Any] = {}
        """The last answer; empty before the first."""

    async def feel(self, timeout_s: float) -> Status:
        """Ask for `stats`, or join whoever has asked, for at most `timeout_s` seconds."""
        if self._question is None:
            if self.updating:
                return "updating"
            self._question = asyncio.create_task(self._engine.stats())
        question = self._question
        await asyncio.wait({question}, timeout=timeout_s)
        if not question.done():
            return "updating" if self.updating else "unresponsive"
        if self._question is question:
            self._question = None
        if question.cancelled():
            return "closed"
        error = question.exception()
        if error is None:
            self.stats = question.result()
            return "ok"
        closed = isinstance(error, EngineError) and error.code == EngineError.CLOSED
        return "closed" if closed else "unresponsive"

    def count(self, name: str) -> int:
        """The last value of a counter; 0 before the first and from engines that do not have it."""
        return int(self.stats.get(name, 0))
