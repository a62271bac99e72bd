"""What all stages share: the run around them, weight versions, saving, optimizer settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.cluster.types import Cluster
from headrace.engines import Placement
from headrace.recipe import AgenticRlStage, Recipe, StageTable, SupervisedStage
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.reading import VERSION_STATE
from headrace.stages.trainers import TrainerGroup
from headrace.system import System
from headrace.tasks.types import TaskService

SAVE_TIMEOUT_S = 600.0


class StageContext(msgspec.Struct, frozen=True):
    """What a stage gets from the run around it.

    Attributes:
        recipe: the whole recipe.
        run_dir: where checkpoints, weights and logs go.
        ledger: the run's record.
        cluster: where trainer processes start.
        cores: which cores belong to whom.
        system: engine, gateway and runner; None in a run that makes no rollouts.
        tasks: task services by name.
        log: called with (stage, step, metrics) after each step worth a row.
        progress: called with the share of the budget that is used.
        message: called with one line for people.
        evaluated: called with each finished evaluation, as summary.json keeps it.
    """

    recipe: Recipe
    run_dir: Path
    ledger: Ledger
    cluster: Cluster
    cores: Placement
    system: System | None
    tasks: dict[str, TaskService]
    log: Callable[[str, int, dict[str, float]], None]
    progress: Callable[[float], None]
    message: Callable[[str], None]
    evaluated: Callable[[dict[str, Any]], None] = lambda record: None


def training_folder(run_dir: Path, stage: StageTable) -> Path:
    """Where a supervised stage keeps what a resumed run goes on from.

    It is needed until the ledger has the stage as finished; whoever records that removes it.
    """
    return run_dir / "training" / stage.name


def next_version(ledger: Ledger) -> int:
    """A weight version never used in this run, not even by a process that crashed."""
    version = upcoming_version(ledger)
    take_version(ledger, version)
    return version


def upcoming_version(ledger: Ledger) -> int:
    """The number that `next_version` would give now.

    For weights that no engine gets before the ledger knows them: a process that dies before that
    must not have used it up, or everything in flight would look a publication older.
    """
    return int(ledger.get_state(VERSION_STATE, 0)) + 1


def take_version(ledger: Ledger, version: int) -> None:
    """From now on `version` is used."""
    ledger.put_state(VERSION_STATE, version)


async def save_weights(
    trainer: TrainerGroup,
    path: Path,
    *,
    tokenizer: Path,
    optimizer: bool = False,
    reset_optimizer: bool = False,
    beside: bool = False,
    version: int | None = None,
) -> None:
    """Have the trainer write its weights as a checkpoint directory.

    Args:
        tokenizer: directory whose tokenizer files go along.
        optimizer: also write optimizer state.
        reset_optimizer: forget optimizer state afterwards, and do not write it.
        beside: return when the trainer may go on; its "written" is answered when the checkpoint is
            on the disk.
        version: which version they will be published as.
    """
    await trainer.request(
        "save",
        {
            "path": str(path),
            "tokenizer": str(tokenizer),
            "optimizer": optimizer,
            "reset_optimizer": reset_optimizer,
            "beside": beside,
            "version": version,
        },
        timeout_s=SAVE_TIMEOUT_S,
    )


def optimizer_config(stage: StageTable) -> dict[str, Any]:
    """Keyword arguments of `OptimizerConfig`."""
    return {
        "learning_rate": stage.learning_rate,
        "weight_decay": stage.weight_decay,
        "beta2": stage.adam_beta2 if isinstance(stage, AgenticRlStage) else 0.95,
        "grad_clip": stage.grad_clip,
        "micro_tokens": stage.micro_tokens,
        "router_bias_rate": (stage.router_bias_rate if isinstance(stage, SupervisedStage) else 0.0),
        "bfloat16": stage.dtype == "bfloat16",
        "batch_invariant": isinstance(stage, AgenticRlStage) and stage.batch_invariant,
        "algorithm": stage.optimizer,
        "embedding": stage.embedding_rate if isinstance(stage, SupervisedStage) else 1.0,
    }
