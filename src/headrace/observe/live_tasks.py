"""How the live view shows several tasks that share a stage: a line each, beside one another.

It reads the `task.NAME.*` numbers of one metrics row and nothing else.
"""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from headrace.observe.braille import bar
from headrace.observe.units import duration, percent, short


def tasks_in(metrics: Mapping[str, float]) -> list[str]:
    """Names of the tasks that a row tells apart; none where a stage has one."""
    ends = [key for key in metrics if key.startswith("task.") and key.endswith(".share")]
    return [key.removeprefix("task.").removesuffix(".share") for key in ends]


def task_table(metrics: Mapping[str, float], width: int) -> Table:
    """Share of the groups and its target, success and speed of every task.

    Args:
        metrics: the newest row.
        width: columns of the share's bar.
    """
    table = Table.grid(padding=(0, 1))
    for name in tasks_in(metrics):
        found = _of(metrics, name)
        table.add_row(
            Text(name, "dim"),
            Text(bar(found.get("share", 0.0), width), style="cyan on grey19"),
            Text(" · ".join(_words(found)), overflow="fold"),
        )
    return table


def task_words(metrics: Mapping[str, float]) -> list[str]:
    """A few words for each task, for a log of one line."""
    words = []
    for name in tasks_in(metrics):
        found = _of(metrics, name)
        reward = f" reward {short(found['reward_mean'])}" if "reward_mean" in found else ""
        words.append(f"{name} {percent(found.get('share'), 0)}{reward}")
    return words


def _of(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    place = f"task.{name}."
    return {k.removeprefix(place): v for k, v in metrics.items() if k.startswith(place)}


def _words(found: Mapping[str, float]) -> list[str]:
    words = [
        f"{percent(found.get('share'), 0):>4} of groups, target {percent(found.get('target'), 0)}"
    ]
    if "reward_mean" in found:
        words.append(f"success {percent(found['reward_mean'], 0)}")
    words.append(f"{short(found.get('rollouts_per_s'))} rollouts/s")
    if "rollout_s_p50" in found:
        words.append(f"{duration(found['rollout_s_p50'])} each")
    words.append(f"{short(found.get('rollouts_in_flight'))} in flight")
    return words
