"""Tripwires on made-up histories: what trips each, and what ordinary training may do."""

import random

import msgspec
import pytest

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.tripwires import (
    Mark,
    Seen,
    Thresholds,
    Tripwire,
    Tripwires,
    held_out_fall,
    identical_in_group,
    identical_output,
    output_hash,
    seen,
)
from headrace.rollout.record.rows import Evaluation
from headrace.rollout.types import Call, FinishReason, Outcome, ParseState, Session


def said(*turns: dict) -> tuple[Call, ...]:
    return tuple(
        Call(
            id=str(i),
            session_id="s",
            index=i,
            parent_id=None,
            fork_reason=None,
            idempotency_key=None,
            messages=[],
            tools=[],
            renderer_id="toy",
            prompt_delta=(1,),
            spans=(),
            finish_reason=FinishReason.STOP,
            parse_state=ParseState.OK,
            response=turn,
            started_at=0.0,
            finished_at=0.0,
        )
        for i, turn in enumerate(turns)
    )


def rollout(
    wires: Tripwires,
    number: int,
    *,
    text: str = "3",
    reward: float | None = 1.0,
    expected: str | None = None,
    group: int | None = None,
    failure: FailureReason | None = None,
) -> None:
    session = Session(
        id=f"s{number}",
        stage="rl",
        purpose="train",
        task="t",
        instance={"seed": number if group is None else group},
        group_id=f"g{number if group is None else group}",
        outcome=Outcome.OK,
        reason="tampering: looks into a process" if failure else "",
        rewards={} if reward is None else {"reward": reward},
        calls=said({"content": text}),
        failure=failure,
    )
    wires.see(session, {} if expected is None else {"expected": expected})


def evaluation(label: str, success: float, n: int = 200, task: str = "t") -> Evaluation:
    return Evaluation(label, task, "rl", n, success, 0.0, 1.0, {"temperature": 1.0})


def alarm(wires: Tripwires, *evaluations: Evaluation) -> Tripwire | None:
    found = wires.check(evaluations)
    return None if found is None else found.wire


def test_outputs_are_compared_by_what_was_said_and_run() -> None:
    run = {"tool_calls": [{"id": "a", "function": {"name": "bash", "arguments": "{}"}}]}
    again = {"tool_calls": [{"id": "b", "function": {"name": "bash", "arguments": "{}"}}]}
    first = output_hash([{"content": "hm", "reasoning_content": "x", **run}, {"content": "3"}])
    assert first == output_hash([{"content": " hm\n", **again}, {"content": "3"}])
    assert first != output_hash([{"content": "hm", **run}, {"content": "4"}])
    assert first != output_hash([{"content": "3"}])
    assert output_hash([{"content": ""}]) == output_hash(()) == ""


def test_tampering_trips_and_names_who_did_it() -> None:
    wires = Tripwires(Thresholds(tampering=2))
    rollout(wires, 0, failure=FailureReason.TAMPERING, reward=0.0)
    assert alarm(wires) is None
    rollout(wires, 1)
    rollout(wires, 2, failure=FailureReason.TAMPERING, reward=0.0)
    found = wires.check([])
    assert found is not None
    assert (found.wire, found.sessions) == (Tripwire.TAMPERING, ("s2", "s0"))
    assert "2 of the last 3 rollouts" in found.words
    assert alarm(Tripwires(Thresholds(tampering=0))) is None


@pytest.mark.parametrize(
    ("expected", "trips"),
    [
        # A verifier that takes one answer for every problem.
        (lambda i: str(i), True),
        # Nobody says what is right: the same thing everywhere is suspicious.
        (lambda i: None, True),
        # The problems have one answer.
        (lambda i: "3", False),
        # ... or mostly: greatest common divisors are 1 more often than not.
        (lambda i: "3" if i % 10 < 6 else str(i), False),
    ],
)
def test_one_output_for_many_problems_trips_unless_they_have_one_answer(expected, trips) -> None:
    wires = Tripwires(Thresholds())
    for i in range(31):
        rollout(wires, i, expected=expected(i))
    assert alarm(wires) is None, "too few problems"
    for i in range(31, 100):
        rollout(wires, i, expected=expected(i))
    found = wires.check([])
    assert (found is not None) is trips
    if found is not None:
        assert found.wire is Tripwire.IDENTICAL_OUTPUT
        assert len(found.sessions) == 5


def test_what_earns_nothing_or_differs_is_no_identical_output() -> None:
    wires = Tripwires(Thresholds())
    for i in range(100):
        rollout(wires, i, reward=0.0)  # a model that cannot yet do anything says one thing
        rollout(wires, 1000 + i, text=f"rm {i}.log")
    assert alarm(wires) is None
    assert wires.measures()["identical_output"] == 0.0
    # Many rollouts of one problem are one problem.
    share, found = identical_output(
        [Seen(f"s{i}", "g", "t", "t/1", "o", None, 1.0, 3) for i in range(64)]
    )
    assert (share, found) == (0.0, [])


