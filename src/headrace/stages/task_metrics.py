"""Metrics of the tasks of an RL stage: share, success, speed, signal, difficulty.

Names are `task.NAME.*`; a stage with one task has the same numbers without them.
"""

from headrace.rollout.choosing.mixing import TaskMix
from headrace.rollout.choosing.sharing import TaskSharing
from headrace.rollout.window import TaskCounts, Window


def task_metrics(sharing: TaskSharing, window: Window, seconds: float) -> dict[str, float]:
    """How each task is doing, and how far dispatched and trained groups are from the ratios.

    Args:
        sharing: the stage's tasks.
        window: what happened in the last `seconds`.
        seconds: wall clock, > 0.
    """
    mix = sharing.mix
    found = {"held_out_skipped": float(sum(mix.skipped.values()))} | _signal_metrics(mix, window)
    if mix.curriculum is not None:
        found |= mix.curriculum.metrics()
    if len(mix.ratios) == 1:
        return found
    found |= ratio_errors(mix)
    for name, target in mix.ratios.items():
        place = f"task.{name}"
        found[f"{place}.target"] = target
        found[f"{place}.share"] = mix.share_of(name)
        trained = mix.trained_share_of(name)
        if trained is not None:
            found[f"{place}.trained_share"] = trained
        found[f"{place}.rollouts_in_flight"] = float(sharing.running[name])
        for key, value in _window_metrics(window.of(name), seconds).items():
            found[f"{place}.{key}"] = value
    return found


def _signal_metrics(mix: TaskMix, window: Window) -> dict[str, float]:
    """How many groups carried signal, and how many were generated for each that trained."""
    found = {"small_batches": float(window.small_batches)} if window.small_batches else {}
    places = [("", list(window.tasks.values()))]
    places += [(f"task.{name}.", [window.of(name)]) for name in mix.ratios]
    for place, counts in places:
        decided = sum(c.decided for c in counts)
        trained = sum(c.trained for c in counts)
        if decided:
            found[f"{place}signal_share"] = sum(c.with_signal for c in counts) / decided
        if trained:
            found[f"{place}overgeneration"] = decided / trained
    return found


def ratio_errors(mix: TaskMix) -> dict[str, float]:
    """Largest distance of a task's share from what the ratios so far asked for: of dispatched
    groups as `ratio_error`, of trained ones, once there are any, as `trained_ratio_error`.
    """
    wanted = {name: mix.wanted_share_of(name) for name in mix.ratios}
    trained = {name: mix.trained_share_of(name) for name in mix.ratios}
    found = {"ratio_error": max(abs(mix.share_of(n) - share) for n, share in wanted.items())}
    apart = [abs(share - wanted[n]) for n, share in trained.items() if share is not None]
    return found | ({"trained_ratio_error": max(apart)} if apart else {})


def _window_metrics(counts: TaskCounts, seconds: float) -> dict[str, float]:
    found = {
        "groups_dispatched": float(counts.dispatched),
        "groups_dropped": float(counts.dropped),
        "groups_trained": float(counts.trained),
        "rollouts_finished": float(counts.finished),
        "env_failed": float(counts.env_failed),
        "rollouts_per_s": counts.finished / seconds,
        "gen_tokens_per_s": counts.sampled_tokens / seconds,
    }
    for key, quantile in (("rollout_s_p50", 0.5), ("rollout_s_p90", 0.9)):
        value = counts.seconds_at(quantile)
        if value is not None:
            found[key] = value
    if counts.finished:
        found["turns_mean"] = counts.turns / counts.finished
    if counts.scored:
        found["reward_mean"] = counts.reward_sum / counts.scored
    return found
