"""Recipes: what to run, as typed TOML.

A recipe names a model, data or a task, and a list of stages. Everything has a documented default;
an unknown key is an error that names the nearest known one. This room only reads and checks; it
touches neither models nor processes.
"""

from headrace.recipe.curriculum import CurriculumTable, DynamicTable
from headrace.recipe.ending import StageEvaluationTable, StopTable
from headrace.recipe.failures import FailuresTable, TripwiresTable
from headrace.recipe.loading import (
    apply_override,
    find_recipe,
    load_recipe,
    parse_recipe,
    stage_kinds,
    tables_in,
)
from headrace.recipe.objectives import (
    DistillationObjective,
    DoubleSidedObjective,
    GrpoObjective,
    IcepopObjective,
    Objective,
    ObjectiveTable,
    PpoRolloutObjective,
    TruncatedIsObjective,
    UncorrectedObjective,
)
from headrace.recipe.recipe import Recipe
from headrace.recipe.sharing import RatiosTable, TaskRatio, share_limits
from headrace.recipe.stages import (
    AgenticRlStage,
    ContextStep,
    DsaAdaptStage,
    DsaWarmupStage,
    LanguageStage,
    MidtrainStage,
    PretrainStage,
    SftStage,
    Stage,
    StageTable,
    SupervisedStage,
)
from headrace.recipe.suggestions import suggest
from headrace.recipe.tables import (
    CorpusTable,
    EngineTable,
    EvaluationTable,
    MeasureTable,
    ModelTable,
    NamedModelTable,
    SessionTable,
    Table,
)
from headrace.recipe.tasks import TaskTable

__all__ = [
    "AgenticRlStage",
    "ContextStep",
    "CorpusTable",
    "CurriculumTable",
    "DistillationObjective",
    "DoubleSidedObjective",
    "DsaAdaptStage",
    "DsaWarmupStage",
    "DynamicTable",
    "EngineTable",
    "EvaluationTable",
    "FailuresTable",
    "GrpoObjective",
    "IcepopObjective",
    "LanguageStage",
    "MeasureTable",
    "MidtrainStage",
    "ModelTable",
    "NamedModelTable",
    "Objective",
    "ObjectiveTable",
    "PpoRolloutObjective",
    "PretrainStage",
    "RatiosTable",
    "Recipe",
    "SessionTable",
    "SftStage",
    "Stage",
    "StageEvaluationTable",
    "StageTable",
    "StopTable",
    "SupervisedStage",
    "Table",
    "TaskRatio",
    "TaskTable",
    "TripwiresTable",
    "TruncatedIsObjective",
    "UncorrectedObjective",
    "apply_override",
    "find_recipe",
    "load_recipe",
    "parse_recipe",
    "share_limits",
    "stage_kinds",
    "suggest",
    "tables_in",
]
