"""The HTTP face of an engine: token ids in, token ids out, and what an operator needs.

Routes translate between `wire` and an `EngineClient`; they know nothing of text. Whatever comes in,
the answer is one of the documented ones: docs/serving.md, and /openapi.json from the same models.
"""

import asyncio
import hashlib
import logging
import math
import re
import uuid
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.engine.config import USER_ERROR
from headrace.engine.pulse import Pulse
from headrace.engine.serving.doorway import PUBLIC, Doorway, Limits, Refusal, read_json
from headrace.engine.serving.event_stream import MEDIA_TYPE, EventStream, OnOutput, unless_gone
from headrace.engine.serving.idempotency import Replays
from headrace.engine.serving.metrics import CONTENT_TYPE, HttpMetrics
from headrace.engine.serving.wire import (
    BODIES,
    EVENTS,
    AbortAnswer,
    AbortBody,
    ErrorAnswer,
    GenerateAnswer,
    GenerateBody,
    HealthAnswer,
    WeightsAnswer,
    WeightsBody,
    answer,
    describe,
    is_unreadable,
)
from headrace.engine.several import generate_several
from headrace.engine.types import (
    EngineClient,
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    Progress,
)
from headrace.errors import UserError

_log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=BaseModel)

_MAX_KEY = 256
_KEY_PATTERN = f"[!-~]{{1,{_MAX_KEY}}}"
_BODY_BYTES = 1 << 20
_BYTES_PER_TOKEN = 16
_TITLES = {
    400: "The body is not JSON, or a header is malformed",
    401: "The API key is missing or wrong",
    403: "From a web page, and the engine has no API key",
    408: "The body took too long",
    413: "The body is too large",
    415: "The body is not application/json",
    422: "A field cannot be used; the message names it",
    429: "Too much is open; Retry-After says when to come back",
    500: "The generation failed, or a bug",
    503: "The engine is closed or does not answer",
    504: "The engine did not answer in time",
}
_READING = (400, 408, 413, 415, 422)
_KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": f"^{_KEY_PATTERN}$"},
    "description": "A repetition with the same key and body joins the call or gets its answer.",
}
_STREAM = {
    "schema": {
        "type": "object",
        "description": "One event; its data is JSON: of token a TokenEvent, of restart a "
        "RestartEvent, of done a GenerateAnswer, of error an ErrorAnswer.",
        "properties": {
            "event": {"enum": ["token", "restart", "done", "error"]},
            "data": {"type": "string"},
        },
        "required": ["event", "data"],
    },
}


