"""One key, one call: joined while it runs, replayed afterwards, forgotten when it failed."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.engine.serving.idempotency import Replays
from headrace.engine.types import EngineError


class Calls:
    """Calls that wait for the gate and number their outcomes."""

    def __init__(self) -> None:
        self.begun = 0
        self.started = asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    def __call__(self) -> Awaitable[int]:
        self.begun += 1
        self.started.release()
        return self._run(self.begun)

    async def _run(self, number: int) -> int:
        await asyncio.wait_for(self.gate.wait(), 10)
        if self.error is not None:
            raise self.error
        return number


async def started(calls: Calls, begun: int) -> None:
    async with asyncio.timeout(10):
        for _ in range(begun):
            await calls.started.acquire()


async def test_repeats_join_and_replay() -> None:
    replays: Replays[int] = Replays()
    calls = Calls()
    first = asyncio.create_task(replays.run("a", b"1", calls))
    joined = asyncio.create_task(replays.run("a", b"1", calls))
    await started(calls, 1)
    with pytest.raises(EngineError, match="'a' was used for another request") as caught:
        await replays.run("a", b"2", calls)
    assert caught.value.code == EngineError.INVALID
    # A caller that goes away does not end the call that another waits for.
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    calls.gate.set()
    assert await joined == 1
    assert await replays.run("a", b"1", calls) == 1
    assert await replays.run("b", b"2", calls) == 2
    assert (calls.begun, replays.repeated, len(replays)) == (2, 2, 2)


async def test_a_call_outlives_its_caller() -> None:
    replays: Replays[int] = Replays()
    calls = Calls()
    task = asyncio.create_task(replays.run("a", b"1", calls))
    await started(calls, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    calls.gate.set()
    assert await replays.run("a", b"1", calls) == 1
    assert calls.begun == 1


async def test_failures_are_forgotten() -> None:
    replays: Replays[int] = Replays()
    calls = Calls()
    calls.gate.set()
    calls.error = EngineError(EngineError.OVERLOADED, "later")
    for _ in range(2):
        with pytest.raises(EngineError, match="later"):
            await replays.run("a", b"1", calls)
    assert (calls.begun, len(replays)) == (2, 0)
    calls.error = None
    assert await replays.run("a", b"other", calls) == 3


async def test_memory_is_bounded_by_number_and_age() -> None:
    now = [0.0]
    replays: Replays[int] = Replays(max_entries=2, max_age_s=10.0, clock=lambda: now[0])
    calls = Calls()
    run: Callable[[str], Awaitable[int]] = lambda key: replays.run(key, b"", calls)  # noqa: E731
    running = [asyncio.create_task(replays.run(key, b"", calls)) for key in ("a", "b")]
    await started(calls, 2)
    with pytest.raises(EngineError, match="2 calls with idempotency keys are running") as caught:
        await run("c")
    assert caught.value.code == EngineError.OVERLOADED
    # Age alone forgets nothing that runs.
    now[0] = 11.0
    assert len(replays) == 2
    calls.gate.set()
    assert await asyncio.gather(*running) == [1, 2]
    assert await run("c") == 3
    assert len(replays) == 1
    assert await run("d") == 4
    assert await run("e") == 5
    assert len(replays) == 2
    assert (await run("d"), await run("c")) == (4, 6)
    with pytest.raises(ValueError, match="max_entries is 0"):
        Replays(max_entries=0)


async def test_closing_ends_what_runs() -> None:
    replays: Replays[int] = Replays()
    calls = Calls()
    task = asyncio.create_task(replays.run("a", b"1", calls))
    await started(calls, 1)
    await replays.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(replays) == 0
