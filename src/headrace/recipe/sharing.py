"""The tables that say how several tasks share an agentic_rl stage."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from headrace.recipe.tables import Fraction, Positive, Table

_LEARNABLE = (0.2, 0.8)


class TaskRatio(Table):
    """One task of several: its target ratio and its limits. A number alone is the ratio."""

    ratio: Annotated[float, Field(gt=0.0)]
    """Share of the groups, relative to the other tasks'."""
    concurrency: Positive | None = None
    """Most rollouts of this task in flight; by default as many as the stage's. Room that it leaves
    goes to the other tasks, in "sync" mode to nobody."""
    floor: Fraction | None = None
    """Least share that a rule leaves it; by default that of [stages.ratios]."""
    ceiling: Fraction | None = None
    """Largest share that a rule gives it; by default that of [stages.ratios]."""

    @model_validator(mode="before")
    @classmethod
    def _number_alone(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"ratio": data}
        if not isinstance(data, dict | cls):
            raise ValueError("give a ratio, e.g. 0.5, or a table, e.g. { ratio = 0.5 }")
        return data


class RatiosTable(Table):
    """How the ratios of several tasks move as the stage goes on."""

    rule: Literal["fixed", "success", "progress", "shortage"] = "fixed"
    """"fixed": not at all; "success": towards tasks whose success is in the range where there is
    most to learn; "progress": towards tasks whose reward changes most; "shortage": so that shares
    of trained groups, not of dispatched ones, meet the ratios."""
    floor: Fraction = 0.05
    """Least share of any task; a task whose ratio is below keeps at least that."""
    ceiling: Fraction = 1.0
    """Largest share of any task; a task whose ratio is above gets at most that."""
    step: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """Most that a share moves at a time."""
    every: Positive = 16
    """Groups decided, of all tasks together, between adjustments."""
    window: Annotated[int, Field(ge=2)] = 8
    """Such intervals that a rule looks back at; "progress" compares their older and newer half."""
    learnable: tuple[Fraction, Fraction] = _LEARNABLE
    """For "success": the lowest and highest mean reward at which there is most to learn. Outside,
    weights fall linearly to nothing at 0 and 1."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.learnable
        if low > high:
            raise ValueError(f"learnable [{low:g}, {high:g}] is empty; give the lower bound first")
        if self.rule != "success" and self.learnable != _LEARNABLE:
            raise ValueError(f'learnable is for rule "success", not for "{self.rule}"')
        return self


class ShareLimits(NamedTuple):
    """A task's share of the groups, as parts of 1: what is asked for, at least and at most."""

    target: float
    floor: float
    ceiling: float


def share_limits(ratios: RatiosTable, tasks: Mapping[str, TaskRatio]) -> dict[str, ShareLimits]:
    """What every task of a stage may get, with all defaults.

    Raises:
        ValueError: a task's own floor is above its share, or its ceiling below.
    """
    total = sum(task.ratio for task in tasks.values())
    found = {}
    for name, task in tasks.items():
        share = task.ratio / total
        words = f"the share that its ratio asks for, {share:.3g}; change one of them"
        if task.floor is not None and task.floor > share:
            raise ValueError(f"tasks.{name}.floor {task.floor:g} is above {words}")
        if task.ceiling is not None and task.ceiling < share:
            raise ValueError(f"tasks.{name}.ceiling {task.ceiling:g} is below {words}")
        floor = min(ratios.floor, share) if task.floor is None else task.floor
        ceiling = max(ratios.ceiling, share) if task.ceiling is None else task.ceiling
        found[name] = ShareLimits(share, floor, ceiling)
    return found


def check_ratios(ratios: RatiosTable, tasks: Mapping[str, TaskRatio]) -> None:
    """Raise ValueError unless the tables fit each other."""
    if ratios.rule != "fixed" and len(tasks) < 2:
        raise ValueError(
            f'ratios.rule "{ratios.rule}" has nothing to move; name several tasks in tasks'
        )
    share_limits(ratios, tasks)
