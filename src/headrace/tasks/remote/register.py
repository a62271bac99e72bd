"""Where task services announce themselves to a run: a port that is open as long as the run is.

Whoever announces shows the token of its task; everything else about it is the business of that
task's pool. docs/task-services.md describes the routes.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.http.server import ConnectionLimits, HttpServer
from headrace.tasks.remote.pool import ServicePool
from headrace.tasks.results import shown
from headrace.tasks.serving.door import Refusal, answer, check_version, read_body, refuse, shows
from headrace.tasks.serving.wire import LONGEST_ID, Announcement

_log = logging.getLogger(__name__)

MOST_BYTES = 256 << 10
"""Size of an announcement."""
_BODY_S = 10.0
_CONNECTIONS = 256
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{LONGEST_ID}}}")


class Register:
    """See the module. `await Register.start(...)`, then `await register.stop()`.

    Args:
        report: told in words of an announcement that is refused, once in a row.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._pools: dict[str, ServicePool] = {}
        self._refused = ""
        self._server: HttpServer

    @classmethod
    async def start(
        cls,
        *,
        host: str,
        port: int,
        address: str | None = None,
        report: Callable[[str], None] = _log.warning,
    ) -> "Register":
        """Listen; every announcement is refused until its pool is expected.

        Args:
            host: address to bind.
            port: TCP port; 0 picks a free one.
            address: what services call this machine, see `HttpServer.start`.
            report: see the class.

        Raises:
            UserError: the port is in use or the address cannot be bound.
        """
        register = cls(report)
        service = "/v1/services/{id}"
        app = Starlette(
            routes=[
                Route(service, register._guard(register._announce), methods=["PUT"]),
                Route(service, register._guard(register._withdraw), methods=["DELETE"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )
        register._server = await HttpServer.start(
            app,
            host=host,
            port=port,
            address=address,
            name="register of task services (gateway.register_port)",
            limits=ConnectionLimits(connections=_CONNECTIONS),
        )
        return register

    @property
    def url(self) -> str:
        """What services are given as the place to announce themselves."""
        return self._server.url

    @property
    def port(self) -> int:
        """TCP port it listens on."""
        return self._server.port

    def expect(self, pool: ServicePool) -> None:
        """From here on instances of the pool's task may announce themselves."""
        self._pools[pool.task] = pool

    async def stop(self) -> None:
        """Close the port; the pools stay the caller's to close. Safe to repeat."""
        await self._server.stop()

    # -- requests ------------------------------------------------------------------------------

    async def _announce(self, request: Request, known: list[ServicePool]) -> Any:
        instance_id = _id_of(request)
        said = await read_body(request, Announcement, most=MOST_BYTES, within_s=_BODY_S)
        pool = self._pools.get(said.task)
        if pool is None:
            names = ", ".join(sorted(pool.task for pool in known))
            raise Refusal(
                404,
                "unknown_task",
                f"task is {shown(said.task)}, which this run does not wait for; it waits for "
                f"{names}",
            )
        if pool not in known:
            raise Refusal(403, "forbidden", f"this is not the token of task {said.task}")
        return pool.announce(instance_id, said)

    async def _withdraw(self, request: Request, known: list[ServicePool]) -> Any:
        instance_id = _id_of(request)
        gone = [pool.withdraw(instance_id) for pool in known]
        return next((farewell for farewell in gone if farewell.known), gone[0])

    def _guard(
        self, reply: Callable[[Request, list[ServicePool]], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """`reply`, for requests that show a token of this run and speak its protocol."""

        async def guarded(request: Request) -> Response:
            try:
                # Every token is compared, so that the time says nothing about any.
                known = [p for p in self._pools.values() if shows(request, p.token.encode())]
                if not known:
                    raise Refusal(
                        401,
                        "unauthorized",
                        "send the token of a task of this run as Authorization: Bearer TOKEN",
                    )
                check_version(request, "this run")
                return answer(await reply(request, known))
            except Refusal as refusal:
                self._note(refusal)
                return refuse(refusal)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it; it only ends the request
            except Exception as error:
                _log.exception("%s %s failed", request.method, request.url.path)
                return refuse(Refusal(500, "run_failed", f"{type(error).__name__}: {error}"[:300]))

        return guarded

    def _note(self, refusal: Refusal) -> None:
        """Tell people at the run why an announcement was refused."""
        words = " ".join(refusal.message[:400].split())
        for pool in self._pools.values():
            pool.refused = words
        if words != self._refused:
            self._refused = words
            self._report(f"an announcement of a task service was refused: {words}")


def _id_of(request: Request) -> str:
    instance_id = request.path_params["id"]
    if not _ID.fullmatch(instance_id):
        raise Refusal(
            422,
            "invalid",
            f"id is {shown(instance_id)}; use 1 to {LONGEST_ID} letters, digits, '.', '_' and '-'",
        )
    return instance_id


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    return refuse(Refusal(error.status_code, "not_found", f"{place}: {error.detail}"))
