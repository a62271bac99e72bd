"""How tasks share a stage: whose group is next, within each task's limit, and how ratios move.

The mix (`mixing`), the rule that moves its ratios (`ratios`) and the rollouts in flight by task,
behind one door for the orchestrator. Bookkeeping only: nothing is awaited or written here.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from headrace.rollout.choosing.mixing import TaskMix
from headrace.rollout.choosing.ratios import AdaptiveRatios
from headrace.rollout.groups import GroupDecision


class TaskSharing:
    """Which task a stage's next group is of.

    Args:
        stage: name of the recipe stage.
        mix: gives instances, in the ratios of the moment.
        group_size: rollouts of a group.
        in_turn: a task at its limit is waited for; else others take the room it cannot use.
        ratios: moves the mix's ratios; None leaves them as they are.
    """

    def __init__(
        self,
        stage: str,
        mix: TaskMix,
        *,
        group_size: int,
        in_turn: bool = False,
        ratios: AdaptiveRatios | None = None,
    ) -> None:
        self.mix = mix
        self.running: Counter[str] = Counter()
        """Rollouts in flight, by task."""
        self._stage = stage
        self._group_size = group_size
        self._in_turn = in_turn
        self._ratios = ratios if ratios is not None and ratios.adaptive else None
        self._follow()

    @property
    def state(self) -> dict[str, Any]:
        """Everything a resume needs, by the names under which the ledger keeps it."""
        found: dict[str, Any] = {cursor_key(self._stage): self.mix.state}
        if self._ratios is not None:
            found[ratios_key(self._stage)] = self._ratios.state
        return found

    def next_task(self, resting: Collection[str] = ()) -> str | None:
        """The task of the next group, none of `resting`; None while none that may be next has
        room."""
        full = {name for name in self.mix.ratios if self._is_full(name)}
        if not self._in_turn:
            return self.mix.choose({*full, *resting})
        name = self.mix.choose(resting)
        return None if name in full else name

    def _is_full(self, task: str) -> bool:
        """Whether its own limit has no room for another group; one alone always may run."""
        limit, running = self.mix.limit(task), self.running[task]
        return limit is not None and running > 0 and running + self._group_size > limit

    def decided(self, task: str, decision: GroupDecision) -> None:
        """A group is complete and decided."""
        if self._ratios is not None:
            self._ratios.decided(task, decision.baseline, lost=not decision.members)
            self._follow()

    def trained(self, groups: Mapping[str, int]) -> None:
        """So many groups of each task went to the trainer."""
        for task, count in groups.items():
            self.mix.trained(task, count)
            if self._ratios is not None:
                self._ratios.trained(task, count)

    def lost(self, groups: Mapping[str, int]) -> None:
        """So many groups of each task became too old before they trained."""
        if self._ratios is not None:
            for task, count in groups.items():
                self._ratios.lost(task, count)

    def _follow(self) -> None:
        if self._ratios is not None:
            self.mix.retarget(self._ratios.shares)


def cursor_key(stage: str) -> str:
    """Name under which the ledger keeps what a stage has dispatched; see `TaskMix.state`."""
    return f"cursor:{stage}"


def ratios_key(stage: str) -> str:
    """Name under which the ledger keeps a stage's ratios; see `AdaptiveRatios.state`."""
    return f"ratios:{stage}"