class EngineApi:
    """The routes.

    Args:
        engine: what answers.
        limits: see `Limits`.
        metrics: where tokens and requests are counted.
    """

    def __init__(self, engine: EngineClient, limits: Limits, metrics: HttpMetrics) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._pulse = Pulse(engine)
        self._replays = Replays(limits.replays, limits.replay_s)
        # Requests under way: the ids they have in the engine, by the id they have here.
        self._open: dict[str, tuple[str, ...]] = {}
        self._update: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Response:
        """Sample from a prompt. A client that goes away ends the request, unless it sent a key."""
        key = request.headers.get("idempotency-key")
        if key is not None and not re.fullmatch(_KEY_PATTERN, key):
            raise Refusal(
                400,
                EngineError.INVALID,
                f"Idempotency-Key: send 1 to {_MAX_KEY} visible ASCII characters, not {key[:60]!r}",
            )
        body = await self._read(request, GenerateBody)

        async def run(on_output: OnOutput | None = None) -> bytes:
            if key is None:
                return await self._generate(body, on_output)
            return await self._once(key, body, on_output)

        if body.stream:
            return EventStream(run, self._refuse_late, self._limits.keepalive_s)
        data = await unless_gone(request, run())
        if data is None:
            raise ClientDisconnect
        return Response(data, media_type="application/json")

    async def _once(self, key: str, body: GenerateBody, on_output: OnOutput | None) -> bytes:
        """Generate, or get what a call with this key has come or comes to."""
        first = False

        async def start() -> bytes:
            nonlocal first
            first = True
            return await self._generate(body, on_output)

        same = body.model_dump_json(exclude={"stream"}).encode()
        data = await self._replays.run(key, hashlib.blake2b(same).digest(), start)
        if on_output is not None and not first:
            _tell_all(data, on_output)
        return data

    async def _generate(self, body: GenerateBody, on_output: OnOutput | None) -> bytes:
        """Run one body to its end.

        Returns:
            A `GenerateAnswer` as JSON.

        Raises:
            EngineError: refused or failed.
            Refusal: 504.
        """
        request_id = body.id if body.id is not None else f"http-{uuid.uuid4().hex}"
        if request_id in self._open:
            raise EngineError(
                EngineError.INVALID, f"id: {request_id!r} is in use; choose another, or none"
            )
        if len(body.prompt_ids) >= self._engine.max_context:
            raise EngineError(
                EngineError.TOO_LONG,
                f"prompt_ids: {len(body.prompt_ids)} tokens leave no room in the context of "
                f"{self._engine.max_context}",
            )
        if body.n == 1:
            self._open[request_id] = (request_id,)
        else:
            self._open[request_id] = tuple(f"{request_id}/{k}" for k in range(body.n))
        try:
            async with asyncio.timeout(body.timeout_s + self._limits.grace_s):
                results = await self._run(body.request(request_id), body.n, on_output)
        except TimeoutError:
            raise Refusal(
                504,
                "deadline_exceeded",
                f"the engine did not answer within {self._limits.grace_s} s of the request's "
                f"timeout_s {body.timeout_s}; see /health",
            ) from None
        finally:
            del self._open[request_id]
        for result in results:
            self._metrics.finished(result)
        return answer(request_id, results).model_dump_json().encode()

    async def _run(
        self, request: GenerationRequest, n: int, on_output: OnOutput | None
    ) -> list[GenerationResult]:
        tell = self._teller(request.id, on_output) if on_output is not None else None
        if n == 1:
            return [await self._engine.generate(request, tell)]
        return await generate_several(self._engine, request, n, tell)

    def _teller(self, request_id: str, on_output: OnOutput) -> OnProgress:
        times = self._metrics.watch()
        outputs = {name: index for index, name in enumerate(self._open[request_id])}

        def tell(progress: Progress) -> None:
            index = outputs[progress.id]
            times.saw(index, progress)
            on_output(index, progress)

        return tell

    async def abort(self, request: Request) -> Response:
        """End a request early; it is answered with what it has sampled."""
        body = await self._read(request, AbortBody)
        known = body.id in self._open
        for request_id in self._open.get(body.id, (body.id,)):
            await self._engine.abort(request_id)
        return _reply(AbortAnswer(id=body.id, aborted=known))

    async def weights(self, request: Request) -> Response:
        """The weights in use and what updates have cost."""
        await self._pulse.feel(self._limits.status_s)
        return _reply(self._weights())

    async def load_weights(self, request: Request) -> Response:
        """Switch to other weights while requests run; answers when it is done."""
        body = await self._read(request, WeightsBody)
        if self._update is not None and not self._update.done():
            raise EngineError(EngineError.OVERLOADED, "an update is under way; wait for its end")
        self._update = asyncio.create_task(self._load(body))
        # Half an update is worse than one that nobody waits for.
        await asyncio.shield(self._update)
        await self._pulse.feel(self._limits.status_s)
        return _reply(self._weights())

    async def _load(self, body: WeightsBody) -> None:
        self._pulse.updating = True
        try:
            await self._engine.load_weights(body.path, body.version, body.policy)
        except UserError as error:
            raise Refusal(422, USER_ERROR, str(error)) from error
        finally:
            self._pulse.updating = False

    def _weights(self) -> WeightsAnswer:
        count = self._pulse.count
        return WeightsAnswer(
            version=self._engine.weight_version,
            updating=self._pulse.updating,
            updates=count("updates"),
            last_update_pause_s=self._pulse.stats.get("last_update_pause_s", 0.0),
            update_bytes=count("update_bytes"),
            update_tensors=count("update_tensors"),
            requests_restarted=count("requests_restarted"),
        )

    async def health(self, request: Request) -> Response:
        """Whether the engine answers: 200 if so or during an update, else 503."""
        status = await self._pulse.feel(self._limits.status_s)
        count = self._pulse.count
        body = HealthAnswer(
            status=status,
            weight_version=self._engine.weight_version,
            max_context=self._engine.max_context,
            running=count("running"),
            waiting=count("waiting"),
            restarts=count("restarts"),
            replicas=self._pulse.stats.get("replicas"),
        )
        return _reply(body, 200 if status in ("ok", "updating") else 503)

    async def metrics(self, request: Request) -> Response:
        """Counters and histograms for Prometheus."""
        status = await self._pulse.feel(self._limits.status_s)
        text = self._metrics.render(self._pulse.stats, up=status in ("ok", "updating"))
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _read(self, request: Request, model: type[_Model]) -> _Model:
        limit = self._limits.body_bytes
        if not limit:
            limit = _BODY_BYTES + _BYTES_PER_TOKEN * self._engine.max_context
        data = await read_json(request, limit, self._limits.body_s)
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            status = 400 if is_unreadable(error) else 422
            raise Refusal(status, EngineError.INVALID, describe(error)) from None

    def _refuse(self, error: Exception) -> Response:
        """The answer to whatever a route raised."""
        if isinstance(error, EngineError):
            error = Refusal.of(error)
        if isinstance(error, Refusal):
            return error.response()
        if isinstance(error, UserError):
            # The engine cannot be started again: not this client's mistake.
            return Refusal(503, EngineError.CLOSED, str(error)).response()
        return Refusal(500, "internal_error", f"internal error: {error!r}").response()

    def _refuse_late(self, error: Exception) -> Response:
        """The same where nobody above sees the exception, so that a bug leaves a trace."""
        response = self._refuse(error)
        if not isinstance(error, EngineError | Refusal | UserError):
            _log.error("a bug in the engine's HTTP surface", exc_info=error)
        return response


