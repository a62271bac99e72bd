"""The runner and the rollout source when rollouts fail: names, penalties, retries, resumes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from stand_ins import TIMEOUT, ScriptedGate, ScriptedTask, build, runner_of

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import FailureRules, Rule
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import Ticket
from headrace.rollout.types import DropReason, Outcome
from headrace.tasks.types import RolloutResult, TaskInstance

Script = Callable[[int], Awaitable[RolloutResult]]


def scored(number: int) -> RolloutResult:
    return RolloutResult(Outcome.OK, {"reward": float(number % 2)})


def open_source(
    ledger: Ledger, script: Script, rules: FailureRules
) -> tuple[RolloutSource, ScriptedGate]:
    """A source whose rollouts do what `script` says of their numbers, from 1."""

    async def numbered(number: int, instance: TaskInstance) -> RolloutResult:
        await asyncio.sleep(0)
        return await script(number + 1)

    gate, source = build(
        ledger,
        ScriptedTask(numbered),
        groups_per_batch=1,
        concurrency=4,
        mode="sync",
        failures=rules,
    )
    return source, gate


@pytest.mark.parametrize(
    ("limit", "refusal", "failure", "outcome"),
    [
        ("session_expired", None, FailureReason.SESSION_TIME, Outcome.TIMEOUT),
        ("session_call_limit", None, FailureReason.SESSION_CALLS, Outcome.AGENT_FAILED),
        (None, "overloaded", FailureReason.ENGINE_OVERLOADED, Outcome.ENV_FAILED),
        (None, "engine_closed", FailureReason.ENGINE_DIED, Outcome.ENV_FAILED),
        (None, "engine_timeout", FailureReason.ENGINE_DEADLINE, Outcome.ENV_FAILED),
        (None, "unsupported", FailureReason.PROTOCOL_MISUSE, Outcome.ENV_FAILED),
        (None, None, FailureReason.TASK_RAISED, Outcome.ENV_FAILED),
    ],
)
async def test_the_gateway_knows_why_an_agent_could_not_go_on(
    ledger, limit, refusal, failure, outcome
):
    async def script(number, instance):
        raise RuntimeError("400")

    task = ScriptedTask(script)
    runner = runner_of({"toy": task}, ledger, ScriptedGate(ledger, limit=limit, refusal=refusal))
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    ticket = Ticket(
        "s", "g", "rl", "train", task.instance(1), 1.0, penalties={FailureReason.SESSION_TIME: -1.0}
    )
    finished = await runner.run(ticket)
    (kept,) = ledger.sessions()
    assert (kept.failure, kept.outcome) == (finished.session.failure, kept.outcome)
    assert (kept.failure, kept.outcome) == (failure, outcome)
    rewards = {Outcome.ENV_FAILED: None, Outcome.TIMEOUT: -1.0, Outcome.AGENT_FAILED: 0.0}
    assert kept.reward == finished.reward == rewards[outcome]
    assert ledger.failure_counts() == {failure: 1}


async def test_a_failed_place_is_attempted_again_until_the_retries_are_used_up(ledger):
    async def script(number):
        if number in (2, 5, 6):  # one place of the first group, and both its retries
            raise RuntimeError("boom")
        return scored(number)

    rules = FailureRules({FailureReason.TASK_RAISED: Rule.RETRY}, retries=2)
    source, gate = open_source(ledger, script, rules)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    await source.stop()
    assert batch is not None
    window = source.take_window()
    assert (window.retried, window.failures[FailureReason.TASK_RAISED]) == (2, 3)
    assert len(gate.opened) == len(set(gate.opened)) == 6, "each attempt is a new session"
    assert len(batch.members) == 3
    assert sum(m.multiplicity for m in batch.members) == 4, "the last failure is padded for"
    assert len(ledger.rollouts("rl-000000")) == 4
    assert ledger.retried("rl-000000") == 2
    assert ledger.failure_counts("rl") == {FailureReason.TASK_RAISED: 3}
    ledger.commit_batch("rl", 0, 1)
    assert all(finding.held for finding in audit(ledger).values())
    assert ledger.conservation("rl").dropped == {DropReason.ENV_FAILED: 6}


async def test_scored_failures_leave_the_record_closed_when_retried_or_excluded(ledger):
    async def script(number):
        if number == 1:
            return RolloutResult(Outcome.TIMEOUT, {"reward": 0.0}, "slow")
        if number == 3:
            return RolloutResult(
                Outcome.OK, {"reward": 0.0}, "no tags", failure=FailureReason.NO_ANSWER
            )
        return RolloutResult(Outcome.OK, {"reward": 1.0 if number == 2 else 0.5})

    rules = FailureRules(
        {FailureReason.SESSION_TIME: Rule.RETRY, FailureReason.NO_ANSWER: Rule.EXCLUDE}
    )
    source, _ = open_source(ledger, script, rules)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    await source.stop()
    assert batch is not None
    assert sorted(m.advantage for m in batch.members) == pytest.approx([-1 / 6, -1 / 6, 1 / 3])
    assert {m.multiplicity for m in batch.members} == {1}
    ledger.commit_batch("rl", 0, 1)
    counts = ledger.failure_counts("rl")
    assert counts == {
        FailureReason.SESSION_TIME: 1,
        FailureReason.RETRIED: 1,
        FailureReason.NO_ANSWER: 1,
        FailureReason.EXCLUDED: 1,
    }
    account = ledger.conservation("rl")
    assert account.closes
    assert account.dropped == {DropReason.RETRIED: 2, DropReason.EXCLUDED: 2}
    # The baseline of what trained is the mean without them.
    assert all(finding.held for finding in audit(ledger).values())


async def test_a_crash_between_a_failure_and_its_retry_loses_neither_group_nor_bound(tmp_path):
    rules = FailureRules({FailureReason.TASK_RAISED: Rule.RETRY}, retries=1)
    with Ledger.create(tmp_path) as ledger:
        names = [f"s{i}" for i in range(4)]
        instance = {"task": "toy", "seed": 0, "family": "f", "level": 1, "min_turns": 1}
        ledger.dispatch("rl", "train", "rl-before", "toy", instance, names)
        for name, reward in zip(names[1:], (0.0, 1.0, 1.0), strict=True):
            ledger.finish(name, Outcome.OK, {"reward": reward})
        ledger.finish("s0", Outcome.ENV_FAILED, failure=FailureReason.TASK_RAISED)
        with pytest.raises(ValueError, match="no finished member"):
            ledger.dispatch("rl", "train", "rl-before", "toy", instance, ["x"], replaces=["y"])
        ledger.dispatch("rl", "train", "rl-before", "toy", instance, ["r0"], replaces=["s0"])
    with Ledger.resume(tmp_path) as ledger:
        recovery = ledger.recover("rl")
        assert [group.missing for group in recovery.incomplete] == [1]

        async def script(number):
            raise RuntimeError("again")

        source, _ = open_source(ledger, script, rules)
        source.resume(recovery)
        source.start()
        batch = await source.cut(1, TIMEOUT)
        await source.stop()
        assert batch is not None
        members = [s for s in ledger.sessions() if s.group_id == "rl-before"]
        assert len(members) == 6, "of two lost the one to a retry, the other to the crash"
        failed = [s for s in members if s.failure is FailureReason.TASK_RAISED]
        assert len(failed) == 2, "its one retry was used before the crash"
        assert sum(m.multiplicity for m in batch.members) == 4
        ledger.commit_batch("rl", 0, 1)
        assert ledger.conservation("rl").closes
