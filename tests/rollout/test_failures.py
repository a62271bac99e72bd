"""Reasons, rules and their documentation; how a failed rollout is told from its evidence."""

import re
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
from pydantic import ValidationError

from headrace.recipe import AgenticRlStage, FailuresTable, TripwiresTable
from headrace.rollout.failures.diagnosis import exception_reason, last_words, named
from headrace.rollout.failures.reasons import FailureReason, Fault
from headrace.rollout.failures.retrying import Retries
from headrace.rollout.failures.rules import (
    LIMIT_REASONS,
    FailureRules,
    Rule,
    WorkerDied,
    default_rule,
    end_reason,
    reasons_of,
)
from headrace.rollout.failures.tripwires import Thresholds
from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.types import (
    LIMIT_WORDS,
    Call,
    DropReason,
    FinishReason,
    Outcome,
    ParseState,
    Session,
    Span,
)
from headrace.sandbox.types import SandboxError, SandboxStartError
from headrace.tasks.types import RolloutResult

DOCS = Path(__file__).parents[2] / "docs" / "failures.md"


def test_every_reason_has_a_paragraph_that_tells_its_default() -> None:
    section = DOCS.read_text(encoding="utf-8").split("\n## Reasons\n")[1].split("\n## ")[0]
    found: dict[str, tuple[str, str]] = {}
    for part in section.split("\n### ")[1:]:
        heading, body = part.split("\n", 1)
        for name, text in re.findall(r"(?m)^`(\w+)`: ((?:.+\n?)+)", body):
            found[name] = (heading, text)
    assert found.keys() == {reason.value for reason in FailureReason}
    for reason in FailureReason:
        heading, text = found[reason]
        assert len(text) > 40, reason
        words = f"default: {default_rule(reason)}" if reason.has_rule else "no rule"
        assert words in heading, (reason, heading)


def test_every_way_out_has_a_reason() -> None:
    assert LIMIT_REASONS.keys() == LIMIT_WORDS.keys()
    for drop in DropReason:
        assert FailureReason(drop.value) in reasons_of(Outcome.OK, None, drop)
    for outcome in Outcome:
        assert (end_reason(outcome, None) is None) is (outcome is Outcome.OK)
    # What only repeats the outcome is not counted again; what adds to it is.
    assert reasons_of(Outcome.ENV_FAILED, FailureReason.TASK_HUNG, DropReason.ENV_FAILED) == (
        FailureReason.TASK_HUNG,
    )
    assert reasons_of(Outcome.TIMEOUT, None, DropReason.NO_SIGNAL) == (
        FailureReason.SESSION_TIME,
        FailureReason.NO_SIGNAL,
    )
    assert reasons_of(Outcome.OK, None, None) == ()


