"""Task services: endless problem instances and one way to attempt each over an API endpoint."""

from headrace.tasks.registry import create_task, task_names
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance, TaskService

__all__ = [
    "Endpoint",
    "RolloutResult",
    "TaskInstance",
    "TaskService",
    "create_task",
    "task_names",
]
