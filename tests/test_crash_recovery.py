"""Runs killed at random moments, part by part and as a whole, end as if nothing had happened."""

import pytest

import crash_recovery as bench

pytest.importorskip("reasoning_gym")


def test_a_run_killed_three_times_trains_what_an_uninterrupted_one_trains(tmp_path):
    recipe = tmp_path / "warmup.toml"
    recipe.write_text(bench.warmup_recipe(0, steps=40))
    ready = bench.Lives(recipe, tmp_path / "warmup")
    assert ready.start().wait(bench.DEADLINE_S) == 0, ready.output.read_text()
    checkpoint = ready.run_dir / "checkpoints" / "warmup"
    found = bench.crash(bench.rl_recipe(0, 6, checkpoint), tmp_path, kills=3, within_s=4.0, seed=1)
    assert found["kills"] == found["audits_clean"] - found["runs_compared"] == 3
    assert found["trajectories_trained"] > 0
    assert found["trajectories_different"] == 0
    assert found["weights_equal"] == 1.0


@pytest.mark.slow
def test_thirty_kills(tmp_path):
    found = bench.crash(bench.whole_recipe(0, 60, 40), tmp_path, kills=30, within_s=12.0, seed=0)
    assert found["kills"] == 30
    assert all(found[f"kills_{target}"] > 0 for target in bench.TARGETS)
    assert found["batches_replayed"] > 0
    assert found["weights_equal"] == 1.0
