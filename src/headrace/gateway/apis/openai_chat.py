"""OpenAI chat completions: bodies in, bodies and chunks out.

`chat_template_kwargs.enable_thinking` switches thinking, `thinking_budget` beside it bounds its
tokens, and `reasoning_content` carries it; `openai_fields` says what else is an extension.
Unknown fields are ignored, as OpenAI does; a known one that would change the answer and is not
supported is refused.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.gateway.apis.openai_fields import SampledRequest
from headrace.gateway.constraints import constraint, of_format, of_tool_choice
from headrace.gateway.transcript import Conversation
from headrace.gateway.turn import (
    Answer,
    ApiError,
    Event,
    Piece,
    Start,
    TokenScore,
    Turn,
    Usage,
    new_turn,
    total_usage,
)


class ChatRequest(SampledRequest, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions, as OpenAI documents it."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class WireChatRequest(ChatRequest, frozen=True, kw_only=True):
    """The same with its messages as they stand in the body."""

    messages: msgspec.Raw  # type: ignore[assignment]  # read by a `Transcript`


def read(request: ChatRequest, conversation: Conversation | None = None) -> Turn:
    """Check a request.

    Args:
        conversation: its messages, where they are read already.

    Raises:
        ApiError: 400, naming the parameter, its value and what to send instead.
    """
    form = constraint(
        of_format(request.response_format, "response_format"),
        of_tool_choice(request.tool_choice),
        "response_format",
    )
    limit = request.max_completion_tokens
    wish = request.wish(
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    thinking = (request.chat_template_kwargs or {}).get("enable_thinking")
    budget = (request.chat_template_kwargs or {}).get("thinking_budget")
    return new_turn(
        request.messages if conversation is None else conversation.sent,
        messages=None if conversation is None else conversation.messages,
        tools=request.tools or (),
        n=request.answers,
        wish=wish,
        calls_allowed=request.tool_choice != "none",
        model=request.model,
        thinking=thinking if isinstance(thinking, bool) else None,
        thinking_budget=budget if type(budget) is int else None,
        constraint=form,
    )


# -- answers ------------------------------------------------------------------------------------


def write(answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """The body of a response."""
    return {
        "id": f"chatcmpl-{answers[0].response_id}",
        "object": "chat.completion",
        "created": answers[0].created,
        "model": model,
        "choices": [
            {
                "index": answer.index,
                "message": message(answer),
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer.scores),
            }
            for answer in answers
        ],
        "usage": usage(total_usage(answers)),
        "headrace": (
            answers[0].record if len(answers) == 1 else [answer.record for answer in answers]
        ),
    }


def message(answer: Answer) -> dict[str, Any]:
    """An answer as an assistant message."""
    written: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.tool_calls:
        written["content"] = answer.content or None
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({} if call.reasoning is None else {"reasoning_content": call.reasoning}),
            }
            for call in answer.tool_calls
        ]
    if answer.reasoning is not None:
        written["reasoning_content"] = answer.reasoning
    return written


def usage(count: Usage) -> dict[str, Any]:
    """Tokens, as OpenAI counts them."""
    return {
        "prompt_tokens": count.prompt,
        "completion_tokens": count.completion,
        "total_tokens": count.total,
        "prompt_tokens_details": {"cached_tokens": count.cached},
        "completion_tokens_details": {"reasoning_tokens": count.reasoning},
    }


def _logprobs(scores: Sequence[TokenScore] | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {
        "content": [
            _score(score) | {"top_logprobs": [_score(other) for other in score.alternatives]}
            for score in scores
        ]
    }


def _score(score: TokenScore) -> dict[str, Any]:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.data)}


class Stream:
    """The chunks of one streamed response; see `Events`.

    Args:
        model: name to show.
        include_usage: end with a chunk of token counts.
    """

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._head: dict[str, Any] = {"object": "chat.completion.chunk", "model": model}
        self._include_usage = include_usage
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}

    def start(self, start: Start) -> list[Event]:
        self._head |= {"id": f"chatcmpl-{start.response_id}", "created": start.created}
        return []

    def piece(self, piece: Piece) -> list[Event]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.call is not None:
            number = self._calls[piece.index] = self._calls.get(piece.index, -1) + 1
            function = {"name": piece.call.name, "arguments": piece.call.arguments}
            delta["tool_calls"] = [
                {"index": number, "id": piece.call.id, "type": "function", "function": function}
            ]
        elif piece.arguments:
            number = self._calls[piece.index]
            delta["tool_calls"] = [{"index": number, "function": {"arguments": piece.arguments}}]
        return [*self._begin(piece.index), self._chunk(piece.index, delta)]

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        events = []
        for answer in answers:
            events += self._begin(answer.index)
            last = self._chunk(answer.index, {}, answer.finish, _logprobs(answer.scores))
            events.append(Event(None, (last.data or {}) | {"headrace": answer.record}))
        if self._include_usage:
            counts = self._head | {"choices": [], "usage": usage(total_usage(answers))}
            events.append(Event(None, counts))
        return [*events, Event(None, None)]

    def fail(self, error: ApiError) -> list[Event]:
        return [Event(None, error_body(error))]

    def _begin(self, index: int) -> list[Event]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return Event(None, self._head | {"choices": [choice]})


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body that OpenAI clients read."""
    server = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _KINDS.get(error.status, server),
            "param": error.param,
            "code": error.code,
        }
    }
