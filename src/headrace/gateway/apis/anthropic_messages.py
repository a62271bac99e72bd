"""Anthropic messages: bodies in, bodies and events out.

A conversation is turned into chat messages: tool results become tool messages, thinking blocks the
reasoning of their message. Thinking has no signature here, so an empty one is sent; what a client
sends back is not checked. Prompt caching is automatic and `cache_control` is ignored.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headrace.gateway.constraints import ANY_TOOL, constraint
from headrace.gateway.transcript import Conversation, Dialect
from headrace.gateway.turn import (
    Answer,
    ApiError,
    Event,
    Piece,
    Start,
    Turn,
    Usage,
    Wish,
    invalid,
    new_turn,
    total_usage,
    unsupported,
)
from headrace.tokens.parsed import THOUGHT_SEPARATOR


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages, as Anthropic documents it."""

    messages: list[Any]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class WireMessagesRequest(MessagesRequest, frozen=True, kw_only=True):
    """The same with its messages as they stand in the body."""

    messages: msgspec.Raw  # type: ignore[assignment]  # read by a `Transcript`


def read(
    request: MessagesRequest, conversation: Conversation | None = None, *, counting: bool = False
) -> Turn:
    """Check a request.

    Args:
        conversation: its messages with `lead` before them, where they are read already.
        counting: it is about counting tokens, where max_tokens may be left out.

    Raises:
        ApiError: 400, naming the parameter, its value and what to send instead.
    """
    if request.max_tokens is None and not counting:
        raise invalid("max_tokens is missing; send at least 1", param="max_tokens")
    choice = (request.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none", "any", "tool"):
        raise unsupported("tool_choice.type", choice, "send 'auto', 'any', 'tool' or 'none'")
    tool = ANY_TOOL if choice == "any" else None
    if choice == "tool":
        tool = (request.tool_choice or {}).get("name")
        if not isinstance(tool, str) or not tool:
            raise invalid("tool_choice.name is missing; send a tool's name", param="tool_choice")
    if (request.tool_choice or {}).get("disable_parallel_tool_use"):
        raise unsupported("tool_choice.disable_parallel_tool_use", True, "leave it out")
    thinking = (request.thinking or {}).get("type")
    budget = (request.thinking or {}).get("budget_tokens") if thinking == "enabled" else None
    if budget is not None and type(budget) is not int:
        raise invalid(f"thinking.budget_tokens is {budget!r}; send a number", param="thinking")
    wish = Wish.of(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences or ()),
    )
    return new_turn(
        _chat_messages(request) if conversation is None else conversation.sent,
        messages=None if conversation is None else conversation.messages,
        tools=[_tool(tool, i) for i, tool in enumerate(request.tools or ())],
        wish=wish,
        calls_allowed=choice != "none",
        model=request.model,
        thinking=None if thinking is None else thinking != "disabled",
        thinking_budget=budget,
        constraint=constraint(None, tool, "tool_choice"),
    )


def _tool(tool: Any, number: int) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if not isinstance(tool, dict) or kind not in (None, "custom"):
        raise unsupported(f"tools[{number}].type", kind, "send tools of your own")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


# -- messages -----------------------------------------------------------------------------------


def lead(request: MessagesRequest) -> dict[str, Any] | None:
    """The system prompt as a chat message.

    Raises:
        ApiError: 400.
    """
    system = request.system
    if not system:
        return None
    if not isinstance(system, str):
        system = "\n\n".join(_texts(system, "system"))
    return {"role": "system", "content": system}


def _chat_messages(request: MessagesRequest) -> list[dict[str, Any]]:
    before = lead(request)
    messages = [] if before is None else [before]
    for i, message in enumerate(request.messages):
        messages += _read_message(message, i)
    return messages


def _read_message(message: Any, number: int) -> list[dict[str, Any]]:
    place = f"messages[{number}]"
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{place}.role is {role!r}; send user or assistant", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{place}.content must be a text or blocks", param="messages")
    if role == "assistant":
        return [_assistant(content, place)]
    return list(_user(role, content, place))


DIALECT = Dialect(_read_message)
"""Of its messages."""


