"""Task services over HTTP, the asking side; docs/task-services.md describes the protocol."""

from headrace.tasks.remote.connection import RemoteSettings
from headrace.tasks.remote.place import FixedPlace, Place, ProcessPlace
from headrace.tasks.remote.pool import PoolSettings, ServicePool
from headrace.tasks.remote.register import Register
from headrace.tasks.remote.service import RemoteTasks

__all__ = [
    "FixedPlace",
    "Place",
    "PoolSettings",
    "ProcessPlace",
    "Register",
    "RemoteSettings",
    "RemoteTasks",
    "ServicePool",
]
