"""The rollout source and runner against scripted task services and the real ledger."""

import asyncio
import itertools

import pytest

from headrace.errors import UserError
from headrace.rollout.evaluation import evaluate
from headrace.rollout.ledger import Ledger
from headrace.rollout.mixing import HeldOut, TaskMix, TaskShare
from headrace.rollout.orchestrator import (
    FAILURES_IN_A_ROW,
    RolloutSource,
    SourceConfig,
    cursor_key,
)
from headrace.rollout.runner import RolloutRunner, Ticket
from headrace.rollout.types import Call, DropReason, FinishReason, Outcome, ParseState, Span
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance

TIMEOUT = 20.0


class ScriptedGate:
    """Records one call of two tokens per session, stamped with the current version."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.version = 1
        self.open: set[str] = set()

    def open_session(self, session_id, *, limits=None, seed=None) -> str:
        self.open.add(session_id)
        return session_id

    def exceeded(self, session_id) -> str | None:
        return None

    def refused(self, session_id) -> str | None:
        return None

    async def close_session(self, session_id) -> tuple[Call, ...]:
        if session_id not in self.open:
            return ()
        self.open.discard(session_id)
        call = Call(
            id=f"{session_id}/0",
            session_id=session_id,
            index=0,
            parent_id=None,
            fork_reason=None,
            idempotency_key=None,
            messages=[{"role": "user", "content": "hi"}],
            tools=[],
            renderer_id="toy",
            prompt_delta=(1, 2, 3),
            spans=(Span((4, 5), (-0.5, -0.25), self.version, "e"),),
            finish_reason=FinishReason.STOP,
            parse_state=ParseState.OK,
            response={"role": "assistant", "content": "x"},
            started_at=0.0,
            finished_at=0.0,
        )
        self.ledger.record_call(call)
        return (call,)


class ScriptedTask:
    """Rewards alternate 0, 1 within a group unless `script` says otherwise."""

    name = "toy"

    def __init__(self, script=None) -> None:
        self.counter = itertools.count()
        self.script = script
        self.running = 0
        self.most_running = 0

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance("toy", seed, f"family{seed % 2}", 1, 2 + seed % 2)

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


class OnlySeed(ScriptedTask):
    """Every seed but one asks the same, which nobody measures."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def content_id(self, instance: TaskInstance) -> str:
        return f"special {instance.task}" if instance.seed == self.seed else "ordinary"


@pytest.fixture
def ledger(tmp_path):
    with Ledger.create(tmp_path) as opened:
        yield opened


def mix_of(task, **changes) -> TaskMix:
    share = TaskShare("toy", 1.0, lambda i: task.instance(task.train_seed(i)))
    return TaskMix([share], **changes)


def build(ledger, task, **changes):
    gate = ScriptedGate(ledger)
    runner = RolloutRunner(
        tasks={"toy": task}, gate=gate, ledger=ledger, base_url="http://x", model="m"
    )
    values = {
        "stage": "rl",
        "group_size": 4,
        "groups_per_batch": 2,
        "concurrency": 8,
        "staleness": 1,
        "temperature": 1.0,
        "max_tokens": 100,
    }
    config = SourceConfig(**{**values, **changes})
    source = RolloutSource(
        config,
        runner=runner,
        ledger=ledger,
        mix=mix_of(task),
    )
    return gate, source


async def settle(source: RolloutSource) -> None:
    """Until the ready queue is full and nothing is in flight."""
    async with asyncio.timeout(TIMEOUT):
        await asyncio.sleep(0)
        while source._rollouts:
            await asyncio.wait(list(source._rollouts))
            await asyncio.sleep(0)


async def test_batches_hold_whole_groups_with_zero_sum_advantages(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task)
    source.start()
    for index in range(3):
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert batch.index == index
        assert len(batch.members) == 8
        assert sum(m.advantage * m.multiplicity for m in batch.members) == pytest.approx(0)
        for member in batch.members:
            (segment,) = member.segments
            assert segment.ids == (1, 2, 3, 4, 5)
            assert segment.train_mask == (False, False, False, True, True)
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()
    assert task.most_running <= 8
    assert ledger.conservation("rl").closes


