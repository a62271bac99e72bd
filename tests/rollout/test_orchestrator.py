"""The rollout source against scripted tasks and the real ledger: what it dispatches and cuts."""

import asyncio

import pytest
from stand_ins import TIMEOUT, ScriptedGate, ScriptedTask, build, settle

from headrace.errors import UserError
from headrace.rollout.choosing.pausing import FAILURES_IN_A_ROW, TaskPauses
from headrace.rollout.types import DropReason, Outcome
from headrace.tasks.types import RolloutResult


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
    assert source.ready_groups <= 4 + 4  # those in flight when it was full come on top
    await source.stop()


async def test_rollouts_give_way_little_by_little_while_groups_pile_up(ledger):
    """All or nothing would let a trainer run dry, then flood it with rollouts of one age."""
    task = ScriptedTask()
    _, source = build(ledger, task, concurrency=16, ready_batches=4)  # eight groups
    source.start()
    seen = set()
    async with asyncio.timeout(TIMEOUT):
        while source.ready_groups < 7:
            seen.add((source.ready_groups, source.in_flight))
            await asyncio.sleep(0)
    assert max(flying for ready, flying in seen if ready <= 2) > 8
    assert max(flying for ready, flying in seen if ready >= 6) <= 8
    await source.stop()


async def test_the_oldest_weights_are_cut_first(ledger):
    """A group that came late because it is slow would be stale before younger ones are used up."""
    gate: ScriptedGate

    async def script(number, instance):
        gate.version = 4 if number // 4 == 2 else 5  # one group at a time, four rollouts each
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    gate, source = build(ledger, ScriptedTask(script), concurrency=4)
    source.start()
    await settle(source)
    assert source.ready_groups >= 3
    batch = await source.cut(5, TIMEOUT)
    assert batch is not None
    assert {m.group_id for m in batch.members} == {"rl-000000", "rl-000002"}
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
    source.pauses = TaskPauses(["toy"], first_pause_s=0.01, give_up_s=0.05)
    source.start()
    with pytest.raises(UserError, match=r"has worked for 0.05 s.* OSError: no sandbox"):
        await source.cut(1, TIMEOUT)
    await source.stop()
    assert source.take_window().env_failed >= FAILURES_IN_A_ROW


async def test_sync_mode_dispatches_one_batch_at_a_time(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task, mode="sync")
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
