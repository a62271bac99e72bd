"""OpenAI completions: a text or token ids continued as they are, without a chat template."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.gateway.apis.openai_chat import error_body, usage
from headrace.gateway.apis.openai_fields import SampledRequest
from headrace.gateway.turn import (
    Answer,
    ApiError,
    Event,
    Piece,
    Start,
    TokenScore,
    Turn,
    invalid,
    total_usage,
    unsupported,
)

DEFAULT_MAX_TOKENS = 16
"""As OpenAI documents it."""
_LARGEST_ID = 2**31


class CompletionRequest(SampledRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None
    """Adds `prompt_token_ids` and `token_ids` to choices, as vLLM does."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens of logprobs are "token_id:N" in place of their text, which several may share."""


def read(request: CompletionRequest) -> Turn:
    """Check a request.

    Raises:
        ApiError: 400, naming the parameter, its value and what to send instead.
    """
    if request.echo and request.stream:
        raise unsupported("echo", True, "leave it out with stream, or ask without stream")
    if request.suffix:
        raise unsupported("suffix", request.suffix, "leave it out")
    if request.best_of not in (None, request.answers):
        raise unsupported("best_of", request.best_of, "leave it out, or send it equal to n")
    wish = request.wish(
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        echo=request.echo,
    )
    return Turn(prompt=_prompt(request.prompt), n=request.answers, wish=wish, model=request.model)


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """One prompt; OpenAI allows a list of them, which this server does not."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        found: str | tuple[int, ...] = prompt
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        found = tuple(prompt)
        wrong = next((token for token in found if not 0 <= token < _LARGEST_ID), None)
        if wrong is not None:
            raise invalid(f"prompt: {wrong} is no token id; ids begin at 0", param="prompt")
    else:
        raise unsupported("prompt", "several prompts", "send one text or one list of token ids")
    if not found:
        raise invalid("prompt is empty; send a text or token ids", param="prompt")
    return found


class Shape(msgspec.Struct, frozen=True):
    """What a client wants to see of an answer besides its text.

    Attributes:
        ids: the ids of prompt and answer.
        names: tokens of logprobs are written as "token_id:N".
    """

    ids: bool = False
    names: bool = False

    @classmethod
    def of(cls, request: CompletionRequest) -> "Shape":
        """Of a request."""
        return cls(bool(request.return_token_ids), bool(request.return_tokens_as_token_ids))


def write(answers: Sequence[Answer], model: str, shape: Shape = Shape()) -> dict[str, Any]:  # noqa: B008
    """The body of a response."""
    return {
        "id": f"cmpl-{answers[0].response_id}",
        "object": "text_completion",
        "created": answers[0].created,
        "model": model,
        "choices": [_whole_choice(answer, shape) for answer in answers],
        "usage": usage(total_usage(answers)),
    }


def _whole_choice(answer: Answer, shape: Shape) -> dict[str, Any]:
    echo = answer.echo
    text, scores = answer.content, answer.scores
    if echo is not None:
        text = echo.text + text
        if echo.scores is not None:
            scores = (*echo.scores, *(scores or ()))
    choice = _choice(answer.index, text, _finish(answer), _logprobs(scores, shape))
    if shape.ids:
        choice["prompt_token_ids"] = answer.prompt_ids
        choice["token_ids"] = answer.ids
    return choice


def _choice(
    index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}


def _finish(answer: Answer) -> str:
    return "length" if answer.finish == "length" else "stop"


def _logprobs(scores: Sequence[TokenScore] | None, shape: Shape) -> dict[str, Any] | None:
    if scores is None:
        return None
    offsets, at = [], 0
    for score in scores:
        offsets.append(at)
        at += len(score.text)

    def name(score: TokenScore) -> str:
        return f"token_id:{score.id}" if shape.names else score.text

    return {
        "tokens": [name(score) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [
            # Of several with one text the likeliest, which come first.
            None
            if score.logprob is None
            else {name(o): o.logprob for o in reversed(score.alternatives)}
            for score in scores
        ],
        "text_offset": offsets,
    }


class Stream:
    """The chunks of one streamed response; see `Events`, arguments as in `openai_chat.Stream`."""

    def __init__(self, model: str, *, include_usage: bool, shape: Shape) -> None:
        self._head: dict[str, Any] = {"object": "text_completion", "model": model}
        self._shape = shape
        self._include_usage = include_usage

    def start(self, start: Start) -> list[Event]:
        self._head |= {"id": f"cmpl-{start.response_id}", "created": start.created}
        return []

    def piece(self, piece: Piece) -> list[Event]:
        choice = _choice(piece.index, piece.content, None, None)
        return [Event(None, self._head | {"choices": [choice]})]

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        last = [_whole_choice(a, self._shape) | {"text": ""} for a in answers]
        events = [Event(None, self._head | {"choices": [choice]}) for choice in last]
        if self._include_usage:
            counts = self._head | {"choices": [], "usage": usage(total_usage(answers))}
            events.append(Event(None, counts))
        return [*events, Event(None, None)]

    def fail(self, error: ApiError) -> list[Event]:
        return [Event(None, error_body(error))]
