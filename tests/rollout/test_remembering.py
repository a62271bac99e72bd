"""Tripwires after a resume: what an earlier process saw, by the ledger, and what was looked at."""

import pytest
from ledger_writer import make_call

from headrace.recipe import AgenticRlStage
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.remembering import finished_rollouts
from headrace.rollout.failures.trips import tripped
from headrace.rollout.failures.tripwires import Tripwire, seen
from headrace.rollout.types import Outcome
from headrace.stages.tripping import StageTripwires, Tripped, require_acknowledged


def finish(ledger, number, *, text="3", reward=1.0, cheats=False, others=(), **dispatch):
    """A rollout of one call, and calls of other models beside it."""
    name = f"s{number}"
    ledger.dispatch(
        dispatch.get("stage", "rl"),
        dispatch.get("purpose", "train"),
        f"g{number}",
        "toy",
        {"seed": number},
        [name],
    )
    reply = {"role": "assistant", "content": text}
    ledger.record_call(make_call(name, 0, response=reply, tokens=number + 1))
    for index, model in enumerate(others, start=1):
        ledger.record_call(make_call(name, index, model=model, response={"content": "judged"}))
    ledger.finish(
        name,
        Outcome.OK,
        {"reward": reward},
        "tampering: cat /proc/1/environ" if cheats else "",
        {"expected": number},
        FailureReason.TAMPERING if cheats else None,
    )
    ledger.record_call(make_call(name, len(others) + 1, response={"content": "too late"}))
    return name


def wires(ledger, **table):
    stage = AgenticRlStage.model_validate(
        {"kind": "agentic_rl", "name": "rl", "task": "toy", "updates": 9, "tripwires": table}
    )
    return StageTripwires(ledger, stage, lambda _: None)


def test_the_window_is_what_was_seen(ledger) -> None:
    names = [finish(ledger, i, text=f"{i}", others=("judge",) * (i % 2)) for i in range(5)]
    finish(ledger, 5, cheats=True)
    finish(ledger, 6, purpose="eval:before")
    ledger.stage_started("other")
    finish(ledger, 7, stage="other")
    ledger.dispatch("rl", "train", "g8", "toy", {"seed": 8}, ["open", "cut off"])
    ledger.finish("cut off", Outcome.CANCELLED, reason="crash")

    found = finished_rollouts(ledger, "rl", 512)
    assert found == [
        seen(ledger.trainable(name), {"expected": i}) for i, name in enumerate([*names, "s5"])
    ]
    assert [one.tokens for one in found] == [1, 2, 3, 4, 5, 6], "neither late nor of a judge"
    assert found[-1].sign.startswith("tampering")
    assert [one.session_id for one in finished_rollouts(ledger, "rl", 2)] == ["s4", "s5"]


def test_a_resumed_stage_trips_on_what_the_first_part_saw(ledger) -> None:
    finish(ledger, 0, cheats=True)
    finish(ledger, 1)
    assert wires(ledger, tampering=1).measures()["tampering"] == 1.0
    for i in range(2, 40):
        finish(ledger, i, text="the answer is 7", reward=1.0)
    with pytest.raises(Tripped) as found:
        wires(ledger, tampering=0, identical_output=0.9).check(1)
    assert found.value.trip.alarm.wire is Tripwire.IDENTICAL_OUTPUT
    with pytest.raises(Tripped) as found:
        wires(ledger, tampering=1).check(1)
    assert found.value.trip.alarm.sessions == ("s0",)


def test_what_was_acknowledged_trips_its_wire_no_more(ledger, tmp_path) -> None:
    recipe = None  # is asked only when nothing was acknowledged
    for i in range(40):
        finish(ledger, i, text="the answer is 7", cheats=i == 20)
    with pytest.raises(Tripped):
        wires(ledger).check(1)
    require_acknowledged(ledger, recipe, ["tampering"], tmp_path)  # pyright: ignore
    assert tripped(ledger) is None
    # Another wire still sees these rollouts.
    with pytest.raises(Tripped) as found:
        wires(ledger).check(2)
    assert found.value.trip.alarm.wire is Tripwire.IDENTICAL_OUTPUT
    require_acknowledged(ledger, recipe, ["identical_output"], tmp_path)  # pyright: ignore
    wires(ledger).check(3)
    # Acknowledged is what was looked at, not what comes after.
    finish(ledger, 40, text="another", cheats=True)
    with pytest.raises(Tripped) as found:
        wires(ledger).check(4)
    assert found.value.trip.alarm.sessions == ("s40",)


def test_an_acknowledged_rollout_may_have_left_the_window(ledger, tmp_path) -> None:
    finish(ledger, 0, cheats=True)
    with pytest.raises(Tripped):
        wires(ledger, window=32).check(1)
    require_acknowledged(ledger, None, ["tampering"], tmp_path)  # pyright: ignore
    for i in range(1, 34):
        finish(ledger, i, text=f"{i}", cheats=i == 33)
    with pytest.raises(Tripped):
        wires(ledger, window=32).check(2)
