"""Several ranks as one trainer: all are asked, and one that fails keeps nobody waiting."""

import asyncio
import os
import time
from typing import Any

import msgspec
import pytest

from headrace.cluster.local import LocalCluster, LocalHandle
from headrace.cluster.types import WorkerDied, WorkerFailure, WorkerSpec
from headrace.stages.trainers import TrainerGroup, open_trainer

WAIT_S = 600.0
"""Longer than any of these tests; what would be waited for if a failure were not noticed."""


class Substituted(LocalCluster):
    """Starts a stand-in in place of the real trainer."""

    async def start(self, spec: WorkerSpec) -> LocalHandle:
        return await super().start(
            msgspec.structs.replace(spec, target="stand_in_rank:Rank", cores=(), threads=1)
        )


@pytest.fixture
async def cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    (tmp_path / "logs").mkdir()
    local = Substituted()
    yield local
    await local.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_every_rank_gets_the_request_and_rank_0_answers(cluster, tmp_path):
    async with open_trainer(cluster, "t", (0, 1, 2), tmp_path, ranks=2) as group:
        rank, pid, payload = await group.request("work", {"x": 1})
        assert (rank, payload) == (0, {"x": 1})
        own = [(await r.request("where"))[:2] for r in group._ranks]
    assert [rank for rank, _ in own] == [0, 1]
    assert own[0][1] == pid != own[1][1]
    assert not any(alive(pid) for _, pid in own)
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["t-rank0.log", "t-rank1.log"]


@pytest.mark.parametrize(
    ("method", "rank", "error"),
    [("fail", 1, WorkerFailure), ("die", 1, WorkerDied)],
)
async def test_a_failed_rank_is_raised_and_the_others_do_not_hang(
    cluster, tmp_path, method, rank, error
):
    pids: list[int] = []
    started = time.monotonic()

    async def stage() -> None:
        async with open_trainer(cluster, "t", (0, 1), tmp_path, ranks=2) as group:
            pids.extend([(await r.request("where"))[1] for r in group._ranks])
            await group.request(method, {"rank": rank}, timeout_s=WAIT_S)

    with pytest.raises(error, match="says no" if method == "fail" else "t-rank"):
        await stage()
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert time.monotonic() - started < WAIT_S / 2


class Scripted:
    """A handle whose answer, or failure, comes when its turn does."""

    def __init__(self, name: str, answer: Any, after: asyncio.Event | None = None) -> None:
        self.name = name
        self.answer = answer
        self.after = after
        self.cancelled = False

    async def request(self, method: str, payload: Any = None, *, timeout_s: float = 60.0) -> Any:
        try:
            if self.after is not None:
                await self.after.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def group_of(*handles: Scripted) -> TrainerGroup:
    return TrainerGroup(handles)  # type: ignore[arg-type]  # as much of a handle as is used


async def test_the_first_failure_is_raised_and_waiting_requests_are_given_up():
    never = asyncio.Event()
    waiting = Scripted("rank0", 0, never)
    failing = Scripted("rank1", WorkerFailure("user_error", "first"))
    with pytest.raises(WorkerFailure, match="first"):
        await group_of(waiting, failing).request("work")
    assert waiting.cancelled


async def test_two_failures_at_once_are_one():
    failures = [Scripted("a", WorkerDied("a")), Scripted("b", WorkerDied("b"))]
    with pytest.raises(WorkerDied, match="a"):
        await group_of(*failures).request("work")


async def test_a_cancelled_caller_cancels_all():
    handles = [Scripted("a", 0, asyncio.Event()), Scripted("b", 0, asyncio.Event())]
    task = asyncio.create_task(group_of(*handles).request("work"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(h.cancelled for h in handles)
