"""A rollout source after a crash: batches, groups and estimates of difficulty go on."""

import asyncio

from stand_ins import TIMEOUT, ScriptedTask, build, mix_of

from headrace.rollout.choosing.curriculum import (
    Curriculum,
    CurriculumConfig,
    choices_key,
    difficulty_key,
)
from headrace.rollout.choosing.mixing import HeldOut, TaskMix
from headrace.rollout.choosing.sharing import cursor_key
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult


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
        _, source = build(ledger, task, mix=mix_of(task, state=1000))
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


async def test_estimates_are_kept_with_the_decision_they_come_from(tmp_path):
    """After a crash at any moment the ledger's estimates are those of its decided groups."""

    def curriculum(ledger: Ledger | None) -> Curriculum:
        return Curriculum(
            CurriculumConfig(sampling="window", window=(0.0, 0.9), explore=0.0, half_life=1e9),
            choices=ledger.get_state(choices_key("rl")) if ledger else None,
            difficulty=ledger.get_state(difficulty_key("rl")) if ledger else None,
        )

    async def script(number, instance):
        await asyncio.sleep(0)
        solved = 1.0 if instance.family == "family0" else float(number % 2)
        return RolloutResult(Outcome.OK, {"reward": solved})

    def task_of() -> ScriptedTask:
        task = ScriptedTask(script)
        task.train_seed = lambda index: index  # both families
        return task

    def mix(task, ledger=None, state=None) -> TaskMix:
        held_out = HeldOut({"toy": task})
        return mix_of(task, state=state, held_out=held_out, curriculum=curriculum(ledger))

    with Ledger.create(tmp_path) as ledger:
        task = task_of()
        _, source = build(ledger, task, mix=mix(task), ready_batches=50)
        source.start()
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        ledger.commit_batch("rl", 0, 1)
        ledger.checkpointed("rl", 1, "ck1")
        # A crash: rollouts are cut off, nothing is told to stop.
        assert source._producer is not None
        source._producer.cancel()
        for running in list(source._rollouts):
            running.cancel()
        await asyncio.gather(*source._rollouts, return_exceptions=True)
        memory = source.sharing.mix.curriculum
        assert memory is not None

    with Ledger.resume(tmp_path) as ledger:
        kept = curriculum(ledger)
        assert kept.difficulty.state == memory.difficulty.state
        assert kept.choices == memory.choices
        decided = {s.group_id for s in ledger.sessions(stage="rl") if s.outcome is Outcome.OK}
        assert sum(e.groups for e in kept.difficulty.state.kinds.values()) <= len(decided)
        recovery = ledger.recover("rl")
        task = task_of()
        state = ledger.get_state(cursor_key("rl"))
        _, source = build(ledger, task, mix=mix(task, ledger, state), ready_batches=50)
        resumed = source.sharing.mix.curriculum
        assert resumed is not None
        before = resumed.difficulty.state.decided["toy"]
        source.resume(recovery)
        source.start()
        for index in range(1, 12):
            batch = await source.cut(1, TIMEOUT)
            assert batch is not None
            ledger.commit_batch("rl", batch.index, index + 1)
        await source.stop()
        # It goes on from there: the family that is always solved is known by now and left out.
        assert resumed.difficulty.state.decided["toy"] > before
        newest = sorted({(s.group_id, s.instance["family"]) for s in ledger.sessions(stage="rl")})
        assert {family for _, family in newest[-10:]} == {"family1"}
        assert resumed.counts["toy"]["skipped.too_easy"] > 0
