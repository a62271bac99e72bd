"""The HTTP face of a `Gateway`: OpenAI's routes, errors in OpenAI's shape, nothing else.

Bodies are read and written with msgspec; FastAPI routes and survives bad requests. The bearer key
names the session.
"""

import logging
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.gateway.protocol import ApiError, decode_body
from headrace.gateway.sessions import Gateway

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_KEY_CHARACTERS = 256

_encode = msgspec.json.Encoder().encode


def create_app(gateway: Gateway) -> FastAPI:
    """An ASGI app that serves `gateway`: /v1/chat/completions, /v1/models and /health."""
    app = FastAPI(title="headrace gateway", docs_url=None, redoc_url=None, openapi_url=None)

    async def chat_completions(request: Request) -> Response:
        idempotency_key = request.headers.get("idempotency-key")
        if idempotency_key is not None and len(idempotency_key) > MAX_KEY_CHARACTERS:
            return _refuse(
                ApiError(
                    400,
                    "invalid_request",
                    f"Idempotency-Key has {len(idempotency_key)} characters; "
                    f"send at most {MAX_KEY_CHARACTERS}",
                )
            )
        try:
            body = decode_body(await _read(request))
            return _json(await gateway.chat(_bearer(request), body, idempotency_key))
        except ApiError as error:
            return _refuse(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it; it only ends the request

    async def models(request: Request) -> Response:
        entry = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "headrace"}
        name = request.path_params.get("name")
        if name is None:
            return _json({"object": "list", "data": [entry]})
        if name != gateway.model:
            return _refuse(
                ApiError(404, "model_not_found", f"model {name!r} is not served; use {entry['id']}")
            )
        return _json(entry)

    async def health(request: Request) -> Response:
        return _json({"status": "ok", "weight_version": gateway.weight_version})

    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", models, methods=["GET"])
    app.add_route("/health", health, methods=["GET"])

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        return _refuse(ApiError(error.status_code, "not_found", f"{place}: {error.detail}"))

    async def bug(request: Request, error: Exception) -> Response:
        return _refuse(ApiError(500, "internal_error", f"internal error: {error!r}"))

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status_code=status, media_type="application/json")


def _refuse(error: ApiError) -> Response:
    return _json(error.body(), error.status)


def _bearer(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


async def _read(request: Request) -> bytes:
    """The body, bounded."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ApiError(
                413, "body_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes; shorten it"
            )
        chunks.append(chunk)
    return b"".join(chunks)
