"""How an RL stage is measured while it trains, and when that ends it."""

from typing import Self

from pydantic import field_validator, model_validator

from headrace.recipe.tables import Fraction, Positive, Table


class StageEvaluationTable(Table):
    """Held-out measurement beside an RL stage's training, on weights that stay as they are.

    Tasks, instances and temperature are those of [evaluation]; an engine of its own generates, so
    that training neither waits nor changes what is measured.
    """

    every: Positive
    """Updates between measurements; a multiple of publish_every."""
    instances: Positive | None = None
    """The first so many of [evaluation]'s instances; by default all."""
    concurrency: Positive = 8
    """Rollouts in flight, beside those of training."""
    cores: tuple[int, ...] | None = None
    """Cores of its engine; by default it shares the engine's."""
    score: str = "mean"
    """What stop and best look at: the success rate of the task of this name, or the mean of all."""
    keep_best: bool = False
    """Keep the measured weights with the best score, in checkpoints/STAGE-best."""

    @field_validator("cores")
    @classmethod
    def _some(cls, cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if cores is not None and not cores:
            raise ValueError("names no core; leave it out to share the engine's")
        return cores


class StopTable(Table):
    """When an RL stage ends before its budget is used up, by what [stages.evaluation] finds."""

    score: Fraction | None = None
    """End when a score is at least this."""
    patience: Positive | None = None
    """End after so many measurements in a row that brought no improvement."""
    min_gain: Fraction = 0.0
    """A score improves when it exceeds the last one that did by more than this."""

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if self.score is None and self.patience is None:
            raise ValueError("gives no rule; give score, patience or both")
        return self
