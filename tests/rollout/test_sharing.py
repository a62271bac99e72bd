"""Several tasks in one stage: ratios, limits, counts, and rules that move the mix."""

import asyncio

import msgspec
import pytest
from stand_ins import TIMEOUT, ScriptedTask, runner_of, source_of

from headrace.rollout.choosing.mixing import HeldOut, TaskMix, TaskShare
from headrace.rollout.choosing.ratios import AdaptiveRatios, RatioRule, TaskBounds
from headrace.rollout.choosing.sharing import cursor_key, ratios_key
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Outcome
from headrace.stages.task_metrics import ratio_errors
from headrace.tasks.types import RolloutResult, TaskInstance


class OnlySeed(ScriptedTask):
    """Every seed but one asks the same, which nobody measures."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def content_id(self, instance: TaskInstance) -> str:
        return f"special {instance.task}" if instance.seed == self.seed else "ordinary"


async def test_several_tasks_share_a_stage_and_are_counted_apart(ledger):
    """Groups alternate 3 to 1, whatever order their rollouts end in; counts add up."""
    tasks = {name: ScriptedTask(name=name) for name in ("toy", "other")}
    mix = TaskMix(
        [
            TaskShare("toy", 3.0, lambda i: tasks["toy"].instance(2 * i)),
            TaskShare("other", 1.0, lambda i: tasks["other"].instance(2 * i)),
        ],
        # Seed 4 is measured, of one of the tasks.
        held_out=HeldOut({"toy": OnlySeed(4), "other": OnlySeed(-1)}, [tasks["toy"].instance(4)]),
    )
    config = SourceConfig("rl", 4, 2, 8, 1, 1.0, 100)
    source = RolloutSource(config, runner=runner_of(tasks, ledger), ledger=ledger, mix=mix)
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


async def test_a_slow_task_takes_no_more_than_its_limit_and_others_take_the_room(ledger):
    gate = asyncio.Event()

    async def wait(number, instance):
        await gate.wait()
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    tasks = {"slow": ScriptedTask(wait, "slow"), "fast": ScriptedTask(name="fast")}
    source = source_of(ledger, tasks, {"slow": (1.0, 8), "fast": (1.0, None)})
    source.start()
    for index in range(6):  # of fast groups alone, as no other ends
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert batch.tasks == {"fast": 2}
        assert source.sharing.running["slow"] == tasks["slow"].most_running == 8
        ledger.commit_batch("rl", index, index + 1)
    mix = source.sharing.mix
    assert ratio_errors(mix)["ratio_error"] > 0.2
    assert ratio_errors(mix)["trained_ratio_error"] == 0.5
    gate.set()
    for index in range(6, 40):
        assert await source.cut(1, TIMEOUT) is not None
        ledger.commit_batch("rl", index, index + 1)
    assert ratio_errors(mix)["ratio_error"] < 0.05
    assert tasks["slow"].most_running == 8
    await source.stop()
    assert source.sharing.running.total() == 0


async def test_a_synchronous_batch_waits_for_a_full_task_instead_of_giving_its_place_away(ledger):
    tasks = {"slow": ScriptedTask(name="slow"), "fast": ScriptedTask(name="fast")}
    shares = {"slow": (1.0, 4), "fast": (1.0, None)}
    source = source_of(ledger, tasks, shares, mode="sync")
    source.config = msgspec.structs.replace(source.config, groups_per_batch=6)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    assert batch.tasks == {"slow": 3, "fast": 3}
    assert tasks["slow"].most_running == 4
    await source.stop()


async def test_a_rule_moves_the_mix_and_a_resume_goes_on_with_it(tmp_path):
    async def hopeless(number, instance):
        return RolloutResult(Outcome.OK, {"reward": 0.0})

    def ratios(state=None):
        bounds = {n: TaskBounds(0.5, 0.1) for n in ("right", "hopeless")}
        return AdaptiveRatios(RatioRule("success", step=0.1, every=2), bounds, state=state)

    tasks = {"right": ScriptedTask(name="right"), "hopeless": ScriptedTask(hopeless, "hopeless")}
    shares = {"right": (1.0, None), "hopeless": (1.0, None)}
    with Ledger.create(tmp_path) as ledger:
        source = source_of(ledger, tasks, shares, ratios=ratios())
        source.start()
        for index in range(20):
            assert await source.cut(1, TIMEOUT) is not None
            ledger.commit_batch("rl", index, index + 1)
        found = source.sharing.mix.ratios
        assert found == pytest.approx({"right": 0.9, "hopeless": 0.1})
        window = source.take_window().tasks
        assert window["hopeless"].dropped > 0 == window["hopeless"].trained
        assert window["right"].trained == 40
        assert window["right"].turns == len(window["right"].seconds) == window["right"].finished
        middle, late = (window["right"].seconds_at(q) for q in (0.5, 0.9))
        assert middle is not None
        assert late is not None
        assert 0 <= middle <= late
        await source.stop()
        state, kept = source.sharing.mix.state, ledger.get_state(ratios_key("rl"))
    with Ledger.resume(tmp_path) as ledger:
        assert ledger.get_state(cursor_key("rl")) == state
        assert ledger.get_state(ratios_key("rl")) == kept
        again = source_of(ledger, tasks, shares, ratios=ratios(kept))
        assert again.sharing.mix.ratios == pytest.approx(found)
