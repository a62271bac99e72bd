"""A replica is given up for each of the reasons, and for nothing less."""

import pytest

from headrace.rollout.replicas.health import Fault, Health, HealthPolicy, backoff

POLICY = HealthPolicy(missed_beats=3, stuck_s=10.0, errors=3, errors_window_s=5.0)


def test_missed_beats_count_in_a_row_only() -> None:
    health = Health(POLICY, 0.0)
    assert [health.missed(), health.missed()] == [None, None]
    assert health.beat(1.0, computed=0, running=0) is None
    assert [health.missed(), health.missed(), health.missed()] == [None, None, Fault.BEATS]


def test_stuck_is_work_without_progress() -> None:
    health = Health(POLICY, 0.0)
    assert health.beat(100.0, computed=5, running=0) is None, "idle is not stuck"
    assert health.beat(200.0, computed=5, running=0) is None
    assert health.beat(205.0, computed=5, running=2) is None
    assert health.beat(209.0, computed=6, running=2) is None
    assert health.beat(218.0, computed=6, running=2) is None
    assert health.beat(219.5, computed=6, running=2) is Fault.STUCK


def test_errors_within_the_window_are_a_burst() -> None:
    health = Health(POLICY, 0.0)
    assert [health.failed(t) for t in (0.0, 3.0, 6.0, 9.0)] == [None] * 4
    assert health.failed(10.9) is Fault.ERRORS


def test_waiting_doubles_up_to_the_most() -> None:
    policy = HealthPolicy(backoff_s=0.5, backoff_most_s=3.0)
    assert [backoff(policy, n) for n in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_values_must_be_positive() -> None:
    with pytest.raises(ValueError, match="stuck_s is 0"):
        HealthPolicy(stuck_s=0.0)
