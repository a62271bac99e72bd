"""Stand-ins for the gateway and the tasks of a rollout source: they answer at once, by script.

They know the real ledger, which records what they say, and nothing of engines or models.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ledger_writer import make_call

from headrace.rollout.choosing.mixing import TaskMix, TaskShare
from headrace.rollout.choosing.sharing import cursor_key
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import RolloutRunner
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Call, Outcome, Span
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance

TIMEOUT = 60.0
"""Seconds that no test needs."""
Script = Callable[[int, TaskInstance], Awaitable[Any]]
"""Makes a result of a rollout's number, from 0, and its instance; or what is none, or nothing."""


class ScriptedGate:
    """Records one call of two tokens per session, stamped with the current version.

    Args:
        limit: of its session, that every rollout reaches.
        refusal: of an engine, that every rollout meets.
    """

    def __init__(
        self, ledger: Ledger, *, limit: str | None = None, refusal: str | None = None
    ) -> None:
        self.ledger = ledger
        self.limit = limit
        self.refusal = refusal
        self.version = 1
        self.opened: list[str] = []
        self.open: set[str] = set()

    def open_session(self, session_id: str, *, limits: Any = None, seed: int | None = None) -> str:
        self.opened.append(session_id)
        self.open.add(session_id)
        return session_id

    def exceeded(self, session_id: str) -> str | None:
        return self.limit

    def refused(self, session_id: str) -> str | None:
        return self.limit or self.refusal

    def sampled(self, session_id: str) -> tuple[int, int]:
        return (4, 5)

    async def close_session(self, session_id: str) -> tuple[Call, ...]:
        if session_id not in self.open:
            return ()
        self.open.discard(session_id)
        span = Span(self.sampled(session_id), (-0.5, -0.25), self.version, "e")
        call = make_call(session_id, 0, tools=[], prompt_delta=(1, 2, 3), spans=(span,))
        self.ledger.record_call(call)
        return (call,)


class ScriptedTask:
    """Rewards alternate 0, 1 within a group unless `script` says otherwise."""

    def __init__(self, script: Script | None = None, name: str = "toy") -> None:
        self.name = name
        self.counter = itertools.count()
        self.script = script
        self.running = 0
        self.most_running = 0

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, f"family{seed % 2}", 1, 2 + seed % 2)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return str(instance.seed)

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            number = next(self.counter)
            if self.script is not None:
                return await self.script(number, instance)
            await asyncio.sleep(0)
            return RolloutResult(Outcome.OK, {"reward": float(number % 2)})
        finally:
            self.running -= 1


def runner_of(
    tasks: Mapping[str, Any], ledger: Ledger, gate: ScriptedGate | None = None, **options: Any
) -> RolloutRunner:
    """A runner of these tasks, by name, at a gate of theirs."""
    return RolloutRunner(
        tasks=tasks,
        gate=gate or ScriptedGate(ledger),
        ledger=ledger,
        base_url="http://x",
        model="m",
        **options,
    )


def mix_of(task: ScriptedTask, **changes: Any) -> TaskMix:
    share = TaskShare(task.name, 1.0, lambda i: task.instance(task.train_seed(i)))
    return TaskMix([share], **changes)


def build(ledger: Ledger, task: ScriptedTask, **changes: Any) -> tuple[ScriptedGate, RolloutSource]:
    """A source of one task: batches of two groups of four, of which two are at work at once."""
    gate = ScriptedGate(ledger)
    values = {
        "stage": "rl",
        "group_size": 4,
        "groups_per_batch": 2,
        "concurrency": 8,
        "staleness": 1,
        "temperature": 1.0,
        "max_tokens": 100,
    }
    report = changes.pop("report", lambda _: None)
    mix = changes.pop("mix", None) or mix_of(task)
    config = SourceConfig(**{**values, **changes})
    runner = runner_of({task.name: task}, ledger, gate)
    return gate, RolloutSource(config, runner=runner, ledger=ledger, mix=mix, report=report)


def source_of(
    ledger: Ledger,
    tasks: Mapping[str, ScriptedTask],
    shares: Mapping[str, tuple[float, int | None]],
    *,
    ratios: Any = None,
    **changes: Any,
) -> RolloutSource:
    """A source of several tasks, by name; `shares` are of ratio and limit."""
    mix = TaskMix(
        [TaskShare(n, r, tasks[n].instance, limit) for n, (r, limit) in shares.items()],
        state=ledger.get_state(cursor_key("rl")),
    )
    config = SourceConfig("rl", 4, 2, changes.pop("concurrency", 32), 9, 1.0, 100, **changes)
    return RolloutSource(
        config, runner=runner_of(tasks, ledger), ledger=ledger, mix=mix, ratios=ratios
    )


async def settle(source: RolloutSource) -> None:
    """Until the ready queue is full and nothing is in flight."""
    async with asyncio.timeout(TIMEOUT):
        await asyncio.sleep(0)
        while source._rollouts:
            await asyncio.wait(list(source._rollouts))
            await asyncio.sleep(0)
