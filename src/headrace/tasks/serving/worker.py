"""A task service in a process of its own: makes it, serves it on loopback, ends with its parent."""

import asyncio
import secrets
from typing import Any

import msgspec

from headrace.cluster.types import Request
from headrace.cluster.worker import WorkerConnection
from headrace.errors import UserError
from headrace.sandbox import open_provider
from headrace.sandbox.types import Limits
from headrace.tasks.registry import make_task
from headrace.tasks.serving.server import TaskServer

_POLL_S = 0.5


class TaskWorker:
    """See `headrace.cluster.worker`. One request is known: "serve", which answers [URL, token].

    Args:
        connection: to the parent.
        name: of the task.
        options: of its service.
        implementation: "package.module:Class"; None for a service that headrace has.
        sandbox: kind of isolation and its `Limits`, as plain values.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        *,
        name: str,
        options: dict[str, Any],
        implementation: str | None,
        sandbox: dict[str, Any],
    ) -> None:
        self._connection = connection
        self._name = name
        self._options = options
        self._implementation = implementation
        self._kind = sandbox["kind"]
        self._limits = msgspec.convert(sandbox["limits"], Limits)

    def run(self) -> None:
        """Serve until the parent hangs up."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        try:
            provider = open_provider(self._kind, self._limits)
            service = make_task(self._name, self._options, provider, self._implementation)
        except UserError as error:
            await self._refuse(str(error))
            return
        try:
            token = secrets.token_urlsafe(24)
            server = await TaskServer.start(service, token=token, options=self._options)
            try:
                while (request := await self._next()) is not None:
                    self._connection.reply(request.id, [server.url, token])
            finally:
                await server.stop()
        finally:
            close = getattr(service, "close", None)
            if close is not None:
                await close()
            await provider.close()

    async def _refuse(self, message: str) -> None:
        while (request := await self._next()) is not None:
            self._connection.fail(request.id, "user_error", message)

    async def _next(self) -> Request | None:
        """The parent's next request; None when it has hung up."""
        while not self._connection.closed:
            request = await asyncio.to_thread(self._connection.poll, _POLL_S)
            if request is not None:
                return request
        return None
