"""The HTTP face of a `Gateway`: the routes of OpenAI's and Anthropic's APIs, each with its own
errors, answered whole or as server-sent events.

Bodies are read and written with msgspec; FastAPI routes and survives bad requests. What a client
can set names its session: the key as bearer token or `x-api-key`, in `X-Headrace-Session`, in the
path (`/s/KEY/v1/...`), or in the body's metadata.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from headrace.gateway.apis import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_items,
    openai_responses,
)
from headrace.gateway.gateway import Gateway
from headrace.gateway.sessions import Credentials
from headrace.gateway.turn import (
    Answer,
    ApiError,
    Event,
    Events,
    Listener,
    Piece,
    Start,
    Turn,
    decode,
    invalid,
)

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_KEY_CHARACTERS = 256
_KEEP_ALIVE_S = 15.0
"""Silence after which a stream says that it is still there."""
_REFERENCE = b"item_reference"
"""What an item of that kind means depends on those before it: such an input is read as a whole."""
_PREFIXES = ("", "/s/{session}")

_encode = msgspec.json.Encoder().encode


class _Read(NamedTuple):
    """A request as one API's module read it."""

    turn: Turn
    events: Events | None
    """How to stream the answer; None answers it whole."""
    metadata: dict[str, Any] | None = None
    shape: tuple[Any, ...] = ()
    """What else `write` has to know of the request."""


class _Api(NamedTuple):
    """One API: how to read its requests, write its answers and shape its errors."""

    read: Callable[[Gateway, Credentials, bytes], _Read]
    write: Callable[..., dict[str, Any]]
    error_body: Callable[[ApiError], dict[str, Any]]


def create_app(gateway: Gateway) -> FastAPI:
    """An ASGI app that serves `gateway`.

    Routes, each also below /s/KEY: /v1/chat/completions, /v1/completions, /v1/responses,
    /v1/messages, /v1/messages/count_tokens, /v1/models; and /health.
    """
    app = FastAPI(title="headrace gateway", docs_url=None, redoc_url=None, openapi_url=None)

    async def count_tokens(request: Request) -> Response:
        try:
            credentials = _credentials(request)
            body = decode(await read_body(request), anthropic_messages.MessagesRequest)
            credentials = _with_metadata(credentials, body.metadata)
            turn = anthropic_messages.read(body, counting=True)
            return json_response(anthropic_messages.count_body(gateway.count(credentials, turn)))
        except ApiError as error:
            return _refuse(error, anthropic_messages.error_body)
        except ClientDisconnect:
            return Response(status_code=499)

    def entry(name: str) -> dict[str, Any]:
        replicas = gateway.replicas() if name == gateway.model else None
        return _entry(name) if replicas is None else {**_entry(name), "replicas": replicas}

    async def models(request: Request) -> Response:
        name = request.path_params.get("name")
        names = gateway.models
        if name is None:
            listed = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return json_response({"object": "list", "data": [entry(n) for n in names], **listed})
        if name not in names:
            missing = f"model {name!r} is not served here; use one of {', '.join(names)}"
            return _refuse(ApiError(404, "model_not_found", missing), _shape_of(request))
        return json_response(entry(name))

    async def health(request: Request) -> Response:
        replicas = gateway.replicas()
        body = {"status": "ok", "weight_version": gateway.weight_version}
        if replicas is None:
            return json_response(body)
        serving = any(replica["state"] == "serving" for replica in replicas)
        body |= {"status": "ok" if serving else "unavailable", "replicas": replicas}
        return json_response(body, 200 if serving else 503)

    routes: dict[str, tuple[Any, str]] = {
        "/v1/chat/completions": (_endpoint(gateway, _CHAT), "POST"),
        "/v1/completions": (_endpoint(gateway, _COMPLETIONS), "POST"),
        "/v1/responses": (_endpoint(gateway, _RESPONSES), "POST"),
        "/v1/messages": (_endpoint(gateway, _MESSAGES), "POST"),
        "/v1/messages/count_tokens": (count_tokens, "POST"),
        "/v1/models": (models, "GET"),
        "/v1/models/{name:path}": (models, "GET"),
    }
    for path, (endpoint, method) in routes.items():
        for prefix in _PREFIXES:
            app.add_route(prefix + path, endpoint, methods=[method])
    app.add_route("/health", health, methods=["GET"])

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        refusal = ApiError(error.status_code, "not_found", f"{place}: {error.detail}")
        return _refuse(refusal, _shape_of(request))

    async def bug(request: Request, error: Exception) -> Response:
        refusal = ApiError(500, "internal_error", f"internal error: {error!r}")
        return _refuse(refusal, _shape_of(request))

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)
    return app