def test_a_policy_without_variety_trips_when_asked_for() -> None:
    def history(share: float) -> Tripwires:
        wires = Tripwires(Thresholds(identical_in_group=0.9))
        for i in range(200):
            same = i // 4 < 50 * share
            rollout(wires, i, group=i // 4, text=f"{i // 4} {'' if same else i}")
        return wires

    assert alarm(history(0.8)) is None
    assert alarm(history(1.0)) is Tripwire.IDENTICAL_IN_GROUP
    assert identical_in_group([])[0] == 0.0


def trained(wires: Tripwires, success: float, rng: random.Random) -> None:
    """A window of training rollouts with that success rate."""
    for _ in range(512):
        number = rng.randrange(10**9)
        rollout(wires, number, text=str(number), reward=float(rng.random() < success))


def test_a_held_out_fall_under_a_rising_reward_trips() -> None:
    rng = random.Random(0)
    wires = Tripwires(Thresholds())
    history = [evaluation("rl@10", 0.30)]
    trained(wires, 0.3, rng)
    assert alarm(wires, *history) is None
    for step, (reward, success) in enumerate([(0.5, 0.45), (0.6, 0.50), (0.9, 0.2)]):
        trained(wires, reward, rng)
        history.append(evaluation(f"rl@{20 + step}", success))
        kept = wires.state
        found = wires.check(history)
    assert found is not None
    assert found.wire is Tripwire.HELD_OUT_FALL
    assert "from 50.0% (rl@21) to 20.0% (rl@22)" in found.words
    # What was seen survives a resume; looking twice changes nothing.
    saved = msgspec.json.decode(msgspec.json.encode(kept))
    resumed = Tripwires(Thresholds(), saved, wires._window)
    assert resumed.state == kept
    trained(resumed, 0.9, rng)
    assert alarm(resumed, *history) is Tripwire.HELD_OUT_FALL


@pytest.mark.parametrize(
    ("points", "n"),
    [
        ([(0.3, 0.3), (0.6, 0.5), (0.9, 0.8)], 200),  # both rise
        ([(0.3, 0.5), (0.2, 0.3)], 200),  # both fall
        ([(0.5, 0.5), (0.5, 0.2)], 200),  # held-out falls, the reward does not rise
        ([(0.3, 0.5), (0.9, 0.45)], 200),  # too little
        ([(0.3, 0.5), (0.9, 0.3)], 12),  # too few to tell
    ],
)
def test_ordinary_curves_do_not_trip(points, n) -> None:
    rng = random.Random(1)
    wires = Tripwires(Thresholds())
    history = []
    for step, (reward, success) in enumerate(points):
        trained(wires, reward, rng)
        history.append(evaluation(f"rl@{step}", success, n))
        assert alarm(wires, *history) is None


def test_noise_alone_hardly_ever_trips() -> None:
    """A model that does not change, measured 40 times on 64 problems, two hundred runs."""
    rng = random.Random(2)

    def share() -> float:
        return sum(rng.random() < 0.5 for _ in range(64)) / 64

    tripped = 0
    for _ in range(200):
        marks = [Mark(str(i), "t", share(), 64, share(), 0.25, 64) for i in range(40)]
        tripped += any(held_out_fall(marks[: i + 1], 0.1, 0.1) for i in range(40))
    assert tripped <= 2


def test_marks_need_rewards_and_rollouts() -> None:
    assert held_out_fall([], 0.1, 0.1) is None
    wires = Tripwires(Thresholds())
    assert alarm(wires, evaluation("rl@1", 0.9), evaluation("rl@2", 0.1)) is None
    assert alarm(wires, evaluation("rl@3", 0.9, n=0)) is None


def test_a_length_explosion_trips_when_asked_for() -> None:
    wires = Tripwires(Thresholds(window=32, length_factor=3.0))
    base = Seen("s", "g", "t", "p", "", None, 0.0, 10)
    for i in range(64):
        wires._window.append(msgspec.structs.replace(base, session_id=f"s{i}", tokens=10))
    wires._first_tokens = 10.0
    assert alarm(wires) is None
    for i in range(32):
        wires._window.append(msgspec.structs.replace(base, session_id=f"s{i}", tokens=31 + i))
    found = wires.check([])
    assert found is not None
    assert (found.wire, found.sessions[0]) == (Tripwire.LENGTH, "s31")


def test_what_is_remembered_of_a_rollout() -> None:
    session = Session("s", "rl", "train", "t", {"seed": 7}, "g", Outcome.OK, "", {"reward": 1.0})
    assert seen(session, {"expected": 3}) == Seen("s", "g", "t", "t/7", "", "3", 1.0, 0)
