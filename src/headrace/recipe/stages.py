"""The stage tables of a recipe: from random weights to an agent, each from a checkpoint to one."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.recipe.failures import FailuresTable, TripwiresTable
from headrace.recipe.objectives import DoubleSidedObjective, Objective
from headrace.recipe.tables import Fraction, Positive, Seconds, Table

Weight = Annotated[float, Field(gt=0.0)]


class StageTable(Table):
    """What every stage has."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """Unique in the recipe; names checkpoints and metrics."""
    start_from: str | None = None
    """Earlier stage whose result to start from; by default the stage before."""
    evaluate: bool = True
    """Measure held-out success after this stage."""
    seconds: Seconds | None = None
    """Wall-clock budget; the stage ends when it is used up."""
    learning_rate: Annotated[float, Field(gt=0.0)]
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon", "muon_split"] = "adamw"
    """"muon" orthogonalises the updates of matrices inside layers, "muon_split" those of latent
    up-projections head by head; embeddings, norms and routers stay with AdamW."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay on matrices."""
    grad_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest global gradient norm."""
    micro_tokens: Positive = 8192
    """Most tokens in one forward pass of the trainer; bounds memory, not the loss."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products; weights and optimizer state stay float32."""


class SupervisedStage(StageTable):
    """What every stage has that learns to predict given tokens."""

    steps: Positive | None = None
    """Optimizer steps; the stage ends at `steps` or `seconds`, whichever comes first. Only a stage
    without `seconds` is the same, bit for bit, on every machine and after every resume."""
    batch_tokens: Positive = 4096
    """Tokens per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-3
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps of linear warm-up."""
    final_learning_rate: Fraction = 0.05
    """Share of the peak that is left at the budget's end; the fall is linear."""
    embedding_rate: Annotated[float, Field(gt=0.0)] = 1.0
    """Learning rate of embeddings and output projection, as a multiple."""
    mtp_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the multi-token prediction loss, when the model has such layers."""
    balance_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the expert balance loss (GLM-4.5: 1e-4)."""
    router_bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Step of the router's selection bias towards balanced experts (GLM-4.5: 1e-3)."""
    checkpoint_every: Positive = 200
    """Steps between checkpoints that a resumed run goes on from."""
    keep_checkpoints: Positive = 1
    """Checkpoints kept."""
    bad_steps: Positive = 3
    """Steps in a row with non-finite numbers (they are skipped) after which the stage stops."""
    spike: Literal["off", "skip", "stop"] = "skip"
    """What to do about a batch whose loss is far outside the recent range."""
    spike_deviations: Annotated[float, Field(gt=0.0)] = 8.0
    """How far that is, in robust standard deviations."""
    threads: Positive | None = None
    """Compute threads; by default all cores (nothing else runs during this stage)."""

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.steps is None and self.seconds is None:
            raise ValueError("give steps, seconds or both")
        return self


class ContextStep(Table):
    """One step of context extension."""

    sequence: Positive
    """Tokens per training sequence."""
    rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    """Base of the rotary frequencies from here on; by default unchanged."""
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the stage's budget."""
    mix: dict[str, Weight] | None = None
    """Data of this step; by default the stage's."""


class LanguageStage(SupervisedStage):
    """What every stage has that learns from running text."""

    mix: dict[str, Weight] = Field(default_factory=dict)
    """Weight of each [data] entry; by default all equally."""
    sequence: Positive = 256
    """Tokens per training sequence; documents are packed into it and do not see each other."""
    evaluate: bool = True
    """Measure after this stage."""


class PretrainStage(LanguageStage):
    """Pre-training on text."""

    kind: Literal["pretrain"]
    """Stage type."""
    mtp_weight: Annotated[float, Field(ge=0.0)] = 0.3
    """Weight of the multi-token prediction loss, when the model has such layers."""


