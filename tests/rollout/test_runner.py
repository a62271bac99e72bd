"""The runner of rollouts when a task answers what cannot be, or not at all."""

import asyncio

import pytest
from stand_ins import ScriptedGate, ScriptedTask, runner_of

from headrace.rollout.runner import Ticket
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (RolloutResult(Outcome.OK, {"reward": float("nan")}), "rewards.reward is nan"),
        (RolloutResult(Outcome.OK, {"reward": 1.01}), "rewards.reward is 1.01"),
        (RolloutResult(Outcome.OK, {"reward": 1, "x": float("inf")}), "rewards.x is inf"),
        (RolloutResult(Outcome.AGENT_FAILED), "rewards.reward is missing"),
        (RolloutResult(Outcome.CANCELLED), "outcome is cancelled"),
        (RolloutResult(Outcome.ENV_FAILED, detail={"a": object()}), "JSON cannot hold"),
        (None, "result is None"),
    ],
)
async def test_a_result_that_cannot_be_is_an_environment_failure(ledger, result, says):
    async def script(number, instance):
        return result

    task = ScriptedTask(script)
    runner = runner_of({"toy": task}, ledger)
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    finished = await runner.run(Ticket("s", "g", "rl", "train", task.instance(2), 1.0))
    assert finished.session.outcome is Outcome.ENV_FAILED
    assert says in finished.session.reason
    assert finished.reward is None


async def test_a_hanging_task_service_is_cut_off(ledger, monkeypatch):
    monkeypatch.setattr("headrace.rollout.runner.GRACE_S", 0.01)

    async def script(number, instance):
        await asyncio.Event().wait()

    task = ScriptedTask(script)
    gate = ScriptedGate(ledger)
    runner = runner_of({"toy": task}, ledger, gate, timeout_s=0.01)
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    finished = await runner.run(Ticket("s", "g", "rl", "train", task.instance(2), 1.0))
    assert finished.session.outcome is Outcome.ENV_FAILED
    assert "hung" in finished.session.reason
    assert not gate.open
