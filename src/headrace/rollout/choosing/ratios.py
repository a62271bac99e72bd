"""Which share of the groups each task should get: rules that move shares as a stage goes on.

Pure arithmetic over counts, with a state small enough to be saved with every decision. It knows
tasks by name and what became of their groups; nothing of instances, rollouts or how a next group is
chosen (`mixing` does that).

Whatever a rule asks for, shares stay a distribution between each task's floor and ceiling, and move
on a straight line towards what is asked, at most `step` each time. So while the evidence does not
change, shares reach their fixed point without passing it; where it says the same of every task, the
fixed point is the recipe's ratios.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Rule = Literal["fixed", "success", "progress", "shortage"]

_PRIOR_GROUPS = 2.0
"""A task is believed to lose no group until it has lost some: so many imagined ones trained."""
_EXACT = 1e-12
"""Shares whose sum is this near to 1 are a distribution."""


class TaskBounds(msgspec.Struct, frozen=True):
    """What a recipe says of one task's share of the groups.

    Attributes:
        target: its ratio; the targets of all tasks sum to 1.
        floor: least share, <= target.
        ceiling: largest share, >= target.
    """

    target: float
    floor: float = 0.0
    ceiling: float = 1.0


class RatioRule(msgspec.Struct, frozen=True):
    """How shares are adjusted; see `headrace.recipe.RatiosTable`.

    Attributes:
        rule: see `Rule`.
        step: most that any share moves at a time.
        every: decided groups, of all tasks together, between adjustments.
        window: how many of these intervals are looked back at.
        learnable: success at which a task has most to teach, lowest and highest.
    """

    rule: Rule = "fixed"
    step: float = 0.05
    every: int = 16
    window: int = 8
    learnable: tuple[float, float] = (0.2, 0.8)


class TaskInterval(msgspec.Struct, array_like=True):
    """What became of one task's groups in one interval; counts and sums.

    Attributes:
        scored: decided groups with a mean reward.
        reward_sum: of these means.
        ended: groups that trained or never will.
        trained: groups that trained.
    """

    scored: int = 0
    reward_sum: float = 0.0
    ended: int = 0
    trained: int = 0


History = Sequence[TaskInterval]
"""One task's intervals, oldest first, the one that is going on last."""


# -- what a rule asks for --------------------------------------------------------------------------


def learnability(success: float, low: float, high: float) -> float:
    """How much there is to learn at a success rate, in [0, 1].

    1 between `low` and `high`, falling linearly to 0 at rates 0 and 1, where every rollout of a
    group ends alike and no advantage is left.
    """
    success = min(max(success, 0.0), 1.0)
    if success < low:
        return success / low
    return (1.0 - success) / (1.0 - high) if success > high else 1.0


def mean_reward(history: History) -> float | None:
    """Mean over decided groups; None when there is none."""
    scored = sum(interval.scored for interval in history)
    return sum(interval.reward_sum for interval in history) / scored if scored else None


def progress(history: History) -> float:
    """Absolute change of the mean reward from the older to the newer half of a history.

    Only what goes beyond one standard error counts, so that noise is no progress. The error of a
    half is at most sqrt(p (1 - p) / groups), as rewards are in [0, 1].

    Source: after Teacher-Student Curriculum Learning (arXiv 1707.00183), section 3.
    """
    half = len(history) // 2
    older, newer = history[:half], history[half:]
    before, after = mean_reward(older), mean_reward(newer)
    if before is None or after is None:
        return 0.0
    variance = 0.0
    for mean, part in ((before, older), (after, newer)):
        variance += max(0.0, mean * (1.0 - mean)) / sum(interval.scored for interval in part)
    return max(0.0, abs(after - before) - math.sqrt(variance))


def survival(history: History) -> float:
    """Share of a task's ended groups that trained, in (0, 1]; 1 while nothing is known."""
    ended = sum(interval.ended for interval in history)
    trained = sum(interval.trained for interval in history)
    return (trained + _PRIOR_GROUPS) / (ended + _PRIOR_GROUPS)


def by_success(
    bounds: Mapping[str, TaskBounds], histories: Mapping[str, History], low: float, high: float
) -> dict[str, float]:
    """Weights after what there is to learn at each task's success; unknown success is in range."""
    weights = {}
    for name, bound in bounds.items():
        success = mean_reward(histories[name])
        weights[name] = bound.target * (
            1.0 if success is None else learnability(success, low, high)
        )
    return weights


def by_progress(
    bounds: Mapping[str, TaskBounds], histories: Mapping[str, History]
) -> dict[str, float]:
    """Weights after how fast each task's reward changes, upwards or downwards."""
    return {name: bound.target * progress(histories[name]) for name, bound in bounds.items()}


def by_shortage(
    bounds: Mapping[str, TaskBounds], histories: Mapping[str, History]
) -> dict[str, float]:
    """Weights that make shares of *trained* groups meet the targets.

    A task that loses part of its groups gets as many more as make up for it; one whose trained
    groups are behind, because they are slow to come, up to twice as many until they are not.
    """
    trained = {n: sum(interval.trained for interval in histories[n]) for n in bounds}
    total = sum(trained.values())
    weights = {}
    for name, bound in bounds.items():
        reached = trained[name] / total if total else bound.target
        behind = max(0.0, 1.0 - reached / bound.target)
        weights[name] = bound.target / survival(histories[name]) * (1.0 + behind)
    return weights


