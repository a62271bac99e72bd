"""The benchmark of concurrent rollouts, small: it runs, and its numbers are what they say."""

from collections import Counter

import pytest
import uvloop

import concurrent_rollouts as bench


def test_a_small_run_reports_what_was_alive_and_how_fair_it_was(monkeypatch, tmp_path):
    sizes = "--concurrency 48 --engine-ms 1 --median 0.05 --seconds 2 --settle 0"
    monkeypatch.setattr("sys.argv", ["x", "--json", "--quick", *sizes.split()])
    found = uvloop.run(bench.measure(bench.parse(), tmp_path))
    assert 0 < found["alive"] <= found["alive_mean"] <= found["alive_max"] <= 48
    assert 0 < found["sleeping_mean"] <= found["alive_mean"]
    assert found["failed"] == 0
    # Never more than a group from the ratios, whatever the speed of each.
    assert 0 <= found["ratio_error"] < 2 / found["trained_groups"]
    assert 0 <= found["trained_ratio_error"] <= 0.5
    assert found["delay_p50_ms"] <= found["delay_p99_ms"] <= found["delay_max_ms"]
    assert found["calls_per_s"] > found["rollouts_per_s"] > 0
    by_task = [found[f"rollouts_per_s_{name}"] for name in bench.RATIOS]
    assert sum(by_task) == pytest.approx(found["rollouts_per_s"])


def test_memory_is_of_those_alive_and_growth_of_those_that_finished():
    looks = [bench.Look(100, 90, 1000.0 + step) for step in range(100)]
    found = bench.shape(looks, before_kib=549.5, finished=200)
    assert found["kib_per_rollout"] == pytest.approx(5.0)
    assert found["kib_per_finished"] == pytest.approx(75 / 150)
    assert found["alive"] == found["alive_max"] == 100


def test_errors_are_of_shares():
    found = bench.shares("trained", Counter(quick=60, middling=30, slow=10))
    assert found == {"trained_ratio_error": pytest.approx(0.1), "trained_groups": 100.0}