def _entry(name: str) -> dict[str, Any]:
    """A model in both APIs' lists."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "headrace",
    }


# -- the four APIs ------------------------------------------------------------------------------


def _read_chat(gateway: Gateway, credentials: Credentials, data: bytes) -> _Read:
    body = decode(data, openai_chat.WireChatRequest)
    text = bytes(body.messages)
    if not text.startswith(b"["):
        decode(data, openai_chat.ChatRequest)  # says what is wrong, and where
    transcript = gateway.transcript(_with_metadata(credentials, body.metadata))
    turn = openai_chat.read(body, transcript.read(text))
    events = None
    if body.stream:
        events = openai_chat.Stream(gateway.shown(body.model), include_usage=body.counted)
    return _Read(turn, events, body.metadata)


def _read_completion(gateway: Gateway, credentials: Credentials, data: bytes) -> _Read:
    body = decode(data, openai_completions.CompletionRequest)
    shape = openai_completions.Shape.of(body)
    events = None
    if body.stream:
        events = openai_completions.Stream(
            gateway.shown(body.model), include_usage=body.counted, shape=shape
        )
    return _Read(openai_completions.read(body), events, shape=(shape,))


def _read_response(gateway: Gateway, credentials: Credentials, data: bytes) -> _Read:
    wire = decode(data, openai_responses.WireResponsesRequest)
    events = openai_responses.Stream(gateway.shown(wire.model)) if wire.stream else None
    shown = _with_metadata(credentials, wire.metadata)
    text = bytes(wire.input)
    if text.startswith(b"[") and not wire.previous_response_id and _REFERENCE not in text:
        conversation = gateway.transcript(shown).read(
            text, openai_items.DIALECT, openai_responses.lead(wire)
        )
        turn = openai_responses.read(wire, conversation=conversation)
        return _Read(turn, events, wire.metadata)
    body = decode(data, openai_responses.ResponsesRequest)
    before: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        before = gateway.conversation(shown, openai_responses.call_of(body.previous_response_id))

    def recall(response: str) -> dict[str, Any]:
        return gateway.conversation(shown, response)[-1]

    return _Read(openai_responses.read(body, before, recall), events, body.metadata)


def _read_message(gateway: Gateway, credentials: Credentials, data: bytes) -> _Read:
    body = decode(data, anthropic_messages.WireMessagesRequest)
    text = bytes(body.messages)
    if not text.startswith(b"["):
        decode(data, anthropic_messages.MessagesRequest)  # says what is wrong, and where
    transcript = gateway.transcript(_with_metadata(credentials, body.metadata))
    conversation = transcript.read(text, anthropic_messages.DIALECT, anthropic_messages.lead(body))
    events = anthropic_messages.Stream(gateway.shown(body.model)) if body.stream else None
    return _Read(anthropic_messages.read(body, conversation), events, body.metadata)


_CHAT = _Api(_read_chat, openai_chat.write, openai_chat.error_body)
_COMPLETIONS = _Api(_read_completion, openai_completions.write, openai_chat.error_body)
_RESPONSES = _Api(_read_response, openai_responses.write, openai_chat.error_body)
_MESSAGES = _Api(_read_message, anthropic_messages.write, anthropic_messages.error_body)


def _shape_of(request: Request) -> Callable[[ApiError], dict[str, Any]]:
    """Whose errors a request wants: Anthropic's clients always send this header."""
    anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return anthropic_messages.error_body if anthropic else openai_chat.error_body


# -- one request --------------------------------------------------------------------------------


