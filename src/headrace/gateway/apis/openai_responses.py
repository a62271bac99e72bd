"""OpenAI responses: the subset that coding agents use, with function tools and text.

`openai_items` reads the items of the input. With `previous_response_id` the earlier conversation of
the same session goes before them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.gateway.apis.openai_chat import error_body
from headrace.gateway.apis.openai_items import Recall, item_id, read_items
from headrace.gateway.constraints import constraint, of_format, of_tool_choice
from headrace.gateway.transcript import Conversation
from headrace.gateway.turn import (
    Answer,
    ApiError,
    Event,
    Piece,
    Start,
    TokenScore,
    ToolCall,
    Turn,
    Usage,
    Wish,
    new_turn,
    unsupported,
)


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[Any]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None


class WireResponsesRequest(ResponsesRequest, frozen=True, kw_only=True):
    """The same with its input as it stands in the body."""

    input: msgspec.Raw  # type: ignore[assignment]  # read by a `Transcript`


def read(
    request: ResponsesRequest,
    before: Sequence[dict[str, Any]] = (),
    recall: Recall | None = None,
    conversation: Conversation | None = None,
) -> Turn:
    """Check a request.

    Args:
        conversation: its input with `lead` before it, where that is read already.
        before: chat messages of the conversation that `previous_response_id` names.
        recall: see `read_items`.

    Raises:
        ApiError: 400, naming the parameter, its value and what to send instead.
    """
    if request.background:
        raise unsupported("background", True, "leave it out and wait for the answer")
    form = constraint(
        of_format((request.text or {}).get("format"), "text.format"),
        of_tool_choice(request.tool_choice),
        "text.format",
    )
    scored = "message.output_text.logprobs" in (request.include or ())
    wish = Wish.of(
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=(request.top_logprobs or 0) if scored or request.top_logprobs else None,
    )
    effort = (request.reasoning or {}).get("effort")
    if conversation is None:
        first = lead(request)
        messages = [] if first is None else [first]
        if first is not None and before and before[0]["role"] == "system":
            # New instructions take the place of earlier ones; without any, those stay.
            before = before[1:]
        messages += before
        messages += read_items(request.input, recall)
    else:
        messages = conversation.sent
    return new_turn(
        messages,
        messages=None if conversation is None else conversation.messages,
        tools=[_tool(tool, i) for i, tool in enumerate(request.tools or ())],
        wish=wish,
        calls_allowed=request.tool_choice != "none",
        model=request.model,
        thinking=None if effort is None else effort != "none",
        constraint=form,
    )


def lead(request: ResponsesRequest) -> dict[str, Any] | None:
    """The instructions as a chat message."""
    if not request.instructions:
        return None
    return {"role": "system", "content": request.instructions}


def _tool(tool: Any, number: int) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if kind != "function":
        raise unsupported(f"tools[{number}].type", kind, "send function tools")
    fields = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in fields if tool.get(name) is not None}
    return {"type": "function", "function": function}


# -- answers ------------------------------------------------------------------------------------


def write(answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """The body of a response."""
    answer = answers[0]
    output: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        output.append(_reasoning(item_id("rs", answer.response_id, 0), answer.reasoning))
    if answer.content or not answer.tool_calls:
        item = item_id("msg", answer.response_id, len(output))
        output.append(_message(item, answer.content, answer.scores))
    for call in answer.tool_calls:
        output.append(_function_call(item_id("fc", answer.response_id, len(output)), call))
    return _body(answer.response_id, answer.created, model, output, answer)


def _body(
    call_id: str,
    created: int,
    model: str,
    output: list[dict[str, Any]],
    answer: Answer | None = None,
) -> dict[str, Any]:
    """The response object, in progress without an answer."""
    cut = answer is not None and answer.finish == "length"
    status = "in_progress" if answer is None else "incomplete" if cut else "completed"
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created,
        "model": model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if answer is None else _usage(answer.usage),
        "headrace": None if answer is None else answer.record,
    }


def response_id(name: str) -> str:
    """What `previous_response_id` names a response by."""
    return f"resp_{name}"


def call_of(response_id: str) -> str:
    """What `response_id` made it from."""
    return response_id.removeprefix("resp_")


def _usage(count: Usage) -> dict[str, Any]:
    return {
        "input_tokens": count.prompt,
        "input_tokens_details": {"cached_tokens": count.cached, "cache_write_tokens": 0},
        "output_tokens": count.completion,
        "output_tokens_details": {"reasoning_tokens": count.reasoning},
        "total_tokens": count.total,
    }


def _reasoning(item: str, text: str) -> dict[str, Any]:
    content = [_thought(text)] if text else []
    return {"id": item, "type": "reasoning", "summary": [], "content": content}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message(
    item: str, text: str | None, scores: Sequence[TokenScore] | None = None
) -> dict[str, Any]:
    """A message; with text None one that has just begun."""
    return {
        "id": item,
        "type": "message",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [_part(text, scores)],
    }


def _part(text: str, scores: Sequence[TokenScore] | None = None) -> dict[str, Any]:
    logprobs = [
        {
            "token": score.text,
            "bytes": list(score.data),
            "logprob": score.logprob,
            "top_logprobs": [
                {"token": other.text, "bytes": list(other.data), "logprob": other.logprob}
                for other in score.alternatives
            ],
        }
        for score in scores or ()
    ]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _function_call(item: str, call: ToolCall, status: str = "completed") -> dict[str, Any]:
    return {
        "id": item,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


class Stream:
    """The events of one streamed response; see `Events`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._start = Start("", 0, 0)
        self._number = 0
        self._done: list[dict[str, Any]] = []
        # The item being written: its kind, its text so far, and its call.
        self._kind: str | None = None
        self._text = ""
        self._call: ToolCall | None = None

    def start(self, start: Start) -> list[Event]:
        self._start = start
        body = _body(start.response_id, start.created, self._model, [])
        return [
            self._event("response.created", response=body),
            self._event("response.in_progress", response=body),
        ]

    def piece(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning:
            events += self._open("reasoning")
            events += self._add("response.reasoning_text.delta", piece.reasoning, content_index=0)
        if piece.content:
            events += self._open("message")
            events += self._add(
                "response.output_text.delta", piece.content, content_index=0, logprobs=[]
            )
        arguments = piece.arguments
        if piece.call is not None:
            events += self._close()
            events += self._open("function_call", piece.call._replace(arguments=""))
            arguments = piece.call.arguments
        if arguments:
            events += self._add("response.function_call_arguments.delta", arguments)
        return events

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        answer = answers[0]
        events = self._close(answer.scores)
        if not any(item["type"] in ("message", "function_call") for item in self._done):
            events += self._open("message") + self._close(answer.scores)
        start = self._start
        body = _body(start.response_id, start.created, self._model, self._done, answer)
        name = "response.incomplete" if answer.finish == "length" else "response.completed"
        return [*events, self._event(name, response=body)]

    def fail(self, error: ApiError) -> list[Event]:
        described = error_body(error)["error"]
        fields = {key: described[key] for key in ("code", "message", "param")}
        return [self._event("error", **fields)]

    # -- one item -------------------------------------------------------------------------------

    @property
    def _place(self) -> dict[str, Any]:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[self._kind or ""]
        number = len(self._done)
        return {
            "item_id": item_id(prefix, self._start.response_id, number),
            "output_index": number,
        }

    def _open(self, kind: str, call: ToolCall | None = None) -> list[Event]:
        if self._kind == kind:
            return []
        events = self._close()
        self._kind, self._text, self._call = kind, "", call
        place = self._place
        item = self._item(begun=True)
        index = place["output_index"]
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        if kind != "function_call":
            part = _part("") if kind == "message" else _thought("")
            events.append(
                self._event("response.content_part.added", **place, content_index=0, part=part)
            )
        return events

    def _add(self, name: str, text: str, **fields: Any) -> list[Event]:
        self._text += text
        return [self._event(name, **self._place, delta=text, **fields)]

    def _close(self, scores: Sequence[TokenScore] | None = None) -> list[Event]:
        if self._kind is None:
            return []
        place, text, events = self._place, self._text, []
        if self._kind == "message":
            part = _part(text, scores)
            events.append(
                self._event(
                    "response.output_text.done",
                    **place,
                    content_index=0,
                    text=text,
                    logprobs=part["logprobs"],
                )
            )
            events.append(
                self._event("response.content_part.done", **place, content_index=0, part=part)
            )
        elif self._kind == "reasoning":
            events.append(
                self._event("response.reasoning_text.done", **place, content_index=0, text=text)
            )
            part = _thought(text)
            events.append(
                self._event("response.content_part.done", **place, content_index=0, part=part)
            )
        else:
            events.append(
                self._event("response.function_call_arguments.done", **place, arguments=text)
            )
        item = self._item(begun=False, scores=scores)
        index = place["output_index"]
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._done.append(item)
        self._kind = None
        return events

    def _item(self, *, begun: bool, scores: Sequence[TokenScore] | None = None) -> dict[str, Any]:
        item = self._place["item_id"]
        if self._kind == "reasoning":
            return _reasoning(item, self._text)
        if self._kind == "message":
            return _message(item, None if begun else self._text, scores)
        assert self._call is not None
        call = self._call._replace(arguments=self._text)
        return _function_call(item, call, "in_progress" if begun else "completed")

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return Event(kind, {"type": kind, "sequence_number": self._number - 1, **fields})