def _reply(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json().encode(), status, media_type="application/json")


def _tell_all(data: bytes, on_output: OnOutput) -> None:
    """Tell the tokens of a finished answer, as they would have been had one watched."""
    for output in msgspec.json.decode(data)["outputs"]:
        for span in output["spans"]:
            part = slice(span["start"], span["end"])
            progress = Progress(
                id="",
                ids=tuple(output["ids"][part]),
                logprobs=_numbers(output["logprobs"][part]),
                raw_logprobs=_numbers(output["raw_logprobs"][part]),
                weight_version=span["weight_version"],
            )
            on_output(output["index"], progress)


def _numbers(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


class _App(FastAPI):
    """FastAPI whose document also holds the models of bodies and events."""

    def openapi(self) -> dict[str, Any]:
        """See `FastAPI.openapi`."""
        if not self.openapi_schema:
            document = get_openapi(
                title=self.title,
                version=self.version,
                description=self.description,
                routes=self.routes,
            )
            _, models = models_json_schema(
                [
                    *((model, "validation") for model in BODIES),
                    *((model, "serialization") for model in EVENTS),
                ],
                ref_template="#/components/schemas/{model}",
            )
            components = document["components"]
            components["schemas"] |= models["$defs"]
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            self.openapi_schema = document
        return self.openapi_schema


def create_engine_app(
    engine: EngineClient, *, api_key: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """An ASGI app over `engine`.

    Args:
        engine: what answers; it is not closed here.
        api_key: bearer token that everything but /health and /metrics asks for; None asks nobody.
        limits: see `Limits`.
    """
    limits = limits or Limits()
    metrics = HttpMetrics()
    api = EngineApi(engine, limits, metrics)
    app = _App(
        title="headrace engine",
        version=__version__,
        description="Token-in token-out generation.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Doorway, metrics=metrics, api_key=api_key, limits=limits)

    def route(
        path: str,
        method: str,
        endpoint: Any,
        model: type[BaseModel] | None,
        statuses: tuple[int, ...],
        *,
        body: type[BaseModel] | None = None,
        **extra: Any,
    ) -> None:
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorAnswer, "description": _TITLES[status]} for status in statuses
        }
        responses |= extra.pop("responses", {})
        if api_key is not None and path not in PUBLIC:
            extra["security"] = [{"key": []}]
            responses[401] = {"model": ErrorAnswer, "description": _TITLES[401]}
        if api_key is None:
            responses[403] = {"model": ErrorAnswer, "description": _TITLES[403]}
        if body is not None:
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            content = {"application/json": {"schema": schema}}
            extra["requestBody"] = {"required": True, "content": content}
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            operation_id=endpoint.__name__,
            response_model=model,
            responses=responses,
            openapi_extra=extra,
            # Only for the document: endpoints make their own responses.
            response_class=PlainTextResponse if model is None else JSONResponse,
        )

    route(
        "/generate",
        "POST",
        api.generate,
        GenerateAnswer,
        (*_READING, 429, 500, 503, 504),
        body=GenerateBody,
        parameters=[_KEY_HEADER],
        responses={200: {"description": "What was sampled", "content": {MEDIA_TYPE: _STREAM}}},
    )
    route("/abort", "POST", api.abort, AbortAnswer, (*_READING, 500), body=AbortBody)
    route("/weights", "GET", api.weights, WeightsAnswer, (500,))
    route(
        "/weights",
        "POST",
        api.load_weights,
        WeightsAnswer,
        (*_READING, 429, 500, 503),
        body=WeightsBody,
    )
    unwell = {503: {"model": HealthAnswer, "description": _TITLES[503]}}
    route("/health", "GET", api.health, HealthAnswer, (500,), responses=unwell)
    route("/metrics", "GET", api.metrics, None, (500,))

    async def refused(request: Request, error: Exception) -> Response:
        return api._refuse(error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; it only ends the request

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        place = f"{request.method} {request.url.path}"
        refusal = Refusal(error.status_code, code, f"{place}: {error.detail}")
        refusal.headers.update(error.headers or {})
        if error.status_code == 405:
            # A path may have several routes, of which the framework names one.
            known = (r for r in app.routes if isinstance(r, Route | APIRoute))
            methods = {m for r in known if r.path == request.url.path for m in r.methods or ()}
            refusal.headers["Allow"] = ", ".join(sorted(methods))
        return refusal.response()

    for kind in (Refusal, EngineError, UserError, Exception):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, no_route)
    return app