def wanted_shares(
    rule: RatioRule, bounds: Mapping[str, TaskBounds], histories: Mapping[str, History]
) -> dict[str, float]:
    """What a rule asks for, as a distribution; the targets where it tells no tasks apart."""
    targets = {name: bound.target for name, bound in bounds.items()}
    match rule.rule:
        case "success":
            weights = by_success(bounds, histories, *rule.learnable)
        case "progress":
            weights = by_progress(bounds, histories)
        case "shortage":
            weights = by_shortage(bounds, histories)
        case "fixed":
            weights = targets
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if total > 0 else targets


# -- from there to shares --------------------------------------------------------------------------


def bounded(wanted: Mapping[str, float], bounds: Mapping[str, TaskBounds]) -> dict[str, float]:
    """The distribution nearest to `wanted` (least squares) between all floors and ceilings.

    One number is added to all and the sums clipped; it is found by halving an interval.
    """

    def shifted(by: float) -> dict[str, float]:
        return {n: min(max(wanted[n] + by, b.floor), b.ceiling) for n, b in bounds.items()}

    if abs(sum(shifted(0.0).values()) - 1.0) < _EXACT:
        return shifted(0.0)
    below, above = -1.0 - max(wanted.values()), 1.0 - min(wanted.values())
    for _ in range(100):
        middle = (below + above) / 2
        if sum(shifted(middle).values()) < 1.0:
            below = middle
        else:
            above = middle
    return shifted(above)


def moved(current: Mapping[str, float], goal: Mapping[str, float], step: float) -> dict[str, float]:
    """From `current` straight towards `goal`, until one share has moved by `step`."""
    furthest = max(abs(goal[name] - share) for name, share in current.items())
    part = 1.0 if furthest <= step else step / furthest
    return {name: share + part * (goal[name] - share) for name, share in current.items()}


class AdaptiveRatios:
    """The shares of a stage's tasks, adjusted as groups are decided and train.

    Args:
        rule: how.
        bounds: by task name.
        state: what `state` was when an earlier process stopped; None begins at the targets.

    Raises:
        ValueError: targets or bounds that contradict each other.

    Attributes:
        shares: by task, now.
    """

    def __init__(
        self, rule: RatioRule, bounds: Mapping[str, TaskBounds], *, state: Any = None
    ) -> None:
        apart = abs(sum(bound.target for bound in bounds.values()) - 1.0)
        odd = [n for n, b in bounds.items() if not 0.0 <= b.floor <= b.target <= b.ceiling <= 1.0]
        if not bounds or apart > 1e-6 or odd or any(b.target <= 0.0 for b in bounds.values()):
            raise ValueError(
                f"AdaptiveRatios: {dict(bounds)} need targets above 0 that sum to 1, each between "
                "floor and ceiling"
            )
        self._rule = rule
        self._bounds = dict(bounds)
        self.shares = {name: bound.target for name, bound in bounds.items()}
        self._decided = 0
        self._histories = {name: deque([TaskInterval()], maxlen=rule.window) for name in bounds}
        if state is not None:
            self._restore(state)

    @property
    def adaptive(self) -> bool:
        """Whether shares ever change."""
        return self._rule.rule != "fixed" and len(self._bounds) > 1

    @property
    def state(self) -> dict[str, Any]:
        """What has to be saved, JSON-compatible."""
        return {
            "shares": dict(self.shares),
            "decided": self._decided,
            "intervals": {
                name: [msgspec.to_builtins(interval) for interval in history]
                for name, history in self._histories.items()
            },
        }

    def _restore(self, state: Any) -> None:
        saved_shares = {n: state["shares"].get(n, share) for n, share in self.shares.items()}
        self.shares = bounded(saved_shares, self._bounds)
        self._decided = state["decided"]
        for name, history in self._histories.items():
            saved = msgspec.convert(state["intervals"].get(name, []), list[TaskInterval])
            if saved:
                history.clear()
                history.extend(saved)

    def decided(self, task: str, mean: float | None, *, lost: bool) -> None:
        """A group was decided.

        Args:
            task: whose.
            mean: reward over its valid rollouts, None without any.
            lost: whether it will not train.
        """
        now = self._histories[task][-1]
        if mean is not None:
            now.scored += 1
            now.reward_sum += mean
        now.ended += lost
        self._decided += 1
        if self.adaptive and self._decided >= self._rule.every:
            self._adjust()

    def trained(self, task: str, groups: int) -> None:
        """Groups went to the trainer."""
        self._histories[task][-1].ended += groups
        self._histories[task][-1].trained += groups

    def lost(self, task: str, groups: int) -> None:
        """Groups that were to train became too old."""
        self._histories[task][-1].ended += groups

    def _adjust(self) -> None:
        self._decided = 0
        histories = {name: list(history) for name, history in self._histories.items()}
        goal = bounded(wanted_shares(self._rule, self._bounds, histories), self._bounds)
        self.shares = moved(self.shares, goal, self._rule.step)
        for history in self._histories.values():
            history.append(TaskInterval())
