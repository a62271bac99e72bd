"""The benchmark of asynchronous against synchronous RL: its workload and its bound are honest."""

import math
import os
import select
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import async_vs_sync as bench
from simulated_rl import Rates, draw_rollout

RATES = Rates(
    slots=2,
    token_s=1e-4,
    update_tokens_per_s=2e4,
    save_s=0.0,
    load_s=1e-3,
    latency_s=1e-3,
    sigma=1.0,
    turns=2.0,
    turns_sigma=0.5,
    tokens=4,
)


def test_only_the_tail_grows_with_sigma():
    """Equal turns and tokens at every sigma; equal means of the tools' times, longer tails."""
    flat, tailed = (
        [draw_rollout(RATES._replace(sigma=sigma), seed, 0) for seed in range(8000)]
        for sigma in (0.0, 1.0)
    )
    tokens = [[turn.tokens for turn in rollout] for rollout in flat]
    assert [[turn.tokens for turn in rollout] for rollout in tailed] == tokens
    times = sorted(turn.latency_s for rollout in tailed for turn in rollout)
    assert all(turn.latency_s == pytest.approx(1e-3) for rollout in flat for turn in rollout)
    assert statistics.fmean(times) == pytest.approx(1e-3, rel=0.05)
    assert times[len(times) // 2] == pytest.approx(1e-3 * math.exp(-0.5), rel=0.05)
    assert statistics.median(len(rollout) for rollout in flat) == 2


def test_the_bound_is_the_longer_of_both_sides_over_trained_tokens():
    assert bench.bound_s(RATES, (100, 100)) == pytest.approx(max(200 * 1e-4 / 2, 200 / 2e4))
    slow_trainer = RATES._replace(update_tokens_per_s=10.0)
    assert bench.bound_s(slow_trainer, (100, 100)) == pytest.approx(20.0)


@pytest.mark.parametrize("mode", bench.MODES)
def test_a_run_of_either_mode_stays_within_its_bound(mode):
    job = bench.Job(mode, RATES, updates=3, groups=2, concurrency=32, staleness=4)
    one = bench.run(job)
    assert len(one.ends) == len(one.trained) == 3
    assert all(one.trained)
    assert bench.bound_s(RATES, one.trained) <= one.wall_s
    # Work of the engine that trained is part of all its work.
    assert RATES.generation_s(sum(one.trained)) <= one.engine_s + 1e-9 <= one.wall_s
    assert (one.lag == 0.0) == (mode == "sync")


def test_metrics_compare_equal_numbers_of_updates_and_have_fixed_keys():
    sync = bench.Measured((4.0, 8.0), 1.0, (300, 300), 0.0, 0.0, 5.0, 0.0)
    fast = bench.Measured((2.0, 3.0, 4.0), 1.5, (300, 300, 300), 8.0, 2.0, 1.0, 0.0)
    rates = RATES._replace(update_tokens_per_s=300.0)
    metrics = bench.summarise(
        {(s, m): (rates, one) for s in bench.SIGMAS for m, one in (("sync", sync), ("async", fast))}
    )
    assert metrics["speedup_sigma_1_5"] == pytest.approx(8.0 / 3.0)
    assert metrics["speedup_after_start_sigma_0"] == pytest.approx(4.0)
    assert metrics["bound_fraction_min"] == pytest.approx(3.0 / 4.0)
    assert metrics["bound_fraction_after_start_sigma_0_5"] == pytest.approx(1.0)
    assert len(metrics) == 4 * (4 + 2 * 9) + 2


def test_sync_makes_no_more_updates_than_async():
    with pytest.raises(SystemExit):
        bench.parse(["--updates", "3", "--sync-updates", "4"])


POOL = """
import os
from worker_pool import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        input()
"""


def test_workers_end_with_a_benchmark_that_is_killed(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    folder = str(Path(bench.__file__).parent)
    killed = subprocess.Popen(
        [sys.executable, "pool.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with killed:
        assert killed.stdout is not None
        worker = os.pidfd_open(int(killed.stdout.readline()))
        try:
            killed.kill()
            assert select.select([worker], [], [], 20.0)[0] == [worker]
        finally:
            os.close(worker)
