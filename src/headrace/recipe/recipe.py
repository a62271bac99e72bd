"""A whole recipe file, as one table."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from headrace.recipe.stages import AgenticRlStage, LanguageStage, MidtrainStage, SftStage, Stage
from headrace.recipe.suggestions import suggest
from headrace.recipe.tables import (
    ClusterTable,
    CorpusTable,
    EngineTable,
    EvaluationTable,
    GatewayTable,
    MeasureTable,
    ModelTable,
    NamedModelTable,
    ObserveTable,
    RolloutTable,
    SandboxTable,
    SessionTable,
    Table,
    TokenizerTable,
)
from headrace.recipe.tasks import TaskTable

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class Recipe(Table):
    """A whole recipe file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """Names run directories."""
    description: str = ""
    """One line for people."""
    seed: int = 0
    """Everything random derives from it."""
    model: ModelTable
    """Where the model comes from."""
    tokenizer: TokenizerTable | None = None
    """Needed with model.init and model.preset."""
    data: dict[Name, CorpusTable] = Field(default_factory=dict)
    """Corpora of language stages, by name: [data.NAME]."""
    cluster: ClusterTable = ClusterTable()
    """Where processes run."""
    engine: EngineTable = EngineTable()
    """The rollout engine."""
    gateway: GatewayTable = GatewayTable()
    """The HTTP server agents talk to."""
    sandbox: SandboxTable = SandboxTable()
    """Isolation of commands."""
    rollout: RolloutTable = RolloutTable()
    """Limits of every rollout."""
    session: SessionTable = SessionTable()
    """What a rollout may use of the models."""
    models: dict[Name, NamedModelTable] = Field(default_factory=dict)
    """Further models by name, e.g. a teacher or a judge: [models.NAME]."""
    tasks: dict[str, TaskTable] = Field(default_factory=dict)
    """Task services by name, where they run and their options: [tasks.NAME]."""
    evaluation: EvaluationTable | None = None
    """Held-out tasks; there by default unless [measure] is."""
    measure: MeasureTable | None = None
    """Measurement of a language model."""
    observe: ObserveTable = ObserveTable()
    """Where metrics go."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """In order; each starts from the result of the one before unless start_from says otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _default_evaluation(cls, data: Any) -> Any:
        if isinstance(data, dict) and "evaluation" not in data and "measure" not in data:
            return {**data, "evaluation": {}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.path is None and self.tokenizer is None:
            raise ValueError("a new model needs a [tokenizer] table")
        if self.model.path is not None and self.tokenizer is not None:
            raise ValueError("[tokenizer] trains a new tokenizer, but model.path brings its own")
        seen: set[str] = set()
        for stage in self.stages:
            if stage.name in seen:
                raise ValueError(f'two stages are named "{stage.name}"; names must differ')
            if stage.start_from is not None and stage.start_from not in seen:
                raise ValueError(
                    f'stage "{stage.name}": start_from "{stage.start_from}" is no earlier stage'
                    f"{suggest(stage.start_from, sorted(seen))}"
                )
            seen.add(stage.name)
        self._check_data()
        self._check_measured_beside()
        self._check_batch_invariant()
        if self.name in self.models:
            raise ValueError(
                f'models "{self.name}" has the name of the recipe, by which clients know the model '
                "that learns; choose another"
            )
        init = self.model.init
        if init is not None and self.engine.max_context > init.max_positions:
            raise ValueError(
                f"engine.max_context {self.engine.max_context} exceeds "
                f"model.init.max_positions {init.max_positions}"
            )
        return self

    def _check_measured_beside(self) -> None:
        """Raises ValueError when an RL stage measures what [evaluation] does not have."""
        for stage in self.stages:
            if not isinstance(stage, AgenticRlStage) or stage.evaluation is None:
                continue
            table = stage.evaluation
            if stage.keeps_best and f"{stage.name}-best" in {s.name for s in self.stages}:
                raise ValueError(
                    f'stage "{stage.name}-best" has the name under which the best weights of stage '
                    f'"{stage.name}" are kept; choose another'
                )
            place = f'stage "{stage.name}": evaluation'
            held_out = self.evaluation
            if held_out is None:
                raise ValueError(f"{place} needs [evaluation], whose instances it measures")
            if table.instances is not None and table.instances > held_out.instances:
                raise ValueError(
                    f"{place}.instances {table.instances} exceeds evaluation.instances "
                    f"{held_out.instances}, which alone are kept from training"
                )
            if table.score != "mean" and table.score not in held_out.task_names:
                raise ValueError(
                    f'{place}.score "{table.score}" is neither "mean" nor a task of [evaluation]'
                    f"{suggest(table.score, ['mean', *held_out.task_names])}"
                )

    def _check_batch_invariant(self) -> None:
        """Raises ValueError when a trainer is to match an engine that is not as it must be."""
        engine = self.engine
        for stage in self.stages:
            if not isinstance(stage, AgenticRlStage) or not stage.batch_invariant:
                continue
            for key, value, needed in (
                ("deterministic", engine.deterministic, True),
                ("dtype", engine.dtype, "float32"),
                ("weights", engine.weights, "same"),
            ):
                if value != needed:
                    raise ValueError(
                        f'stage "{stage.name}": batch_invariant = true with engine.{key} = '
                        f"{_toml(value)}: the engine then computes another sum; set engine.{key} = "
                        f"{_toml(needed)}, or leave batch_invariant out"
                    )

    def _check_data(self) -> None:
        """Raises ValueError when something names a corpus that is not there."""
        known = sorted(self.data)
        named: list[tuple[str, str]] = []
        for stage in self.stages:
            if isinstance(stage, LanguageStage) and not known:
                raise ValueError(f'stage "{stage.name}" needs text; add a [data.NAME] table')
            if isinstance(stage, LanguageStage | SftStage):
                named += [(f'stage "{stage.name}": mix', name) for name in stage.mix]
            if isinstance(stage, MidtrainStage):
                named += [
                    (f'stage "{stage.name}": context mix', name)
                    for step in stage.context
                    for name in step.mix or {}
                ]
        if self.tokenizer is not None and self.tokenizer.corpus is not None:
            named.append(("tokenizer.corpus", self.tokenizer.corpus))
        if self.measure is not None:
            wants_text = self.measure.text_bytes or self.measure.retrieval_lengths
            if self.measure.corpus is not None:
                named.append(("measure.corpus", self.measure.corpus))
            elif wants_text and not known:
                raise ValueError("measure needs text; add a [data.NAME] table")
        for place, name in named:
            if name not in self.data:
                raise ValueError(f'{place} "{name}" is no entry of [data]{suggest(name, known)}')


def _toml(value: bool | str) -> str:
    """As a recipe spells it."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
