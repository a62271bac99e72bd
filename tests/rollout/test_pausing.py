"""A task that fails again and again rests, is tried again, and costs the other tasks nothing."""

import asyncio

import pytest
from stand_ins import TIMEOUT, runner_of

from headrace.rollout.choosing.mixing import TaskMix, TaskShare
from headrace.rollout.choosing.pausing import TaskPauses
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult, TaskInstance, TaskUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(pauses: TaskPauses, name: str, times: int) -> None:
    for _ in range(times):
        pauses.failed(name, "boom")


def test_pauses_double_while_tries_fail_and_end_with_the_first_success():
    clock, words = Clock(), []
    pauses = TaskPauses(
        "ab",
        failures=3,
        first_pause_s=1,
        longest_pause_s=3,
        give_up_s=10,
        clock=clock,
        report=words.append,
    )
    fail(pauses, "a", 2)
    pauses.succeeded("a")
    fail(pauses, "a", 2)
    assert not pauses.resting  # not in a row
    assert pauses.next_try_s is None
    fail(pauses, "a", 1)
    for length in (1, 2, 3, 3):
        assert pauses.resting == {"a"}
        assert pauses.next_try_s == length
        fail(pauses, "a", 50)  # still in flight when the pause began
        assert pauses.next_try_s == length
        clock.now += length
        assert not pauses.resting
        pauses.dispatched("a")
        assert pauses.resting == {"a"}  # one group at a time
        fail(pauses, "a", 1)
    assert pauses.pauses("a") == 5
    assert pauses.verdict is None  # b works
    clock.now += 3
    pauses.dispatched("a")
    pauses.succeeded("a")
    assert not pauses.paused
    assert words[-1] == "task a works again"
    fail(pauses, "a", 3)
    assert pauses.next_try_s == 1
    assert pauses.pauses("b") == 0


def test_the_verdict_comes_when_no_task_has_worked_for_long_enough():
    clock = Clock()
    pauses = TaskPauses("ab", failures=2, first_pause_s=1, give_up_s=10, clock=clock)
    fail(pauses, "a", 2)
    clock.now = 100
    assert pauses.patience_s is None
    pauses.unavailable("b", "gone")
    assert pauses.patience_s == 10
    clock.now = 109.9
    assert pauses.verdict is None
    pauses.dispatched("a")
    pauses.succeeded("a")
    assert pauses.patience_s is None
    fail(pauses, "a", 2)
    clock.now += 10
    assert pauses.verdict == (
        "no task has worked for 10 s, each ended 2 or more rollouts in a row with an environment "
        "failure, the last ones: a: boom; b: gone"
    )


def test_a_service_that_returns_ends_its_pause_and_no_try():
    clock = Clock()
    pauses = TaskPauses("ab", failures=2, first_pause_s=1, clock=clock)
    pauses.returned("a")  # nothing to end
    pauses.returned("not a task of this stage")
    assert pauses.next_try_s is None
    for _ in range(3):
        clock.now += 100
        pauses.unavailable("a", "gone")
    assert pauses.next_try_s == 4
    pauses.returned("a")
    assert not pauses.resting
    assert pauses.paused == {"a"}  # until a rollout has shown that it works
    pauses.dispatched("a")
    pauses.returned("a")
    assert pauses.resting == {"a"}  # still one group at a time
    pauses.failed("a", "gone")
    assert pauses.next_try_s == 1


class Task:
    """Works, or fails as `broken` says: "" works, "rollout" fails those, "instance" all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken = ""
        self.rollouts = 0

    def instance(self, seed: int) -> TaskInstance:
        if self.broken == "instance":
            raise TaskUnavailable("nobody there")
        return TaskInstance(self.name, seed, "f", 1, 1)

    async def rollout(self, instance, endpoint) -> RolloutResult:
        self.rollouts += 1
        reward = float(self.rollouts % 2)
        await asyncio.sleep(0)
        if self.broken == "rollout":
            raise OSError("gone")
        return RolloutResult(Outcome.OK, {"reward": reward})


@pytest.mark.parametrize("how", ["rollout", "instance"])
@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_broken_task_hurts_only_itself_and_comes_back(tmp_path, how, mode):
    good, bad = Task("good"), Task("bad")
    with Ledger.create(tmp_path) as ledger:
        runner = runner_of({"good": good, "bad": bad}, ledger)
        mix = TaskMix([TaskShare(t.name, 1.0, t.instance) for t in (good, bad)])
        words: list[str] = []
        pauses = TaskPauses(
            mix.ratios, failures=8, first_pause_s=0.01, longest_pause_s=0.02, report=words.append
        )
        config = SourceConfig("rl", 4, 2, 16, 1, 1.0, 100, mode=mode)
        source = RolloutSource(config, runner=runner, ledger=ledger, mix=mix, pauses=pauses)
        index = 0

        async def cut() -> set[str]:
            nonlocal index
            batch = await source.cut(1, TIMEOUT)
            assert batch is not None
            ledger.commit_batch("rl", index, index + 1)
            index += 1
            tasks = {s.id: s.task for s in ledger.sessions(stage="rl")}
            return {tasks[m.session_id] for m in batch.members}

        source.start()
        async with asyncio.timeout(TIMEOUT):
            while await cut() != {"good", "bad"}:
                pass
            bad.broken = how
            while not pauses.pauses("bad") > 2:
                await cut()
            worked = good.rollouts
            for _ in range(5):
                await cut()
            assert good.rollouts > worked
            bad.broken = ""
            while "bad" not in await cut() or pauses.paused:
                pass
        await source.stop()
        assert "task bad works again" in words
        assert pauses.pauses("good") == 0
        assert ledger.conservation("rl").closes
        ended = {s.outcome for s in ledger.sessions(stage="rl") if s.task == "good"}
        assert ended <= {Outcome.OK, Outcome.CANCELLED}
        failed = [s for s in ledger.sessions(stage="rl") if s.outcome is Outcome.ENV_FAILED]
        assert bool(failed) == (how == "rollout")
        assert all("reward" not in s.rewards for s in failed)


async def test_nobody_waits_for_the_pause_of_a_service_that_is_there_again(tmp_path):
    task = Task("alone")
    task.broken = "instance"
    with Ledger.create(tmp_path) as ledger:
        runner = runner_of({"alone": task}, ledger)
        mix = TaskMix([TaskShare("alone", 1.0, task.instance)])
        rests = asyncio.Event()
        pauses = TaskPauses(mix.ratios, first_pause_s=3600, report=lambda words: rests.set())
        config = SourceConfig("rl", 4, 2, 16, 1, 1.0, 100)
        source = RolloutSource(config, runner=runner, ledger=ledger, mix=mix, pauses=pauses)
        source.start()
        async with asyncio.timeout(TIMEOUT):
            await rests.wait()
            task.broken = ""
            source.returned("alone")
            assert await source.cut(1, TIMEOUT) is not None
        await source.stop()
