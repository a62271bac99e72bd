"""A synchronous stage that is killed and resumed cuts the batches that it would have cut."""

import asyncio
import itertools
from typing import Any

import pytest
from stand_ins import TIMEOUT, ScriptedGate, runner_of

from headrace.rollout.choosing.mixing import TaskMix, TaskShare
from headrace.rollout.choosing.sharing import cursor_key
from headrace.rollout.naming import first_name
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.trained import trained_digest, trained_trajectories
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Outcome
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance

BATCHES = 4


class SeededGate(ScriptedGate):
    """Its sessions sample what their seed says, as engines do."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.seeds: dict[str, int | None] = {}

    def open_session(self, session_id: str, *, limits: Any = None, seed: int | None = None) -> str:
        super().open_session(session_id)
        self.seeds[session_id] = seed
        return f"{seed}"

    def sampled(self, session_id: str) -> tuple[int, int]:
        seed = self.seeds[session_id]
        assert seed is not None
        return (seed % 1009, seed % 997)


class SeededTask:
    """Its rewards are what seeds say, whenever rollouts end; stops the world at `stop`."""

    name = "toy"

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.finished = itertools.count()
        self.crashed = asyncio.Event()

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        seed = int(endpoint.api_key)
        for _ in range(seed % 7):  # they end in another order than they began
            await asyncio.sleep(0)
        if self.stop is not None and next(self.finished) >= self.stop:
            self.crashed.set()
            await asyncio.Event().wait()
        # Half of the groups without signal: some rounds have none at all.
        reward = float(seed % 3 == 0) if instance.seed % 2 else 0.0
        return RolloutResult(Outcome.OK, {"reward": reward})


async def live(ledger: Ledger, stop: int | None) -> None:
    """Generate and "train" until all batches are done, or until so many rollouts have ended."""
    recovery = ledger.recover("rl")
    task, gate = SeededTask(stop), SeededGate(ledger)
    share = TaskShare("toy", 1.0, lambda i: TaskInstance("toy", i // 3, "f", 1, 1))
    source = RolloutSource(
        SourceConfig("rl", 4, 2, 8, 1, 1.0, 100, mode="sync", seed=5),
        runner=runner_of({"toy": task}, ledger, gate),
        ledger=ledger,
        mix=TaskMix([share], state=ledger.get_state(cursor_key("rl"))),
    )
    source.resume(recovery)
    step = recovery.step

    async def train() -> None:
        nonlocal step
        source.start()  # and cut at once, before anything could be dispatched, as the loop does
        while step < BATCHES:
            batch = await source.cut(1, TIMEOUT)
            assert batch is not None
            assert batch.index == step
            step += 1
            ledger.commit_batch("rl", batch.index, step)
            if step % 2 == 0:
                ledger.checkpointed("rl", step, f"step-{step}")

    training = asyncio.create_task(train())
    crashed = asyncio.create_task(task.crashed.wait())
    done, _ = await asyncio.wait(
        {training, crashed}, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED
    )
    assert done
    for one in (training, crashed):
        one.cancel()
    await asyncio.gather(training, crashed, return_exceptions=True)
    await source.stop()  # tells the ledger nothing, like a crash
    if not crashed.cancelled():
        return
    training.result()


def members(ledger: Ledger) -> list[list[str]]:
    return [[first_name(m.session_id) for m in b.members] for b in ledger.batches("rl")]


@pytest.mark.parametrize("stops", [(1,), (4,), (8,), (17, 3), (9, 9, 2, 1, 0, 5), (30, 1, 30)])
async def test_a_killed_stage_trains_the_same(tmp_path, stops):
    with Ledger.create(tmp_path / "whole.sqlite") as whole:
        whole.stage_started("rl")
        await live(whole, None)
        wanted = trained_trajectories(whole, "rl")
        assert {name.split("/")[0] for name in wanted} == {"1", "2", "3", "4"}
        with Ledger.create(tmp_path / "broken.sqlite") as broken:
            broken.stage_started("rl")
            for stop in (*stops, None):
                await live(broken, stop)
            assert trained_trajectories(broken, "rl") == wanted
            assert trained_digest(broken, "rl") == trained_digest(whole, "rl")
            assert members(broken) == members(whole)
            lost = [s for s in broken.sessions(stage="rl") if s.reason == "crash"]
            assert lost
            assert all("~" in name for name in _again(broken))


def _again(ledger: Ledger) -> list[str]:
    """Sessions that took the place of lost ones."""
    seen: set[str] = set()
    found = []
    for session in ledger.sessions(stage="rl"):
        if first_name(session.id) in seen:
            found.append(session.id)
        seen.add(first_name(session.id))
    return found
