"""The HTTP face of a task service: the routes of docs/task-services.md.

Every request passes the same door: its token, its protocol version, its size. Whatever is wrong
with one is an answer with a code and a sentence; a bug in the service is a 500 of one line, with
its traceback in this process's log.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.tasks.serving.door import (
    Body,
    Refusal,
    answer,
    check_version,
    read_body,
    refuse,
    shows,
)
from headrace.tasks.serving.host import RolloutHost
from headrace.tasks.serving.wire import (
    DemonstrationsRequest,
    Health,
    InstancesRequest,
    SeedsRequest,
    StartRequest,
)

_log = logging.getLogger(__name__)


def create_task_app(host: RolloutHost, *, token: str | None) -> Starlette:
    """An ASGI app over `host`.

    Args:
        host: what answers; it is started and stopped by whoever made it.
        token: bearer token that everything but /v1/health asks for; None asks nobody, and keeps
            out pages in a browser instead.
    """
    door = _Door(host, token)

    async def service(request: Request) -> Any:
        return host.describe()

    async def health(request: Request) -> Any:
        return Health("ok", host.running)

    async def seeds(request: Request) -> Any:
        return await host.seeds(await door.read(request, SeedsRequest))

    async def instances(request: Request) -> Any:
        return await host.instances(await door.read(request, InstancesRequest))

    async def demonstrations(request: Request) -> Any:
        return await host.demonstrations(await door.read(request, DemonstrationsRequest))

    async def start(request: Request) -> Any:
        return host.begin(request.path_params["id"], await door.read(request, StartRequest))

    async def look(request: Request) -> Any:
        return await host.look(request.path_params["id"], _wait_of(request))

    async def cancel(request: Request) -> Any:
        return host.cancel(request.path_params["id"])

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        return refuse(Refusal(error.status_code, "not_found", f"{place}: {error.detail}"))

    def route(path: str, method: str, reply: Callable[[Request], Awaitable[Any]]) -> Route:
        public = reply is health
        # A look at a rollout does nothing but wait; it is bounded with the rollouts.
        waits = reply is look
        return Route(path, door.guard(reply, public=public, waits=waits), methods=[method])

    return Starlette(
        routes=[
            route("/v1/service", "GET", service),
            route("/v1/health", "GET", health),
            route("/v1/seeds", "POST", seeds),
            route("/v1/instances", "POST", instances),
            route("/v1/demonstrations", "POST", demonstrations),
            route("/v1/rollouts/{id}", "PUT", start),
            route("/v1/rollouts/{id}", "GET", look),
            route("/v1/rollouts/{id}", "DELETE", cancel),
        ],
        exception_handlers={HTTPException: http_error},
    )


class _Door:
    """What every request passes first."""

    def __init__(self, host: RolloutHost, token: str | None) -> None:
        self._limits = host.limits
        self._token = token.encode() if token is not None else None
        self._open = {True: 0, False: 0}
        # As many looks as rollouts, and as many again that a client gave up and asks once more.
        self._most = {True: 2 * host.limits.rollouts, False: host.limits.requests}

    def guard(
        self, reply: Callable[[Request], Awaitable[Any]], *, public: bool, waits: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        """`reply` behind the door."""

        async def guarded(request: Request) -> Response:
            try:
                if not public:
                    self._check(request)
                if self._open[waits] >= self._most[waits]:
                    raise Refusal(
                        429,
                        "too_many_requests",
                        f"{self._open[waits]} requests are open, which is the limit",
                        retry_after_s=1,
                    )
                self._open[waits] += 1
                try:
                    return answer(await reply(request))
                finally:
                    self._open[waits] -= 1
            except Refusal as refusal:
                return refuse(refusal)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it; it only ends the request
            except Exception as error:
                _log.exception("%s %s failed", request.method, request.url.path)
                words = f"{type(error).__name__}: {str(error)[:300]}"
                return refuse(Refusal(500, "service_failed", words))

        return guarded

    def _check(self, request: Request) -> None:
        if self._token is not None:
            if not shows(request, self._token):
                raise Refusal(
                    401, "unauthorized", "send the service's token as Authorization: Bearer TOKEN"
                )
        elif "origin" in request.headers:
            # Any web page could otherwise start rollouts on the machine of whoever looks at it.
            raise Refusal(403, "forbidden", "requests from web pages are refused without a token")
        check_version(request, "this service")

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body; see `read_body`."""
        limits = self._limits
        return await read_body(request, kind, most=limits.body_bytes, within_s=limits.body_s)


def _wait_of(request: Request) -> float:
    """How long a look may wait, from the query."""
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s < math.inf:
        raise Refusal(422, "invalid", f"wait_s is {text[:40]!r}; give seconds")
    return wait_s