def _endpoint(gateway: Gateway, api: _Api) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            key = request.headers.get("idempotency-key")
            if key is not None and len(key) > MAX_KEY_CHARACTERS:
                raise invalid(
                    f"Idempotency-Key has {len(key)} characters; send at most {MAX_KEY_CHARACTERS}"
                )
            credentials = _credentials(request)
            read = api.read(gateway, credentials, await read_body(request))
            credentials = _with_metadata(credentials, read.metadata)
            if read.events is None:
                answers = await gateway.ask(credentials, read.turn, idempotency_key=key)
                return json_response(
                    api.write(answers, gateway.shown(read.turn.model), *read.shape)
                )
            return await _stream(gateway, credentials, read.turn, read.events, key)
        except ApiError as error:
            return _refuse(error, api.error_body)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it; it only ends the request

    return endpoint


async def _stream(
    gateway: Gateway, credentials: Credentials, turn: Turn, events: Events, key: str | None
) -> Response:
    """Begin to stream; what is refused before the first event is an ordinary error.

    Raises:
        ApiError: refused.
    """
    # Bounded by the tokens of the answer: pieces are of at least a character each.
    pieces: asyncio.Queue[Start | Piece] = asyncio.Queue()
    listener = Listener(pieces.put_nowait, pieces.put_nowait)
    task = asyncio.create_task(
        gateway.ask(credentials, turn, idempotency_key=key, listener=listener)
    )
    try:
        first = asyncio.create_task(pieces.get())
        await asyncio.wait({task, first}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            task.result()  # raises: nothing ends well without a start
            raise RuntimeError("an answer came without its start")
    except BaseException:
        task.cancel()
        raise
    begun = first.result()
    assert isinstance(begun, Start)
    return StreamingResponse(
        _events(task, pieces, events, begun),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _events(
    task: "asyncio.Task[list[Answer]]",
    pieces: "asyncio.Queue[Start | Piece]",
    events: Events,
    begun: Start,
) -> AsyncIterator[bytes]:
    try:
        yield _sse(events.start(begun))
        while not task.done() or not pieces.empty():
            following = asyncio.create_task(pieces.get())
            try:
                await asyncio.wait(
                    {task, following},
                    timeout=_KEEP_ALIVE_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                if not following.done():
                    following.cancel()
            if following.done() and not following.cancelled():
                piece = following.result()
                if isinstance(piece, Piece):
                    yield _sse(events.piece(piece))
            elif not task.done():
                yield b": still here\n\n"
        try:
            yield _sse(events.end(task.result()))
        except ApiError as error:
            yield _sse(events.fail(error))
        except Exception as error:
            _log.exception("a streamed answer failed")
            failure = ApiError(500, "internal_error", f"internal error: {error!r}")
            yield _sse(events.fail(failure))
    finally:
        # The client is gone: what is still being generated nobody will read.
        if not task.done():
            task.cancel()


def _sse(events: list[Event]) -> bytes:
    parts = []
    for event in events:
        if event.name is not None:
            parts.append(f"event: {event.name}\n".encode())
        data = b"[DONE]" if event.data is None else _encode(event.data)
        parts += [b"data: ", data, b"\n\n"]
    return b"".join(parts)


# -- bodies and keys ----------------------------------------------------------------------------


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(
        _encode(value), status_code=status, media_type="application/json", headers=headers
    )


def _refuse(error: ApiError, shape: Callable[[ApiError], dict[str, Any]]) -> Response:
    headers = None
    if error.retry_after_s is not None:
        headers = {"Retry-After": f"{error.retry_after_s:.0f}"}
    return json_response(shape(error), error.status, headers)


def _credentials(request: Request) -> Credentials:
    headers = request.headers
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else None
    return Credentials(
        path=request.path_params.get("session"),
        header=headers.get("x-headrace-session"),
        api_key=headers.get("x-api-key") or bearer,
    )


def _with_metadata(credentials: Credentials, metadata: dict[str, Any] | None) -> Credentials:
    for name in ("session", "user_id"):
        value = (metadata or {}).get(name)
        if isinstance(value, str):
            return credentials._replace(metadata=value)
    return credentials


async def read_body(request: Request, most: int = MAX_BODY_BYTES) -> bytes:
    """The body, of at most so many bytes.

    Raises:
        ApiError: 413, it is larger.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise ApiError(
                413, "body_too_large", f"the body is larger than {most} bytes; shorten it"
            )
        chunks.append(chunk)
    return b"".join(chunks)
