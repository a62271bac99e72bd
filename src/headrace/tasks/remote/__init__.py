"""Task services over HTTP, the asking side; docs/task-services.md describes the protocol."""

from headrace.tasks.remote.place import FixedPlace, Place, ProcessPlace
from headrace.tasks.remote.service import RemoteSettings, RemoteTasks

__all__ = ["FixedPlace", "Place", "ProcessPlace", "RemoteSettings", "RemoteTasks"]
