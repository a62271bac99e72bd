"""The wire format: what a chat completion request may hold, and OpenAI's shapes of the answers.

Requests are checked field by field with one clear message for each mistake; a parameter that would
change sampling and is not supported is refused, never ignored.
"""

from typing import Any, Literal

import msgspec

from headrace.tokens.messages import Message, check_tools, normalise


class ApiError(Exception):
    """A refusal in OpenAI's terms: HTTP status, type, code, and text for the client's developer."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body that OpenAI clients read."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kind.get(self.status, server),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """A 400."""
    return ApiError(400, code, message, param=param)


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions, as OpenAI documents it.

    `top_k` is the extension that vLLM and SGLang share. Unknown fields are ignored, as OpenAI does.
    """

    messages: list[Any]
    model: str = ""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None


_UNSUPPORTED = ("stop", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty")


class ChatTurn(msgspec.Struct, frozen=True):
    """A checked request, with defaults applied.

    Attributes:
        sent: messages as the client wrote them, for the record.
        messages: the same, normalised.
        tools: tools the prompt shows.
        calls_allowed: False with tool_choice "none".
        max_tokens: as asked, or None.
    """

    sent: list[dict[str, Any]]
    messages: list[Message]
    tools: list[dict[str, Any]]
    calls_allowed: bool
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    seed: int | None


def decode_body(data: bytes) -> ChatRequest:
    """Read a request body.

    Raises:
        ApiError: 400, not JSON or a field of the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid(f"request body: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"request body is not valid JSON: {error}") from error


def convert_body(body: dict[str, Any]) -> ChatRequest:
    """The same for a body that is an object already."""
    try:
        return msgspec.convert(body, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid(f"request body: {error}") from error


def check(request: ChatRequest) -> ChatTurn:
    """Check a request's values.

    Raises:
        ApiError: 400, naming the parameter, its value and what to send instead.
    """
    if request.stream:
        raise invalid(
            "stream=true is not supported; send stream=false", param="stream", code="unsupported"
        )
    if request.n not in (None, 1):
        raise invalid(f"n={request.n} is not supported; send n=1", param="n", code="unsupported")
    for name in _UNSUPPORTED:
        if getattr(request, name):
            raise invalid(f"{name} is not supported; leave it out", param=name, code="unsupported")
    if request.logit_bias:
        raise invalid(
            "logit_bias is not supported; leave it out", param="logit_bias", code="unsupported"
        )
    if request.response_format and request.response_format.get("type") != "text":
        raise invalid(
            "response_format is not supported beyond text; leave it out",
            param="response_format",
            code="unsupported",
        )
    if request.tool_choice not in (None, "auto", "none"):
        raise invalid(
            f"tool_choice={request.tool_choice!r} is not supported; send 'auto' or 'none'",
            param="tool_choice",
            code="unsupported",
        )
    limit = request.max_tokens
    if request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
    if limit is not None and limit < 1:
        raise invalid(f"max_tokens={limit} is too small; send at least 1", param="max_tokens")
    temperature = 1.0 if request.temperature is None else request.temperature
    if not 0.0 <= temperature <= 2.0:
        raise invalid(
            f"temperature={temperature} is out of range; send 0 to 2", param="temperature"
        )
    top_p = 1.0 if request.top_p is None else request.top_p
    if not 0.0 < top_p <= 1.0:
        raise invalid(f"top_p={top_p} is out of range; send above 0 up to 1", param="top_p")
    top_k = request.top_k or 0
    if top_k == -1:  # vLLM's spelling of "all"
        top_k = 0
    if top_k < 0:
        raise invalid(f"top_k={top_k} is negative; send 0 for no limit", param="top_k")
    tools = request.tools or []
    try:
        messages = normalise(request.messages)
        check_tools(tools)
    except ValueError as error:
        raise invalid(str(error), param="messages") from error
    return ChatTurn(
        sent=request.messages,
        messages=messages,
        tools=tools,
        calls_allowed=request.tool_choice != "none",
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=limit,
        seed=request.seed,
    )


def completion_body(
    *,
    completion_id: str,
    model: str,
    created: int,
    message: dict[str, Any],
    finish_reason: Literal["stop", "length", "tool_calls"],
    prompt_tokens: int,
    completion_tokens: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The body of a chat completion response; `extra` is the "headrace" object beside it."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": finish_reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "headrace": extra,
    }
