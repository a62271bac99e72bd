"""Batches that would cost too many groups without signal: smaller, or the end of the stage."""

import asyncio

import pytest
from stand_ins import TIMEOUT, ScriptedTask, build

from headrace.errors import UserError
from headrace.rollout.choosing.overgeneration import OvergenerationConfig
from headrace.rollout.choosing.pausing import TaskPauses
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult


async def one_in(share: int, number: int, size: int = 4) -> RolloutResult:
    """Signal in one group of `share`; the others fail."""
    await asyncio.sleep(0)
    hit = number // size % share == 0 and number % size == 0
    return RolloutResult(Outcome.OK, {"reward": float(hit)})


async def test_a_batch_that_costs_too_much_is_smaller_and_says_so_once(ledger):
    told: list[str] = []
    _, source = build(
        ledger,
        ScriptedTask(lambda number, _: one_in(8, number)),
        concurrency=4,
        groups_per_batch=4,
        dynamic=OvergenerationConfig(4.0, "shrink"),
        report=told.append,
    )
    source.start()
    sizes = []
    for index in range(5):
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        sizes.append(sum(batch.tasks.values()))
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()
    assert sizes == [2] * 5  # sixteen groups each, of which two have signal
    (line,) = told
    assert "16 groups were generated and 2 with signal wait for a batch of 4" in line
    assert "toy 2 of 16 at a pass rate of 3.1%" in line
    assert "make toy easier" in line
    window = source.take_window()
    assert window.small_batches == 5
    counts = window.of("toy")
    assert counts.decided / counts.trained == pytest.approx(8, rel=0.1)
    assert counts.with_signal / counts.decided == pytest.approx(1 / 8, rel=0.1)


async def test_a_stage_that_must_not_shrink_ends_with_remedies(ledger):
    async def always(number, instance):
        return RolloutResult(Outcome.OK, {"reward": 1.0})

    _, source = build(
        ledger, ScriptedTask(always), dynamic=OvergenerationConfig(3.0, "fail"), concurrency=4
    )
    source.start()
    with pytest.raises(
        UserError, match=r"6 groups .* toy 0 of 6 at a pass rate of 100.0%; make"
    ) as e:
        await source.cut(1, TIMEOUT)
    await source.stop()
    assert "make toy harder ([tasks.toy]" in str(e.value)
    assert "dynamic.max_overgeneration = 3" in str(e.value)


async def test_failed_environments_are_no_over_generation(ledger):
    async def script(number, instance):
        if number < 32:
            raise RuntimeError("boom")
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    _, source = build(
        ledger, ScriptedTask(script), dynamic=OvergenerationConfig(2.0, "fail"), concurrency=4
    )
    source.pauses = TaskPauses(["toy"], first_pause_s=0.01)
    source.start()
    assert await source.cut(1, TIMEOUT) is not None
    await source.stop()