class MidtrainStage(LanguageStage):
    """Mid-training: the context grows in steps, long documents are up-sampled."""

    kind: Literal["midtrain"]
    """Stage type."""
    context: Annotated[tuple[ContextStep, ...], Field(min_length=1)]
    """Steps in order; `sequence` of the stage is not used."""
    mtp_weight: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the multi-token prediction loss, when the model has such layers."""

    @model_validator(mode="after")
    def _shares(self) -> Self:
        total = sum(step.share for step in self.context)
        if len(self.context) == 1 or abs(total - 1.0) < 1e-6:
            return self
        raise ValueError(f"the shares of context steps add up to {total:g}; make it 1")


class DsaWarmupStage(LanguageStage):
    """Warm-up of the sparse-attention indexer: it alone trains, to rank keys as attention does."""

    kind: Literal["dsa_warmup"]
    """Stage type."""
    index_heads: Positive = 4
    """Heads of the indexer that a model without one gets."""
    index_head_dim: Positive = 32
    """Their width; at least the rotated width of the model's heads."""
    topk: Positive = 128
    """Keys each query will attend to."""
    share_every: Positive = 1
    """Layers that use one selection (IndexShare); 1: every layer selects for itself."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-3
    """Peak learning rate."""


class DsaAdaptStage(LanguageStage):
    """Sparse adaptation: everything trains, attention sees the selected keys only."""

    kind: Literal["dsa_adapt"]
    """Stage type."""
    index_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Weight of the indexer's loss over the selected keys."""
    mtp_weight: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the multi-token prediction loss, when the model has such layers."""


class SftStage(SupervisedStage):
    """Supervised fine-tuning on a task's demonstrations, or on conversations."""

    kind: Literal["sft"]
    """Stage type."""
    task: str | None = None
    """Task service whose scripted demonstrations to learn; "terminal" without `conversations`."""
    demonstrations: Positive = 6000
    """How many."""
    quality: Fraction = 1.0
    """Share of demonstrations with the right commands; the rest make plausible mistakes."""
    prompt_loss: Fraction = 0.0
    """Weight of the loss on tokens the model does not write (helps a model that starts from nothing
    to learn the language); 0 trains on assistant tokens only."""
    conversations: str | None = None
    """Instead of a task: a JSONL file of conversations, or "builtin" for generated ones."""
    count: Positive = 8000
    """How many built-in conversations."""
    mix: dict[str, Weight] = Field(default_factory=dict)
    """Running text to learn beside, as weights of [data] entries, so that what earlier stages
    taught is not forgotten; by default none."""
    mix_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Share of `mix` in the tokens of this stage."""
    mtp_weight: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the multi-token prediction loss, when the model has such layers."""
    thinking: Literal["interleaved", "preserved", "turn"] = "turn"
    """Which thinking stays in context, for conversations that do not say."""
    freeze_indexer: bool = True
    """Leave the sparse-attention indexer as it is."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.conversations is not None and self.task is not None:
            raise ValueError("give task or conversations, not both")
        return self

    @property
    def demonstrated_task(self) -> str | None:
        """Task service to ask for demonstrations, or None with `conversations`."""
        return None if self.conversations is not None else self.task or "terminal"


class AgenticRlStage(StageTable):
    """Agentic RL: rollouts and training at the same time (paper section 4.1)."""

    kind: Literal["agentic_rl"]
    """Stage type."""
    task: str = "terminal"
    """Task service."""
    tasks: dict[str, Weight] = Field(default_factory=dict)
    """Instead of task: several, with their target ratios of the groups, e.g. { terminal = 0.5,
    reasoning = 0.5 }."""
    mode: Literal["async", "sync"] = "async"
    """"async": generation never waits for training; "sync": generate a batch, train, publish."""
    updates: Positive | None = None
    """Optimizer updates; the stage ends at `updates` or `seconds`, whichever comes first."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per instance; they share a baseline."""
    groups_per_batch: Positive = 8
    """Groups with signal per optimizer update."""
    concurrency: Positive = 64
    """Rollouts in flight."""
    publish_every: Positive = 1
    """K: updates between weight publications."""
    reset_optimizer: bool = True
    """Start optimizer state afresh after each publication (paper section 4.1.1)."""
    staleness: Annotated[int, Field(ge=0)] = 4
    """tau: a trajectory is dropped when its oldest version lags more than this at the batch cut."""
    objective: Objective = DoubleSidedObjective()
    """What an update minimises: [stages.objective]."""
    failures: FailuresTable = FailuresTable()
    """What to do about failed rollouts: [stages.failures]."""
    tripwires: TripwiresTable = TripwiresTable()
    """What pauses the stage: [stages.tripwires]."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the others in it."""
    advantage_std: bool | None = None
    """Divide advantages by the group's standard deviation; by default for icepop and grpo (eq. 1)
    and not for the others (eq. 3)."""
    freeze_indexer: bool = True
    """Leave the sparse-attention indexer as it is; else it goes on learning to rank keys as
    attention does."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-4
    """Learning rate after the warm-up."""
    final_learning_rate: Fraction = 1.0
    """Share of learning_rate that is left at the end of the budget; the fall is linear."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates of linear learning-rate warm-up at the stage's start."""
    adam_beta2: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Second-moment decay."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature of rollouts."""
    max_sequence: Positive | None = None
    """Longest sequence trained on, in tokens; by default engine.max_context."""

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.updates is None and self.seconds is None:
            raise ValueError("give updates, seconds or both")
        return self

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        # A resolved recipe spells defaults out.
        if self.tasks and self.task != "terminal":
            raise ValueError("give task or tasks, not both")
        return self

    @property
    def task_ratios(self) -> dict[str, float]:
        """Every task of the stage with its target ratio."""
        return dict(self.tasks) or {self.task: 1.0}

    @model_validator(mode="before")
    @classmethod
    def _objective_of_older_recipes(cls, data: Any) -> Any:
        """eps_low and eps_high were keys of the stage; an objective without kind is the default."""
        if not isinstance(data, dict):
            return data
        moved = {key: data[key] for key in ("eps_low", "eps_high") if key in data}
        objective = data.get("objective", {})
        if not isinstance(objective, dict) or ("objective" not in data and not moved):
            return data
        if moved and "objective" in data:
            key = next(iter(moved))
            raise ValueError(f"{key} beside objective; move it to [stages.objective]")
        rest = {key: value for key, value in data.items() if key not in moved}
        return {**rest, "objective": {"kind": "double_sided_is", **objective, **moved}}

    @property
    def divides_by_std(self) -> bool:
        """`advantage_std`, with its default."""
        if self.advantage_std is not None:
            return self.advantage_std
        return self.objective.kind in ("icepop", "grpo")


Stage = Annotated[
    PretrainStage | MidtrainStage | DsaWarmupStage | DsaAdaptStage | SftStage | AgenticRlStage,
    Field(discriminator="kind"),
]
