"""What a run measures, kept out of everything it trains on, over all its processes.

An evaluation instance must never be trained on, whichever way it comes: in order, by a curriculum,
again after a resume, or as a demonstration. The set is recorded before anything trains, and from
then on a run can only measure what was held out all along.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from headrace.errors import UserError
from headrace.recipe import EvaluationTable, Recipe
from headrace.rollout.choosing.mixing import HeldOut
from headrace.rollout.record.ledger import Ledger
from headrace.tasks.types import Demonstration, TaskInstance, TaskService

_STATE = "held_out"


def held_out_instances(task: TaskService, table: EvaluationTable) -> list[TaskInstance]:
    """What is measured of a task: the same at every measurement and for every seed of a recipe."""
    return [task.instance(task.evaluation_seed(i)) for i in range(table.instances)]


def measured(recipe: Recipe, tasks: Mapping[str, TaskService]) -> HeldOut:
    """Everything that a recipe measures. May block while its problems are made."""
    table = recipe.evaluation
    if table is None:
        return HeldOut(tasks)
    return HeldOut(
        tasks, [i for name in table.task_names for i in held_out_instances(tasks[name], table)]
    )


async def hold_out(recipe: Recipe, tasks: Mapping[str, TaskService], ledger: Ledger) -> HeldOut:
    """What this run must not train on: what it measures, and what it once meant to measure.

    Raises:
        UserError: it would measure problems that were not held out when training began.
    """
    now = await asyncio.to_thread(measured, recipe, tasks)
    before: dict[str, Any] | None = ledger.get_state(_STATE)
    if before is None:
        kept = now
    else:
        kept = now.together_with(before)
        added = len(kept) - len(before["contents"])
        if added and (trained := [stage.name for stage in ledger.stages()]):
            raise UserError(
                f"evaluation: {added} of its problems were not held out when stage {trained[0]} "
                "began, which may have trained on them; set evaluation (instances, tasks) and the "
                "options of its tasks back to what they were, or start another run"
            )
    ledger.put_state(_STATE, kept.saved)
    return kept


async def demonstrations_of(
    task: TaskService, count: int, seed: int, quality: float, held_out: HeldOut
) -> list[Demonstration]:
    """Demonstrations of a task that can make them, without those of held-out problems.

    Args:
        task: who makes them.
        count: how many to ask for; what is held out is missing from the result.
        seed: of the recipe.
        quality: share of right ones.
        held_out: what must not be shown.

    Raises:
        UserError: the task has none, does not say what they ask, or all are held out.
    """
    make = getattr(task, "demonstrations", None)
    if make is None:
        raise UserError(f"task {task.name} has no demonstrations; an sft stage cannot use it")
    found: list[Demonstration] = await make(count, seed, quality)
    if held_out and any(not d.content_id for d in found):
        raise UserError(
            f"task {task.name}: its demonstrations do not say which problems they show, so they "
            "may show what is measured; have the service fill in Demonstration.content_id, or "
            "measure other tasks only"
        )
    kept = [d for d in found if not held_out.shows(d.content_id)]
    if found and not kept:
        raise UserError(
            f"task {task.name}: all of its {len(found)} demonstrations show problems that are held "
            "out for evaluation; choose more families, or fewer evaluation.instances"
        )
    return kept