async def test_the_ready_queue_is_bounded_while_nobody_trains(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    await settle(source)
    assert source.ready_groups >= 4
    dispatched = source.cursor
    for _ in range(50):
        await asyncio.sleep(0)
    assert source.cursor == dispatched
    assert source.ready_groups <= 4 + 2  # two more groups may have been in flight
    await source.stop()


async def test_stale_trajectories_are_dropped_when_the_batch_is_cut(ledger):
    gate, source = build(ledger, ScriptedTask())
    source.start()
    await settle(source)
    assert source.ready_groups >= 2
    gate.version = 3
    batch = await source.cut(3, TIMEOUT)
    assert batch is not None
    versions = {v for m in batch.members for s in m.segments for v in s.versions if v >= 0}
    assert min(versions) >= 2
    await source.stop()
    assert ledger.drop_counts("rl")[DropReason.STALE] >= 8


async def test_environment_failures_leave_the_baseline_alone_and_are_padded(ledger):
    async def script(number, instance):
        if number % 4 == 0:
            raise RuntimeError("boom")
        return RolloutResult(Outcome.OK, {"reward": float(number % 4 == 1)})

    _, source = build(ledger, ScriptedTask(script), groups_per_batch=1)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    assert len(batch.members) == 3
    assert sum(m.multiplicity for m in batch.members) == 4
    assert max(m.advantage for m in batch.members) == pytest.approx(2 / 3)
    await source.stop()
    assert source.take_window().env_failed >= 1
    failed = [s for s in ledger.sessions(stage="rl") if s.outcome is Outcome.ENV_FAILED]
    assert failed[0].reason == "RuntimeError: boom"


async def test_groups_without_signal_are_dropped_and_counted(ledger):
    async def script(number, instance):
        return RolloutResult(Outcome.OK, {"reward": 1.0 if number < 8 else float(number % 2)})

    _, source = build(ledger, ScriptedTask(script))
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    await source.stop()
    assert ledger.drop_counts("rl")[DropReason.NO_SIGNAL] == 8


async def test_an_environment_that_always_fails_ends_the_stage_with_its_reason(ledger):
    async def script(number, instance):
        raise OSError("no sandbox")

    _, source = build(ledger, ScriptedTask(script))
    source.start()
    with pytest.raises(UserError, match=r"in a row .* OSError: no sandbox"):
        await source.cut(1, TIMEOUT)
    await source.stop()
    assert source.take_window().env_failed >= FAILURES_IN_A_ROW


async def test_a_reward_that_is_no_number_is_an_environment_failure(ledger):
    async def script(number, instance):
        return RolloutResult(Outcome.OK, {"reward": float("nan")})

    task = ScriptedTask(script)
    gate, _ = build(ledger, task)
    runner = RolloutRunner(tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m")
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    finished = await runner.run(Ticket("s", "g", "rl", "train", task.instance(2), 1.0))
    assert finished.session.outcome is Outcome.ENV_FAILED
    assert "no finite reward" in finished.session.reason


async def test_a_hanging_task_service_is_cut_off(ledger, monkeypatch):
    monkeypatch.setattr("headrace.rollout.runner.GRACE_S", 0.01)

    async def script(number, instance):
        await asyncio.Event().wait()

    task = ScriptedTask(script)
    gate = ScriptedGate(ledger)
    runner = RolloutRunner(
        tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m", timeout_s=0.01
    )
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    finished = await runner.run(Ticket("s", "g", "rl", "train", task.instance(2), 1.0))
    assert finished.session.outcome is Outcome.ENV_FAILED
    assert "hung" in finished.session.reason
    assert not gate.open


async def test_sync_mode_dispatches_one_batch_at_a_time(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task, synchronous=True)
    source.start()
    for index in range(2):
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert len(batch.members) == 8
        assert source.in_flight == 0
        assert source.cursor == 2 * (index + 1)
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()


async def test_cut_gives_up_at_its_deadline(ledger):
    async def script(number, instance):
        await asyncio.Event().wait()

    _, source = build(ledger, ScriptedTask(script))
    source.start()
    assert await source.cut(1, 0.02) is None
    await source.stop()
    assert ledger.outcome_counts("rl") == {"open": 8}
    ledger.stage_started("rl")
    ledger.stage_finished("rl", 1.0)
    assert ledger.outcome_counts("rl") == {Outcome.CANCELLED: 8}


async def test_resume_replays_cut_batches_and_completes_groups(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        _, source = build(ledger, ScriptedTask())
        source.start()
        first = await source.cut(1, TIMEOUT)
        second = await source.cut(1, TIMEOUT)
        assert first is not None
        assert second is not None
        ledger.commit_batch("rl", 0, 1)
        ledger.checkpointed("rl", 1, "ck1")
        # A crash: nothing is told to stop; batch 1 was cut but never trained.
        for task in list(source._rollouts):
            task.cancel()
        await asyncio.gather(*source._rollouts, return_exceptions=True)
        await source.stop()
        finished = {s.id for s in ledger.sessions(stage="rl") if s.outcome is Outcome.OK} - {
            m.session_id for m in first.members
        }
    with Ledger.resume(tmp_path) as ledger:
        recovery = ledger.recover("rl")
        assert recovery.step == 1
        task = ScriptedTask()
        gate = ScriptedGate(ledger)
        runner = RolloutRunner(
            tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m"
        )
        source = RolloutSource(
            SourceConfig("rl", 4, 2, 8, 1, 1.0, 100),
            runner=runner,
            ledger=ledger,
            mix=mix_of(task, state=1000),
        )
        source.resume(recovery)
        assert source.replaying
        source.start()
        replayed = await source.cut(1, TIMEOUT)
        assert replayed is not None
        assert replayed == second
        assert not source.replaying
        ledger.commit_batch("rl", 1, 2)
        trained = {m.session_id for m in replayed.members}
        for index in range(2, 6):
            batch = await source.cut(1, TIMEOUT)
            assert batch is not None
            ids = {m.session_id for m in batch.members}
            assert not ids & trained
            trained |= ids
            ledger.commit_batch("rl", index, index + 1)
        await source.stop()
        assert finished <= trained
        assert ledger.conservation("rl").closes


async def test_several_tasks_share_a_stage_and_are_counted_apart(ledger):
    """Groups alternate 3 to 1, whatever order their rollouts end in; counts add up."""
    tasks = {"toy": ScriptedTask(), "other": ScriptedTask()}
    tasks["other"].instance = lambda seed: TaskInstance("other", seed, "f", 1, 1)
    runner = RolloutRunner(
        tasks=tasks, gate=ScriptedGate(ledger), ledger=ledger, base_url="", model="m"
    )
    mix = TaskMix(
        [
            TaskShare("toy", 3.0, lambda i: tasks["toy"].instance(2 * i)),
            TaskShare("other", 1.0, lambda i: tasks["other"].instance(2 * i)),
        ],
        # Seed 4 is measured, of one of the tasks.
        held_out=HeldOut({"toy": OnlySeed(4), "other": OnlySeed(-1)}, [tasks["toy"].instance(4)]),
    )
    config = SourceConfig("rl", 4, 2, 8, 1, 1.0, 100)
    source = RolloutSource(config, runner=runner, ledger=ledger, mix=mix)
    source.start()
    for index in range(8):
        assert await source.cut(1, TIMEOUT) is not None
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()
    sessions = list(ledger.sessions(stage="rl"))
    order = list(dict.fromkeys((s.group_id, s.task) for s in sessions))
    assert [task for _, task in sorted(order)][:8] == [
        "toy", "toy", "other", "toy", "toy", "toy", "other", "toy",
    ]  # fmt: skip
    assert 4 not in {s.instance["seed"] for s in sessions if s.task == "toy"}
    assert 4 in {s.instance["seed"] for s in sessions if s.task == "other"}
    counts = source.take_window().tasks
    assert sum(c.trained for c in counts.values()) == 16
    for name, found in counts.items():
        ended = [s for s in sessions if s.task == name and s.outcome is Outcome.OK]
        assert found.finished == found.scored == len(ended)
        assert found.reward_sum == sum(s.rewards["reward"] for s in ended)
        assert found.dispatched == len({s.group_id for s in sessions if s.task == name})
    saved = ledger.get_state(cursor_key("rl"))
    assert saved["toy"][0] == saved["toy"][1] + 1  # the one that was skipped
    assert saved["other"][0] == saved["other"][1]


async def test_evaluation_counts_by_family_and_continues(ledger):
    calls = []

    async def script(number, instance):
        calls.append(instance.seed)
        if instance.seed == 5:
            raise RuntimeError("environment")
        return RolloutResult(Outcome.OK, {"reward": float(instance.seed % 4 == 1)})

    task = ScriptedTask(script)
    gate = ScriptedGate(ledger)
    runner = RolloutRunner(tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m")
    instances = [task.instance(task.evaluation_seed(i)) for i in range(6)]

    async def measure():
        return await evaluate(
            "start",
            instances,
            runner=runner,
            ledger=ledger,
            temperature=1.0,
            concurrency=3,
            progress=lambda _: None,
        )

    result = await measure()
    assert (result["n"], result["ok"], result["env_failed"]) == (5, 2, 1)
    assert result["families"] == {"family1": [2, 5]}
    assert result["multi_turn"] == [2, 5]
    assert result["instances"] == {"1": 1, "3": 0, "7": 0, "9": 1, "11": 0}
    again = await measure()
    assert {**again, "wall_s": 0} == {**result, "wall_s": 0}
    assert len(calls) == 6
    assert ledger.drop_counts()[DropReason.EVALUATION] == 6
