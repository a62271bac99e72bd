"""Metrics of each task: shares against the ratios, speeds, and nothing where there is one task."""

import pytest

from headrace.rollout.choosing.mixing import TaskMix, TaskShare
from headrace.rollout.choosing.sharing import TaskSharing
from headrace.rollout.window import Window
from headrace.stages.task_metrics import task_metrics
from headrace.tasks.types import TaskInstance


def sharing_of(ratios: dict[str, float]) -> TaskSharing:
    def share(name: str, ratio: float) -> TaskShare:
        return TaskShare(name, ratio, lambda i: TaskInstance(name, i, "f", 1, 1))

    return TaskSharing("rl", TaskMix([share(*item) for item in ratios.items()]), group_size=4)


async def test_shares_and_speeds_of_each_task():
    sharing, window = sharing_of({"a": 1.0, "b": 3.0}), Window()
    for _ in range(8):
        await sharing.mix.next()
    sharing.mix.retarget({"a": 0.5, "b": 0.5})
    sharing.trained({"a": 1, "b": 1})
    sharing.running["a"] = 3
    counts = window.of("a")
    counts.finished, counts.turns, counts.sampled_tokens = 4, 12, 100
    counts.scored, counts.reward_sum = 4, 1.0
    counts.seconds.extend([1.0, 2.0, 3.0, 40.0])
    found = task_metrics(sharing, window, 2.0)
    assert found["ratio_error"] == 0.0
    assert found["trained_ratio_error"] == 0.25
    of_a = {k.removeprefix("task.a."): v for k, v in found.items() if k.startswith("task.a.")}
    assert of_a == {
        "target": 0.5,
        "share": 0.25,
        "trained_share": 0.5,
        "rollouts_in_flight": 3.0,
        "groups_dispatched": 0.0,
        "groups_dropped": 0.0,
        "groups_trained": 0.0,
        "rollouts_finished": 4.0,
        "env_failed": 0.0,
        "rollouts_per_s": 2.0,
        "gen_tokens_per_s": 50.0,
        "rollout_s_p50": pytest.approx(3.0, abs=1.0),
        "rollout_s_p90": 40.0,
        "turns_mean": 3.0,
        "reward_mean": 0.25,
    }
    assert "task.b.reward_mean" not in found


def test_one_task_has_no_numbers_of_its_own():
    assert task_metrics(sharing_of({"a": 1.0}), Window(), 1.0) == {"held_out_skipped": 0.0}
