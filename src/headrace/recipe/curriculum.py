"""The tables of an agentic_rl stage that say which problems it attempts and at what cost."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.recipe.tables import Fraction, Positive, Table

_NEEDS = {
    "window": ("sampling", 'is not "uniform"'),
    "target": ("sampling", 'is "thompson"'),
    "candidates": ("sampling", 'is "thompson"'),
    "promote_at": ("start_level", "is given"),
    "repeat_after": ("repeat_share", "is above 0"),
}
"""Keys that do something only if another one is set."""


class CurriculumTable(Table):
    """Which problems are attempted, by estimates of the model's pass rate on their kind (family and
    level), which are learnt from the rollouts themselves."""

    sampling: Literal["uniform", "window", "thompson"] = "thompson"
    """"uniform": problems in their own order; "window": without those whose pass rate is outside
    `window`; "thompson": also, of several, the one most likely near `target`."""
    window: tuple[Fraction, Fraction] = (0.1, 0.9)
    """Problems with a pass rate below or above are skipped."""
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.9
    """Probability with which a pass rate has to be outside `window`, or above `promote_at`."""
    target: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Pass rate that teaches most."""
    candidates: Annotated[int, Field(ge=2, le=64)] = 8
    """Problems of which one is attempted."""
    explore: Fraction = 0.05
    """Share of groups that take the next problem whatever is known of it, so that estimates stay
    fresh and nothing is left out for ever."""
    half_life: Annotated[float, Field(gt=0.0)] = 200.0
    """Groups of a task after which what they told counts half, as the model has changed."""
    start_level: Positive | None = None
    """Hardest level at the start; later ones are unlocked one by one. By default all are open."""
    promote_at: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """Pass rate of the hardest open level from which on the next is unlocked."""
    repeat_share: Fraction = 0.0
    """Share of groups that try a problem again which no rollout of its group has solved."""
    repeat_after: Positive = 64
    """Groups of the task that have to be decided in between."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        low, high = self.window
        if low >= high:
            raise ValueError(
                f"window {list(self.window)} is empty; give [low, high] with low < high"
            )
        useful = {
            "window": self.sampling != "uniform",
            "target": self.sampling == "thompson",
            "candidates": self.sampling == "thompson",
            "promote_at": self.start_level is not None,
            "repeat_after": self.repeat_share > 0.0,
        }
        for key, used in useful.items():
            # A resolved recipe spells defaults out.
            if not used and getattr(self, key) != type(self).model_fields[key].default:
                other, state = _NEEDS[key]
                raise ValueError(f"{key} does nothing unless {other} {state}; leave it out")
        return self

    @property
    def constants(self) -> dict[str, Any]:
        """Keyword arguments of `headrace.rollout.choosing.curriculum.CurriculumConfig`."""
        return self.model_dump()


class DynamicTable(Table):
    """How many groups a batch may cost: groups in which all rewards are equal teach nothing and are
    dropped, and others are generated in their place."""

    max_overgeneration: Annotated[float, Field(ge=1.0)] | None = 8.0
    """Groups generated for a batch, as a multiple of groups_per_batch, with or without signal."""
    when_exceeded: Literal["shrink", "fail"] = "shrink"
    """"shrink": the batch has the groups that there are, at least one; "fail": the stage ends with
    an error that names the task, its pass rate and remedies."""