def test_the_recipe_knows_every_reason_that_has_a_rule_with_its_default() -> None:
    table = FailuresTable()
    ruled = {reason for reason in FailureReason if reason.has_rule}
    assert set(FailuresTable.model_fields) == {"retries", "penalty"} | {r.value for r in ruled}
    assert table.rules.rules == {reason: default_rule(reason) for reason in ruled}
    assert table.rules.penalties == {}
    assert AgenticRlStage(kind="agentic_rl", name="rl", updates=1).failures == table


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"task_hung": "penalise"}, "the environment failed, not the agent.*law L6.*retry"),
        ({"engine_died": "penalise"}, "the engine failed, not the agent"),
        ({"tampering": "retry"}, "until nobody notices"),
        ({"no_signal": "exclude"}, "no_signal has no rule"),
        ({"task_hung": "retry", "retries": 0}, "retries is 0"),
        ({"task_hung": "ignore"}, "'retry', 'exclude', 'pad' or 'penalise'"),
    ],
)
def test_rules_that_cannot_be_are_refused_with_the_reason(keys: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        FailuresTable.model_validate(keys)


def test_a_length_that_is_reached_at_once_is_refused() -> None:
    assert TripwiresTable(length_factor=2.5).thresholds == Thresholds(length_factor=2.5)
    with pytest.raises(ValidationError, match="reached at once"):
        TripwiresTable(length_factor=0.5)


def group(*members: tuple[Outcome, float | None, FailureReason | None]) -> list[ScoredRollout]:
    return [ScoredRollout(f"s{i}", *member) for i, member in enumerate(members)]


GOOD, BAD = (Outcome.OK, 1.0, None), (Outcome.OK, 0.0, None)
HUNG = (Outcome.ENV_FAILED, None, FailureReason.TASK_HUNG)
LONG = (Outcome.OK, 0.0, FailureReason.TRUNCATED)


def test_exclusion_shrinks_a_group_where_padding_repeats_siblings() -> None:
    rollouts = group(GOOD, BAD, HUNG, HUNG)
    padded = advantages(rollouts)
    assert padded.drop_reason is DropReason.GROUP_INVALID, "half of it is not enough to pad"
    rules = FailureRules({FailureReason.TASK_HUNG: Rule.EXCLUDE})
    excluded = advantages(rollouts, rules=rules)
    assert [(m.session_id, m.advantage, m.multiplicity) for m in excluded.members] == [
        ("s0", 0.5, 1),
        ("s1", -0.5, 1),
    ]
    assert excluded.dropped == (("s2", DropReason.ENV_FAILED), ("s3", DropReason.ENV_FAILED))
    # A rule of another reason changes nothing, and the exhausted retry of one falls back.
    other = FailureRules({FailureReason.TASK_RAISED: Rule.EXCLUDE})
    retry = FailureRules({FailureReason.TASK_HUNG: Rule.RETRY})
    assert advantages(rollouts, rules=other) == advantages(rollouts, rules=retry) == padded
    assert advantages(group(HUNG, HUNG), rules=rules).drop_reason is DropReason.GROUP_INVALID


def test_a_rule_takes_a_scored_failure_out_of_the_baseline() -> None:
    rollouts = group(GOOD, BAD, GOOD, LONG)
    assert advantages(rollouts).baseline == 0.5
    for rule, size in ((Rule.EXCLUDE, 3), (Rule.PAD, 4)):
        decision = advantages(rollouts, rules=FailureRules({FailureReason.TRUNCATED: rule}))
        assert decision.baseline == pytest.approx(2 / 3)
        assert decision.dropped == (("s3", DropReason.EXCLUDED),)
        assert sum(m.multiplicity for m in decision.members) == size


def test_no_rule_makes_a_rollout_without_a_reward_count() -> None:
    reward = dict.fromkeys(FailureReason, Rule.PENALISE)
    decision = advantages(group(GOOD, BAD, GOOD, HUNG), rules=FailureRules(reward))
    assert [m.session_id for m in decision.members] == ["s0", "s1", "s2"]


def call(finish: FinishReason, parse: ParseState, model: str | None = None) -> Call:
    return Call(
        id="c",
        session_id="s",
        index=0,
        parent_id=None,
        fork_reason=None,
        idempotency_key=None,
        messages=[],
        tools=[],
        renderer_id="toy",
        prompt_delta=(1,),
        spans=(Span((2,), (-0.5,), 1, "e"),),
        finish_reason=finish,
        parse_state=parse,
        response={},
        started_at=0.0,
        finished_at=0.0,
        model=model,
    )


FAILED = RolloutResult(Outcome.OK, {"reward": 0.0})
CUT = call(FinishReason.LENGTH, ParseState.TRUNCATED)
WHOLE = call(FinishReason.STOP, ParseState.OK)


@pytest.mark.parametrize(
    ("result", "calls", "failure", "outcome"),
    [
        (FAILED, [CUT], FailureReason.TRUNCATED, Outcome.OK),
        (
            FAILED,
            [WHOLE, call(FinishReason.STOP, ParseState.MALFORMED)],
            FailureReason.MALFORMED_CALL,
            Outcome.OK,
        ),
        (
            FAILED,
            [call(FinishReason.DEADLINE, ParseState.TRUNCATED)],
            FailureReason.ENGINE_DEADLINE,
            Outcome.ENV_FAILED,
        ),
        (FAILED, [CUT, WHOLE], None, Outcome.OK),
        (FAILED, [WHOLE, call(FinishReason.LENGTH, ParseState.TRUNCATED, "j")], None, Outcome.OK),
        (RolloutResult(Outcome.OK, {"reward": 1.0}), [CUT], None, Outcome.OK),
        (
            RolloutResult(Outcome.OK, {"reward": 0.0}, failure=FailureReason.TURN_LIMIT),
            [CUT],
            FailureReason.TURN_LIMIT,
            Outcome.OK,
        ),
        (
            RolloutResult(Outcome.TIMEOUT, {"reward": 0.0}),
            [],
            FailureReason.SESSION_TIME,
            Outcome.TIMEOUT,
        ),
        (
            RolloutResult(Outcome.OK, {"reward": 1.0}, failure=FailureReason.TAMPERING),
            [WHOLE],
            FailureReason.TAMPERING,
            Outcome.AGENT_FAILED,
        ),
        # Reasons that contradict the outcome are not believed.
        (
            RolloutResult(Outcome.ENV_FAILED, failure=FailureReason.TURN_LIMIT),
            [],
            FailureReason.ENV_FAILED,
            Outcome.ENV_FAILED,
        ),
        (RolloutResult(Outcome.OK, {"reward": 0.0}, failure=FailureReason.STALE), [], None, "ok"),
    ],
)
def test_the_evidence_names_a_failure(result, calls, failure, outcome) -> None:
    found = named(last_words(result, calls))
    assert (found.failure, found.outcome) == (failure, outcome)
    if failure in (FailureReason.TAMPERING, FailureReason.TRUNCATED):
        assert found.rewards["reward"] == 0.0
    if failure is FailureReason.ENGINE_DEADLINE:
        assert "reward" not in found.rewards


def test_exceptions_are_told_apart() -> None:
    errors = {
        SandboxStartError("x"): FailureReason.SANDBOX_START,
        SandboxError("x"): FailureReason.SANDBOX_DIED,
        WorkerDied("x"): FailureReason.WORKER_DIED,
        ConnectionRefusedError("x"): FailureReason.TASK_UNAVAILABLE,
        KeyError("x"): FailureReason.TASK_RAISED,
    }
    request = httpx.Request("POST", "http://x")
    for status, reason in {
        400: FailureReason.PROTOCOL_MISUSE,
        429: FailureReason.ENGINE_OVERLOADED,
        503: FailureReason.ENGINE_DIED,
        504: FailureReason.ENGINE_DEADLINE,
    }.items():
        response = httpx.Response(status, request=request)
        for client in (anthropic, openai):
            refused = client.APIStatusError("x", response=cast(Any, response), body=None)
            assert exception_reason(refused) is reason
    for client in (anthropic, openai):
        late = client.APITimeoutError(cast(Any, request))
        assert exception_reason(late) is FailureReason.ENGINE_DEADLINE
    assert all(exception_reason(error) is reason for error, reason in errors.items())
    assert all(reason.fault is Fault.ENVIRONMENT for reason in errors.values())


def test_retries_are_counted_for_each_place() -> None:
    retries = Retries(FailureRules({FailureReason.TASK_HUNG: Rule.RETRY}, retries=2))

    def hung(name: str) -> Session:
        return Session(
            name, "rl", "train", "t", {}, "g", Outcome.ENV_FAILED, failure=FailureReason.TASK_HUNG
        )

    assert retries.again(hung("a0"))
    retries.follow("a0", "a1")
    assert retries.again(hung("a1"))
    retries.follow("a1", "a2")
    assert not retries.again(hung("a2"))
    assert retries.again(hung("b0")), "another place has its own"
    retries.resume("c3", 2)
    assert not retries.again(hung("c3")), "attempts before a crash count"
    assert not retries.again(Session("d", "rl", "train", "t", {}, "g", Outcome.OK))
