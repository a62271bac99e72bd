"""A whole recipe file, as one table."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from headrace.recipe.stages import LanguageStage, MidtrainStage, SftStage, Stage
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
