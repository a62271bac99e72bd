"""The stage tables of a recipe: from random weights to an agent, each from a checkpoint to one."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.recipe.curriculum import CurriculumTable, DynamicTable
from headrace.recipe.ending import StageEvaluationTable, StopTable
from headrace.recipe.failures import FailuresTable, TripwiresTable
from headrace.recipe.objectives import DistillationObjective, DoubleSidedObjective, Objective
from headrace.recipe.sharing import RatiosTable, TaskRatio, check_ratios
from headrace.recipe.suggestions import suggest
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
    tasks: dict[str, TaskRatio] = Field(default_factory=dict)
    """Instead of task: several, with their target ratios of the groups, e.g. { terminal = 0.5,
    reasoning = 0.5 }; a table instead of a number says more: [stages.tasks.NAME]."""
    ratios: RatiosTable = RatiosTable()
    """Whether the ratios move as the stage goes on: [stages.ratios]."""
    mode: Literal["async", "one_step_off", "sync"] = "async"
    """"async": generation never waits for training; "one_step_off": one batch is generated while
    the one before trains, with the weights before that update; "sync": generate a batch, train,
    publish. docs/loop.md shows them."""
    updates: Positive | None = None
    """Optimizer updates; the stage ends at `updates`, `seconds` or `trained_tokens`, whichever
    comes first."""
    trained_tokens: Positive | None = None
    """Sampled tokens that have trained, each counted once; prompts and tool output do not count."""
    group_size: Positive = 8
    """Rollouts per instance; they share a baseline. 1 for distillation, which has none."""
    groups_per_batch: Positive = 8
    """Groups with signal per optimizer update."""
    concurrency: Positive = 64
    """Rollouts in flight."""
    ready_batches: Positive = 2
    """Where half as many batches of finished groups wait for the trainer, fewer rollouts are begun;
    where this many do, none. More keep the trainer busy beside uneven rollouts, and make what it
    trains on older."""
    hold_back: bool = True
    """Begin no rollouts while so many are on their way that further ones would be older than
    `staleness` when their turn came, by the rate at which groups train. For mode "async"; false
    keeps `concurrency` rollouts in flight whatever becomes of them."""
    publish_every: Positive = 1
    """K: updates between weight publications; 1 unless mode is "async"."""
    partial_rollouts: Literal["continue", "restart", "wait"] = "continue"
    """What becomes of rollouts that new weights meet half done: "continue" goes on with the new
    weights, every token keeps its own version; "restart" samples the call in progress anew;
    "wait" begins no rollouts and publishes when none is left, so that each has one version."""
    reset_optimizer: bool = True
    """Start optimizer state afresh after each publication (paper section 4.1.1)."""
    staleness: Annotated[int, Field(ge=0)] = 4
    """tau: a trajectory is dropped when its oldest version lags more than this at the batch cut.
    For mode "async"; "one_step_off" has 1 and "sync" 0."""
    objective: Objective = DoubleSidedObjective()
    """What an update minimises: [stages.objective]."""
    curriculum: CurriculumTable = CurriculumTable(sampling="uniform")
    """Which problems are attempted: [stages.curriculum]; without it all, in their own order."""
    dynamic: DynamicTable = DynamicTable()
    """How many groups a batch may cost: [stages.dynamic]."""
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
    batch_invariant: bool = False
    """The trainer's forward pass uses the batch-invariant kernels of the engine (bitwise consistent
    or "true on-policy" RL): at equal weights both find the same logprobs, to the bit. In float32 on
    the CPU; needs engine.deterministic. Updates take longer, and the trainer holds one more copy of
    the weights."""
    max_sequence: Positive | None = None
    """Longest sequence trained on, in tokens; by default engine.max_context."""
    give_up_s: Seconds = 120.0
    """Seconds without one rollout whose environment worked, all tasks having failed many times in a
    row and being paused, after which the stage ends with an error. A task that fails so rests while
    the others go on, and is tried again."""
    evaluation: StageEvaluationTable | None = None
    """Measure held-out success beside training: [stages.evaluation]."""
    stop: StopTable | None = None
    """End early by what is measured: [stages.stop]."""
    result: Literal["last", "best"] = "last"
    """Weights that the stage hands on: the last ones, or those with the best score measured."""

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.updates is None and self.seconds is None and self.trained_tokens is None:
            raise ValueError("give updates, seconds or both, or trained_tokens")
        return self

    @model_validator(mode="after")
    def _computes(self) -> Self:
        if self.batch_invariant and self.dtype != "float32":
            raise ValueError(
                f'batch_invariant = true with dtype = "{self.dtype}": it computes in float32; '
                'set dtype = "float32", or leave batch_invariant out'
            )
        return self

    @model_validator(mode="after")
    def _publishes(self) -> Self:
        if self.mode != "async" and self.publish_every > 1:
            raise ValueError(
                f'publish_every {self.publish_every}: mode "{self.mode}" publishes after every '
                'update; leave it out, or use mode "async"'
            )
        return self

    @model_validator(mode="after")
    def _measured(self) -> Self:
        table = self.evaluation
        if table is None:
            for key, wanted in (("stop", self.stop is not None), ("result", self.result == "best")):
                if wanted:
                    raise ValueError(
                        f"{key} looks at what is measured; add [stages.evaluation] with every"
                    )
        elif table.every % self.publish_every:
            raise ValueError(
                f"evaluation.every {table.every} is no multiple of publish_every "
                f"{self.publish_every}; only published weights are measured"
            )
        return self

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        # A resolved recipe spells defaults out.
        if self.tasks and self.task != "terminal":
            raise ValueError("give task or tasks, not both")
        check_ratios(self.ratios, self.tasks)
        return self

    @property
    def task_ratios(self) -> dict[str, float]:
        """Every task of the stage with its target ratio."""
        return {name: table.ratio for name, table in self.tasks.items()} or {self.task: 1.0}

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

    @model_validator(mode="before")
    @classmethod
    def _one_rollout_is_a_group(cls, data: Any) -> Any:
        objective = data.get("objective") if isinstance(data, dict) else None
        kind = objective.get("kind") if isinstance(objective, dict) else None
        return {"group_size": 1, **data} if kind == "distillation" else data

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        distils = isinstance(self.objective, DistillationObjective)
        if distils and self.group_size != 1:
            raise ValueError(
                f"group_size is {self.group_size}, but distillation compares nothing; make it 1"
            )
        if not distils and self.group_size < 2:
            raise ValueError(
                "group_size is 1, which leaves nothing to compare a reward with; use 2 or more, or "
                'objective.kind = "distillation"'
            )
        if isinstance(self.objective, DistillationObjective):
            tasks = set(self.task_ratios)
            for task in sorted(tasks):
                if self.objective.teacher_of(task) is None:
                    raise ValueError(f"objective.teachers names none for task {task}; add one")
            for task in self.objective.teachers:
                if task not in tasks:
                    raise ValueError(
                        f'objective.teachers names "{task}", which is no task of the stage'
                        f"{suggest(task, sorted(tasks))}"
                    )
        return self

    @property
    def tau(self) -> int:
        """`staleness`, as the mode has it."""
        return {"sync": 0, "one_step_off": 1}.get(self.mode, self.staleness)

    @property
    def keeps_best(self) -> bool:
        """Whether the best weights have to be there at the end."""
        return self.evaluation is not None and (self.evaluation.keep_best or self.result == "best")

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
