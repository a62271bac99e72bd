"""Loop modes of the rollout source: in step with the trainer, and what holds it back."""

import asyncio

import pytest
from stand_ins import TIMEOUT, ScriptedTask, build, mix_of, settle

from headrace.rollout.choosing.sharing import cursor_key
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import Outcome
from headrace.rollout.window import Hold, HoldTimer
from headrace.tasks.types import RolloutResult


def lags(batch, version: int) -> set[int]:
    """Publications that trained tokens are behind."""
    return {version - v for m in batch.members for s in m.segments for v in s.versions if v >= 0}


async def test_sync_trains_every_token_on_the_newest_version(ledger):
    gate, source = build(ledger, ScriptedTask(), mode="sync", staleness=0)
    source.start()
    for version in range(1, 6):
        batch = await source.cut(version, TIMEOUT)
        assert batch is not None
        assert lags(batch, version) == {0}
        assert source.in_flight == 0
        ledger.commit_batch("rl", batch.index, version)
        await source.settle()
        gate.version = version + 1
        source.published(version + 1)
    assert {b.tau for b in ledger.batches("rl")} == {0}
    assert source.cursor == 10
    await source.stop()


async def test_one_step_off_is_one_publication_behind_and_never_more(ledger):
    """The next batch is generated while this one trains, and ends before new weights come."""
    task = ScriptedTask()
    gate, source = build(ledger, task, mode="one_step_off", staleness=1)
    source.start()
    for version in range(1, 8):
        batch = await source.cut(version, TIMEOUT)
        assert batch is not None
        assert lags(batch, version) == ({0} if version == 1 else {1})
        assert source.cursor <= 2 * (version + 1), "one batch ahead, not two"
        await asyncio.sleep(0)
        ledger.commit_batch("rl", batch.index, version)  # it trains; the next is generated
        await source.settle()
        assert source.in_flight == 0
        assert source.ready_groups == 2
        assert source.cursor == 2 * (version + 1)
        gate.version = version + 1
        source.published(version + 1)
    await source.stop()
    assert ledger.conservation("rl").closes


async def test_a_batch_ahead_without_signal_is_replaced_under_the_newer_weights(ledger):
    async def script(number, instance):
        return RolloutResult(Outcome.OK, {"reward": float(number % 2 and not 8 <= number < 16)})

    gate, source = build(ledger, ScriptedTask(script), mode="one_step_off", staleness=1)
    source.start()
    for version in (1, 2):
        batch = await source.cut(version, TIMEOUT)
        assert batch is not None
        assert lags(batch, version) == {0}
        ledger.commit_batch("rl", batch.index, version)
        await source.settle()
        gate.version = version + 1
        source.published(version + 1)
    await source.stop()


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
async def test_a_resumed_mode_in_step_asks_only_for_what_a_batch_lacks(tmp_path, mode):
    gate_open = asyncio.Event()

    async def script(number, instance):
        if number >= 5:  # of the second group only one rollout ends before the crash
            await gate_open.wait()
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    with Ledger.create(tmp_path) as ledger:
        task = ScriptedTask(script)
        _, source = build(ledger, task, mode=mode, staleness=1)
        source.start()
        assert await source.cut(1, 0.05) is None
        assert source.ready_groups == 1
        await source.stop()
    with Ledger.resume(tmp_path) as ledger:
        gate_open.set()
        recovery = ledger.recover("rl")
        assert len(recovery.ready) == len(recovery.incomplete) == 1
        _, source = build(ledger, ScriptedTask(), mode=mode, staleness=1)
        source.sharing.mix = mix_of(task, state=ledger.get_state(cursor_key("rl")))
        source.resume(recovery)
        source.start()
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert len({m.group_id for m in batch.members}) == 2
        assert len(batch.members) == 8
        if mode == "one_step_off":
            await source.settle()
            assert source.ready_groups == 2
        await source.stop()


async def test_whole_versions_wait_for_rollouts_in_flight_and_begin_none(ledger):
    release = asyncio.Event()

    async def script(number, instance):
        if number < 8:
            await release.wait()
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    gate, source = build(ledger, ScriptedTask(script), whole_versions=True)
    source.start()
    assert await source.cut(1, 0.02) is None
    settling = asyncio.create_task(source.settle())
    await asyncio.sleep(0)
    assert source.in_flight == 8
    assert not settling.done()
    release.set()
    await asyncio.wait_for(settling, TIMEOUT)
    assert (source.in_flight, source.cursor) == (0, 2)
    assert source.take_window().held.keys() >= {Hold.PUBLICATION}
    gate.version = 2
    source.published(2)
    batch = await source.cut(1, TIMEOUT)  # cut at version 2: that one came meanwhile
    assert batch is not None
    ledger.commit_batch("rl", 0, 1)
    assert [b.current_version for b in ledger.batches("rl")] == [2]
    assert await source.cut(2, TIMEOUT) is not None
    for session in map(ledger.session, [s.id for s in ledger.sessions(stage="rl") if s.calls]):
        assert len({s.weight_version for c in session.policy_calls for s in c.spans}) == 1
    await source.stop()


async def test_what_holds_a_source_back_is_timed_by_reason(ledger):
    now = [0.0]
    timer = HoldTimer(lambda: now[0])
    for reason, seconds in ((Hold.READY, 2.0), (None, 3.0), (Hold.CONCURRENCY, 4.0)):
        timer.switch(reason)
        now[0] += seconds
    assert timer.take() == {Hold.READY: 2.0, Hold.CONCURRENCY: 4.0}
    now[0] += 1.0
    assert timer.take() == {Hold.CONCURRENCY: 1.0}, "what goes on is in both windows"

    _, source = build(ledger, ScriptedTask(), ready_batches=1)
    source.start()
    await settle(source)
    held = source.take_window().held
    assert held[Hold.READY] > 0.0
    assert source.ready_groups >= 2
    await source.stop()
