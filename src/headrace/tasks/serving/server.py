"""A task service on a port: `serve_tasks` for a program of one's own, `TaskServer` inside a loop.

The server is bound to loopback unless told otherwise, and asks for a token everywhere else: whoever
reaches it can have rollouts made.
"""

import asyncio
import contextlib
import signal
from typing import Any

from headrace.errors import UserError
from headrace.http.server import ConnectionLimits, HttpServer, is_loopback, url_of
from headrace.tasks.serving.app import create_task_app
from headrace.tasks.serving.host import HostLimits, RolloutHost
from headrace.tasks.types import TaskService


def check_exposure(host: str, token: str | None) -> None:
    """Refuse tokens that no client could send, and to be open to others without one.

    Raises:
        UserError: see above.
    """
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise UserError("task service token: use visible ASCII characters")
    if token == "":
        raise UserError("task service token: is empty; leave it out, or choose one")
    if token is None and not is_loopback(host):
        raise UserError(f"host {host}: others can reach that address; give a token, too")


class TaskServer:
    """A running server. `await TaskServer.start(service)`, then `await server.stop()`."""

    def __init__(self, rollouts: RolloutHost, server: HttpServer) -> None:
        self.rollouts = rollouts
        self._server = server

    @property
    def url(self) -> str:
        """What a recipe names as `service`."""
        return self._server.url

    @property
    def bound_url(self) -> str:
        """The same by the address it is bound to, which may stand for every one."""
        return url_of(self._server.host, self._server.port)

    @property
    def port(self) -> int:
        """TCP port it listens on."""
        return self._server.port

    @classmethod
    async def start(
        cls,
        service: TaskService,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: HostLimits | None = None,
        options: dict[str, Any] | None = None,
    ) -> "TaskServer":
        """Serve `service`, which stays the caller's to close; returns once requests are accepted.

        Args:
            service: what is served.
            host: address to bind; anything but loopback needs a token.
            port: TCP port; 0 picks a free one.
            token: bearer token clients must send.
            limits: see HostLimits.
            options: see RolloutHost.

        Raises:
            UserError: no token where one is needed, or the port is taken.
        """
        check_exposure(host, token)
        rollouts = RolloutHost(service, limits, options=options)
        app = create_task_app(rollouts, token=token)
        # One connection per rollout that is waited for, and some for everything else.
        most = 2 * rollouts.limits.rollouts + rollouts.limits.requests
        server = await HttpServer.start(
            app,
            host=host,
            port=port,
            name=f"task {service.name}",
            limits=ConnectionLimits(connections=most),
        )
        rollouts.start()
        return cls(rollouts, server)

    async def stop(self) -> None:
        """End every rollout, then the port. Safe to repeat."""
        await self.rollouts.stop()
        await self._server.stop()


def serve_tasks(
    service: TaskService,
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    token: str | None = None,
    limits: HostLimits | None = None,
    register: str | None = None,
    url: str | None = None,
) -> None:
    """Serve a task service until Ctrl-C or SIGTERM: the last line of a program of one's own.

    Prints the address that a recipe names as `service`. Arguments as of `TaskServer.start`; a
    `close` of the service is awaited at the end.

    Args:
        register: address at which a run waits for services; announces this one there until the
            end. Needs a token, which is the run's, too.
        url: where the run reaches this one, if not at `host` and `port`.

    Raises:
        UserError: no token where one is needed, no address where one is, or the port is taken.
    """
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(
            serve_until_stopped(
                service,
                register=register,
                url=url,
                host=host,
                port=port,
                token=token,
                limits=limits,
            )
        )


async def serve_until_stopped(
    service: TaskService, *, register: str | None = None, url: str | None = None, **options: Any
) -> None:
    """Serve until Ctrl-C or SIGTERM cancel the task that awaits this; arguments as of
    `serve_tasks` and `TaskServer.start`. The service is closed at the end."""
    # Here, as the client's package imports the types of this one.
    from headrace.tasks.serving.announcing import announced, check_registration

    token = options.get("token")
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None, "runs as a task"
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    try:
        check_registration(register, url, token)
        server = await TaskServer.start(service, **options)
        try:
            print(f"task {service.name} at {server.url} (Ctrl-C stops it)", flush=True)
            found = server.rollouts.describe()
            async with announced(found, url or server.bound_url, register=register, token=token):
                await asyncio.Event().wait()
        finally:
            await server.stop()
    finally:
        close = getattr(service, "close", None)
        if close is not None:
            await close()
