"""The stages a recipe can list, each from a checkpoint to a checkpoint.

A stage owns its trainer's processes and, for RL, the rollout source; what it shares with the rest
of a run comes in a `StageContext`.
"""

from pathlib import Path
from typing import Any

from headrace.recipe import AgenticRlStage, LanguageStage, SftStage, Stage
from headrace.stages.agentic_rl import run_agentic_rl
from headrace.stages.context import StageContext
from headrace.stages.language import run_language, run_sft


async def run_stage(
    context: StageContext, stage: Stage, source: Path, target: Path
) -> dict[str, Any]:
    """Run one stage, from where a crashed process left it; returns facts for the record."""
    if isinstance(stage, AgenticRlStage):
        return await run_agentic_rl(context, stage, source, target)
    if isinstance(stage, SftStage):
        return await run_sft(context, stage, source, target)
    assert isinstance(stage, LanguageStage)
    return await run_language(context, stage, source, target)


__all__ = ["StageContext", "run_stage"]
