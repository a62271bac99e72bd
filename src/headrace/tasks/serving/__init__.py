"""Task services over HTTP, the serving side; docs/task-services.md describes the protocol."""

from headrace.tasks.serving.host import HostLimits
from headrace.tasks.serving.server import TaskServer, serve_tasks

__all__ = ["HostLimits", "TaskServer", "serve_tasks"]
