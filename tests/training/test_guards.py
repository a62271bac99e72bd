"""The guard's policy, step by step."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.training.guards import GuardConfig, GuardState, Verdict, judge

CONFIG = GuardConfig(bad_steps=3, deviations=6.0, window=16, warmup=5)


def run(losses, config=CONFIG, norm=1.0):
    """Verdicts of a sequence of losses, and the state after it."""
    state, verdicts = GuardState(), []
    for loss in losses:
        judgement = judge(config, state, loss, norm)
        verdicts.append(judgement.verdict)
        state = judgement.state
    return verdicts, state


def test_bad_numbers_are_skipped_and_then_stop():
    verdicts, state = run([1.0, math.nan, 1.0, math.inf, math.nan, math.nan])
    assert [v.value for v in verdicts] == ["apply", "skip", "apply", "skip", "skip", "stop"]
    assert (state.applied, state.skipped, state.bad_in_row) == (2, 4, 3)
    assert judge(CONFIG, GuardState(), 1.0, math.nan).verdict is Verdict.SKIP


def test_a_spike_is_seen_after_the_warm_up_only():
    noise = [2.0, 2.1, 1.9, 2.05, 1.95, 2.0]
    assert run([*noise[:4], 50.0])[0][-1] is Verdict.APPLY
    verdicts, state = run([*noise, 50.0, 2.0])
    assert [v.value for v in verdicts[-2:]] == ["skip", "apply"]
    assert 50.0 not in state.losses


def test_what_a_spike_does_is_configured():
    losses = [2.0, 2.1, 1.9, 2.05, 1.95, 2.0, 50.0]
    assert run(losses, CONFIG._replace(spike="off"))[0][-1] is Verdict.APPLY
    assert run(losses, CONFIG._replace(spike="stop"))[0][-1] is Verdict.STOP
    reason = judge(CONFIG, run(losses[:-1])[1], 50.0, 1.0).reason
    assert "50" in reason
    assert "median 2" in reason


def test_a_lasting_jump_stops_instead_of_skipping_for_ever():
    verdicts, state = run([2.0] * 10 + [9.0] * 3)
    assert [v.value for v in verdicts[-3:]] == ["skip", "skip", "stop"]
    assert 'spike = "off"' in judge(CONFIG, state, 9.0, 1.0).reason
    assert 'spike = "off"' not in judge(CONFIG, state, math.nan, 1.0).reason


@given(st.lists(st.floats(1.0, 2.0), max_size=60))
def test_falling_losses_and_wiggles_are_never_spikes(wiggles):
    losses = [(10.0 / (1 + i)) + 0.0001 * w for i, w in enumerate(wiggles)]
    assert all(v is Verdict.APPLY for v in run(losses)[0])


@given(st.lists(st.floats(0.0, 10.0) | st.just(math.nan), max_size=50))
def test_the_state_is_bounded_and_survives_json(losses):
    _, state = run(losses)
    assert len(state.losses) <= CONFIG.window
    assert msgspec.json.decode(msgspec.json.encode(state), type=GuardState) == state
    assert state.applied + state.skipped == len(losses)