def _assistant(blocks: list[Any], place: str) -> dict[str, Any]:
    content, thoughts, thought, calls = "", [], "", []
    for kind, block, where in _blocks(blocks, place):
        if kind == "text":
            content += _field(block, "text", where)
        elif kind == "thinking":
            thought += _field(block, "thinking", where)
            thoughts.append(_field(block, "thinking", where))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": _field(block, "name", where), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            if thought:
                call["reasoning_content"], thought = thought, ""
            calls.append(call)
        elif kind != "redacted_thinking":
            raise unsupported(f"{where}.type", kind, "send text, thinking and tool_use blocks")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = THOUGHT_SEPARATOR.join(thoughts)
    if calls:
        if len(thoughts) == 1:
            # One thought is the message's, not one call's.
            calls[0].pop("reasoning_content", None)
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[Any], place: str) -> Iterator[dict[str, Any]]:
    """Tool results first, as they answer the message before; then what the user says."""
    said = ""
    for kind, block, where in _blocks(blocks, place):
        if kind == "text":
            said += _field(block, "text", where)
        elif kind == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = "".join(_texts(content, f"{where}.content"))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        else:
            raise unsupported(f"{where}.type", kind, "send text and tool_result blocks")
    if said or not blocks:
        yield {"role": role, "content": said}


def _blocks(blocks: list[Any], place: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    for j, block in enumerate(blocks):
        where = f"{place}.content[{j}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{where} has no type; send content blocks", param="messages")
        yield block["type"], block, where


def _texts(blocks: Any, place: str) -> Iterator[str]:
    if not isinstance(blocks, list):
        raise invalid(f"{place} must be a text or text blocks", param=place)
    for j, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise unsupported(f"{place}[{j}].type", kind, "send text blocks")
        yield _field(block, "text", f"{place}[{j}]")


def _field(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name} is {value!r}; send a text", param="messages")
    return value


# -- answers ------------------------------------------------------------------------------------


def write(answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """The body of a response."""
    answer = answers[0]
    several = any(call.reasoning is not None for call in answer.tool_calls)
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None and not several:
        blocks.append(_thinking(answer.reasoning))
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        if call.reasoning is not None:
            blocks.append(_thinking(call.reasoning))
        use = {"id": call.id, "name": call.name, "input": _arguments(call.arguments)}
        blocks.append({"type": "tool_use", **use})
    return {
        **_head(answer.response_id, model),
        "content": blocks,
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop,
        "usage": _usage(total_usage(answers)),
        "headrace": answer.record,
    }


def _head(call_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}


def _stop_reason(answer: Answer) -> str:
    if answer.stop is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish]


def _usage(count: Usage) -> dict[str, int]:
    return {
        "input_tokens": count.prompt - count.cached,
        "cache_read_input_tokens": count.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": count.completion,
    }


def count_body(tokens: int) -> dict[str, int]:
    """The answer of POST /v1/messages/count_tokens."""
    return {"input_tokens": tokens}


class Stream:
    """The events of one streamed response; see `Events`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._block = -1
        self._kind: str | None = None

    def start(self, start: Start) -> list[Event]:
        message = {
            **_head(start.response_id, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(start.prompt_tokens, 0)),
        }
        return [_event("message_start", message=message)]

    def piece(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning:
            events += self._open("thinking", {"thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=piece.reasoning))
        if piece.content:
            events += self._open("text", {"text": ""})
            events.append(self._delta("text_delta", text=piece.content))
        arguments = piece.arguments
        if piece.call is not None:
            events += self._close()
            block = {"id": piece.call.id, "name": piece.call.name, "input": {}}
            events += self._open("tool_use", block)
            arguments = piece.call.arguments
        if arguments:
            events.append(self._delta("input_json_delta", partial_json=arguments))
        return events

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        answer = answers[0]
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop}
        return [
            *self._close(),
            _event("message_delta", delta=delta, usage=_usage(total_usage(answers))),
            _event("message_stop"),
        ]

    def fail(self, error: ApiError) -> list[Event]:
        return [Event("error", error_body(error))]

    def _open(self, kind: str, block: dict[str, Any]) -> list[Event]:
        if self._kind == kind:
            return []
        closed = self._close()
        self._block += 1
        self._kind = kind
        content = {"type": kind, **block}
        return [
            *closed,
            _event("content_block_start", index=self._block, content_block=content),
        ]

    def _close(self) -> list[Event]:
        if self._kind is None:
            return []
        events = []
        if self._kind == "thinking":
            events.append(self._delta("signature_delta", signature=""))
        self._kind = None
        return [*events, _event("content_block_stop", index=self._block)]

    def _delta(self, kind: str, **fields: str) -> Event:
        return _event("content_block_delta", index=self._block, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> Event:
    return Event(kind, {"type": kind, **fields})


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body that Anthropic clients read."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}
