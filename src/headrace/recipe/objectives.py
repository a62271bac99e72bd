"""The objective tables of an agentic_rl stage: what an update minimises, chosen by `kind`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.recipe.tables import Positive, Table

Low = Annotated[float, Field(gt=0.0, lt=1.0)]
High = Annotated[float, Field(gt=0.0)]


class ObjectiveTable(Table):
    """What every objective has."""

    normalisation: Literal["token_mean", "sequence_mean", "group_mean"] = "token_mean"
    """"token_mean": all tokens of the batch count the same; "sequence_mean": all trajectories;
    "group_mean": all groups, and in each all its trajectories (eq. 1)."""
    minibatches: Positive = 1
    """Optimizer steps that a batch is dealt out to, whole trajectories each; no token is in two."""
    kl_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL divergence from the stage's first weights, which then stay in memory; 0, as
    in the paper, keeps none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from sampled tokens; k1 is of use as a metric only."""


class DoubleSidedObjective(ObjectiveTable):
    """Direct double-sided importance sampling, for rollouts older than the weights (eqs. 3-5)."""

    kind: Literal["double_sided_is"] = "double_sided_is"
    """Objective."""
    eps_low: Low = 0.2
    """Token ratios at or below 1 - eps_low are masked (eq. 5)."""
    eps_high: High = 0.28
    """Token ratios at or above 1 + eps_high are masked (eq. 5)."""
    token_level: bool = True
    """Mask single tokens."""
    sample_level: bool = False
    """Mask whole trajectories, by the geometric mean of their tokens' ratios."""
    sample_eps_low: Low = 0.1
    """Trajectories at or below 1 - sample_eps_low are masked."""
    sample_eps_high: High = 0.1
    """Trajectories at or above 1 + sample_eps_high are masked."""


class IcepopObjective(ObjectiveTable):
    """GRPO with clip-higher and IcePop, for rollouts of the newest weights (eq. 1)."""

    kind: Literal["icepop"]
    """Objective."""
    beta: Annotated[float, Field(gt=1.0)] = 2.0
    """Tokens whose probabilities in trainer and engine differ by more than this factor at the start
    of the update are masked."""
    eps_low: Low = 0.2
    """The surrogate is flat below 1 - eps_low."""
    eps_high: High = 0.28
    """The surrogate is flat above 1 + eps_high."""
    normalisation: Literal["token_mean", "sequence_mean", "group_mean"] = "group_mean"
    """"token_mean": all tokens of the batch count the same; "sequence_mean": all trajectories;
    "group_mean": all groups, and in each all its trajectories (eq. 1)."""


class GrpoObjective(ObjectiveTable):
    """GRPO with clip-higher: the old policy is the trainer's at the start of the update."""

    kind: Literal["grpo"]
    """Objective."""
    eps_low: Low = 0.2
    """The surrogate is flat below 1 - eps_low."""
    eps_high: High = 0.28
    """The surrogate is flat above 1 + eps_high."""
    normalisation: Literal["token_mean", "sequence_mean", "group_mean"] = "sequence_mean"
    """"token_mean": all tokens of the batch count the same; "sequence_mean": all trajectories;
    "group_mean": all groups, and in each all its trajectories."""


class PpoRolloutObjective(ObjectiveTable):
    """PPO's clipped surrogate with the engine's log-probabilities as old policy, to compare."""

    kind: Literal["ppo_rollout"]
    """Objective."""
    eps_low: Low = 0.2
    """The surrogate is flat below 1 - eps_low."""
    eps_high: High = 0.2
    """The surrogate is flat above 1 + eps_high."""


class TruncatedIsObjective(ObjectiveTable):
    """Importance weights that are bounded instead of masked, to compare."""

    kind: Literal["truncated_is"]
    """Objective."""
    cap: Annotated[float, Field(gt=0.0)] = 2.0
    """Largest importance weight."""


class UncorrectedObjective(ObjectiveTable):
    """The policy gradient as if the newest weights had sampled everything, to compare."""

    kind: Literal["none"]
    """Objective."""


class DistillationObjective(ObjectiveTable):
    """On-policy distillation: a teacher judges every token the student sampled (eqs. 1 and 2).

    Rewards are measured and play no part, so group_size is 1.
    """

    kind: Literal["distillation"]
    """Objective."""
    teacher: str | None = None
    """Who judges every task: an earlier stage, whose result it is, or a checkpoint directory."""
    teachers: dict[str, str] = Field(default_factory=dict)
    """Instead of teacher: one for each task, e.g. { terminal = "rl-terminal" }."""
    beta: Annotated[float, Field(gt=1.0)] = 2.0
    """As in icepop."""
    eps_low: Low = 0.2
    """The surrogate is flat below 1 - eps_low."""
    eps_high: High = 0.28
    """The surrogate is flat above 1 + eps_high."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if (self.teacher is None) == (not self.teachers):
            raise ValueError("give teacher or teachers: who judges what the student says")
        return self

    def teacher_of(self, task: str) -> str | None:
        """Who judges a task; None when nobody does."""
        return self.teacher or self.teachers.get(task)


Objective = Annotated[
    DoubleSidedObjective
    | IcepopObjective
    | GrpoObjective
    | PpoRolloutObjective
    | TruncatedIsObjective
    | UncorrectedObjective
    | DistillationObjective,
    Field(discriminator="kind"),
]
