"""Reasoning problems of the reasoning-gym package: any family, its own scorer, Python if wanted."""

from headrace.tasks.reasoning.service import ReasoningOptions, ReasoningTasks

__all__ = ["ReasoningOptions", "ReasoningTasks"]
