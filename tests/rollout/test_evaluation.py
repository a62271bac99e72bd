"""Evaluations against a scripted task and the real ledger."""

from stand_ins import ScriptedTask, runner_of

from headrace.rollout.evaluation import evaluate
from headrace.rollout.types import DropReason, Outcome
from headrace.tasks.types import RolloutResult


async def test_evaluation_counts_by_family_and_continues(ledger):
    calls = []

    async def script(number, instance):
        calls.append(instance.seed)
        if instance.seed == 5:
            raise RuntimeError("environment")
        return RolloutResult(Outcome.OK, {"reward": float(instance.seed % 4 == 1)})

    task = ScriptedTask(script)
    runner = runner_of({"toy": task}, ledger)
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
