"""The dashboard's HTTP face: the page, its files, and JSON answers about one run. Read-only.

All answers come from one thread, which owns the ledger's connection; how many may wait for it is
bounded. What models wrote is hostile: a strict Content-Security-Policy goes with every answer, and
requests that name another host are refused, so that no web page can read a run through DNS.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import UserError
from headrace.observe.dashboard import answers
from headrace.observe.dashboard.files import PAGE, read_file
from headrace.observe.dashboard.source import RunSource
from headrace.rollout.record.browsing import MAX_PAGE, SessionFilter

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

PAGE_SIZE = 50
"""Trajectories of one answer unless asked for otherwise."""
_WAITING = 32
"""Requests that may wait for an answer; more are refused."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Desk:
    """Answers questions about one run in a thread of its own, one after the other.

    Args:
        open_source: makes the source, in that thread.

    Raises:
        UserError: from `open_source`.
    """

    def __init__(self, open_source: Callable[[], RunSource]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dashboard")
        try:
            self._source = self._thread.submit(open_source).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._waiting = 0

    async def ask(self, question: Callable[[RunSource], T]) -> T:
        """The answer.

        Raises:
            HTTPException: too many questions wait.
            UserError: from the question.
        """
        if self._waiting >= _WAITING:
            raise HTTPException(503, "too many requests wait; ask again in a moment")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, question, self._source)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Close the source and end the thread."""
        self._thread.submit(self._source.close).result()
        self._thread.shutdown()


def create_app(desk: Desk, *, hosts: tuple[str, ...]) -> FastAPI:
    """An ASGI app over one run.

    Routes: / and /static/NAME; /api/version; /api/NAME for each of `answers.AGGREGATES`;
    /api/trajectories (a page), /api/trajectory (one), /api/tokens (of one segment).

    Args:
        desk: answers.
        hosts: names under which clients may call this server, without a port.
    """
    app = FastAPI(title="headrace dashboard", docs_url=None, redoc_url=None, openapi_url=None)

    async def version(_: Request) -> Response:
        now, changed = await desk.ask(lambda source: (source.version(), source.last_change()))
        return _json(answers.encode({"version": now, "last_change": changed}))

    async def aggregate(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in answers.AGGREGATES:
            raise HTTPException(404, f"no answer is named {name[:80]!r}")
        tag, body = await desk.ask(lambda source: answers.aggregate(source, name))
        headers = {"ETag": f'"{tag}"', "X-Run-Version": tag}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=_HEADERS | headers)
        return _json(body, headers)

    async def page(request: Request) -> Response:
        query = request.query_params
        wanted, before = _filter(query), _whole(query, "before")
        limit = _whole(query, "limit")
        limit = PAGE_SIZE if limit is None else limit
        if not 1 <= limit <= MAX_PAGE:
            raise HTTPException(400, f"limit {limit}: give 1 to {MAX_PAGE}")
        found = await desk.ask(lambda source: answers.page(source, wanted, before, limit))
        return _json(answers.encode(found))

    async def trajectory(request: Request) -> Response:
        name = request.query_params.get("id", "")
        return _found(await desk.ask(lambda source: answers.trajectory(source, name)), name)

    async def tokens(request: Request) -> Response:
        query = request.query_params
        name = query.get("id", "")
        segment, offset = (_whole(query, key) or 0 for key in ("segment", "offset"))
        found = await desk.ask(lambda source: answers.tokens(source, name, segment, offset))
        return _found(found, name)

    async def static(request: Request) -> Response:
        name = request.path_params.get("name", PAGE)
        try:
            kind, body = read_file(name)
        except KeyError as error:
            raise HTTPException(404, "no such file") from error
        return Response(body, media_type=kind, headers=_HEADERS)

    routes: dict[str, Endpoint] = {
        "/": static,
        "/static/{name}": static,
        "/api/version": version,
        "/api/trajectories": page,
        "/api/trajectory": trajectory,
        "/api/tokens": tokens,
        "/api/{name}": aggregate,
    }
    for path, endpoint in routes.items():
        app.add_route(path, _guarded(endpoint, hosts), methods=["GET"])

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json(answers.encode({"error": error.detail}), status=error.status_code)

    async def explain(_: Request, error: Exception) -> Response:
        return _json(answers.encode({"error": str(error)}), status=409)

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(UserError, explain)
    return app


def _guarded(endpoint: Endpoint, hosts: tuple[str, ...]) -> Endpoint:
    @functools.wraps(endpoint)
    async def guarded(request: Request) -> Response:
        if request.headers.get("host", "").partition(":")[0] not in hosts:
            raise HTTPException(403, "this server answers only under its own address")
        return await endpoint(request)

    return guarded


def _filter(query: Mapping[str, str]) -> SessionFilter:
    """Raises HTTPException when a value makes no sense."""
    known = {name: query[name] for name in SessionFilter.__struct_fields__ if query.get(name)}
    try:
        return msgspec.convert(known, SessionFilter, strict=False)
    except msgspec.ValidationError as error:
        raise HTTPException(400, f"filter: {error}") from error


def _whole(query: Mapping[str, str], name: str) -> int | None:
    """A whole number of the query; raises HTTPException when it is none."""
    text = query.get(name)
    if not text:
        return None
    try:
        value = int(text[:40])
    except ValueError as error:
        raise HTTPException(400, f"{name} {text[:40]!r}: give a whole number") from error
    if not 0 <= value < 2**62:
        raise HTTPException(400, f"{name} {value}: out of range")
    return value


def _found(value: Any, name: str) -> Response:
    if value is None:
        raise HTTPException(404, f"no trajectory or segment of id {name[:80]!r}")
    return _json(answers.encode(value))


def _json(body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return Response(
        body,
        status_code=status,
        media_type="application/json",
        headers={**_HEADERS, **(headers or {})},
    )
