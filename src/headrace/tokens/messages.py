"""OpenAI chat messages as plain objects: checked once, then read the same way by everyone.

`normalise` reduces what a client sent to the fields that reach the model; `identity` says when two
messages mean the same to the model, whatever their spelling in JSON.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.tokens.parsed import THOUGHT_SEPARATOR

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]
"""A normalised message: role, content (str), and for assistants possibly tool_calls (each
{"id", "type", "function": {"name", "arguments": str}}) and reasoning_content; for tool results
possibly tool_call_id and name.

A message that thinks more than once has the thought behind each tool call as "reasoning_content" of
that call, and all its thoughts, joined by `THOUGHT_SEPARATOR`, as its own: clients that know only
the message's show everything, and `message_parts` finds the thoughts again.

SFT messages may also carry `TRAINING_KEYS`."""

TRAINING_KEYS = frozenset({"train", "error", "mask", "reasoning_mask"})
"""Keys that say how a message is trained on and never reach a prompt (`headrace.tokens.thinking`).
Renderers' own `render_training` reads `train` only, as a bool."""

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode


def normalise(messages: Sequence[Any], first: int = 0) -> list[Message]:
    """Check `messages` and keep what reaches the model.

    Args:
        messages: of a conversation, or its end.
        first: place of the first of them in the conversation, for messages.

    Raises:
        ValueError: a message cannot be rendered; the text names its place, value and remedy.
    """
    if not messages:
        raise ValueError("messages is empty; send at least one message")
    return [_normalise_one(message, f"messages[{first + i}]") for i, message in enumerate(messages)]


def _normalise_one(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{place} is {type(message).__name__}; send an object")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role is {role!r}; use one of {', '.join(ROLES)}")
    result: Message = {"role": role, "content": _text(message.get("content"), f"{place}.content")}
    if role == "assistant":
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls is {type(calls).__name__}; send a list")
        if calls:
            result["tool_calls"] = [
                _normalise_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if not isinstance(reasoning, str):
            reasoning = ""
        thoughts = [call.get("reasoning_content") for call in result.get("tool_calls", ())]
        reasoning = reasoning or THOUGHT_SEPARATOR.join(filter(None, thoughts))
        if reasoning:
            result["reasoning_content"] = reasoning
        if "train" in message:
            result["train"] = bool(message["train"])
    elif role == "tool":
        for field in ("tool_call_id", "name"):
            if isinstance(message.get(field), str):
                result[field] = message[field]
    return result


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} is {type(content).__name__}; send a string or text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"{place}[{i}] is {kind!r}; only text parts are supported")
        texts.append(text)
    return "".join(texts)


def _normalise_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{place}.function is missing; send an object with name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{place}.function.name is {name!r}; send a non-empty string")
    if arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    reasoning = call.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        result["reasoning_content"] = reasoning
    return result


def message_parts(message: Message) -> list[Message]:
    """An assistant message as messages of one thought each; [message] if it has no more than one.

    The content belongs to the first part. Each part but the first has a thought, then its calls; a
    thought after the last call is a part without calls. Calls have no reasoning_content of their
    own any more, and keys apart from role, content, tool_calls and reasoning_content are gone.
    """
    calls = message.get("tool_calls", ())
    thoughts = [call.get("reasoning_content") or "" for call in calls]
    if not any(thoughts):
        return [message]
    whole = message.get("reasoning_content") or ""
    told = THOUGHT_SEPARATOR.join(filter(None, thoughts))
    parts: list[Message] = [{"role": "assistant", "content": message["content"], "tool_calls": []}]
    if whole.startswith(told):
        rest = whole[len(told) :].removeprefix(THOUGHT_SEPARATOR)
    else:  # a client rewrote one of them; what it says of the message comes first
        parts[0]["reasoning_content"], rest = whole, ""
    for call, thought in zip(calls, thoughts, strict=True):
        if thought:
            if parts[-1]["tool_calls"] or "reasoning_content" in parts[-1]:
                parts.append({"role": "assistant", "content": "", "tool_calls": []})
            parts[-1]["reasoning_content"] = thought
        parts[-1]["tool_calls"].append({k: v for k, v in call.items() if k != "reasoning_content"})
    if rest:
        parts.append({"role": "assistant", "content": "", "reasoning_content": rest})
    for part in parts:
        if not part.get("tool_calls"):
            part.pop("tool_calls", None)
    return parts


def call_arguments(arguments: str) -> dict[str, Any] | None:
    """Arguments of a tool call as an object, or None when they are not one."""
    try:
        value = _decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tool_names(tools: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the declared tools, in order."""
    return [str(_function(tool).get("name", "")) for tool in tools]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}


def check_tools(tools: Sequence[Any]) -> None:
    """Accept OpenAI function tools only.

    Raises:
        ValueError: a tool has no usable name.
    """
    for i, tool in enumerate(tools):
        name = _function(tool).get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"tools[{i}] has no function.name; send OpenAI function tools")


def identity(message: Message) -> bytes:
    """Equal exactly for normalised messages that mean the same to the model.

    Ids of tool calls do not count (clients make up new ones), nor does reasoning, which clients
    commonly drop when they send history back; `same_reasoning` covers a changed one.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = call_arguments(function["arguments"])
        calls.append(
            (function["name"], arguments if arguments is not None else function["arguments"])
        )
    return _encode((message["role"], message["content"], message.get("name"), calls))


def same_reasoning(sent: Message, recorded: Message) -> bool:
    """Whether `sent` leaves the recorded reasoning as it was, or out.

    The same for the thoughts of its calls. What clients lose without meaning to counts as the same:
    a message that has only its first thought left, as from clients that know one thought a message,
    and one that has only the end of its reasoning left, as from OpenAI's package for Node.js, which
    keeps the last piece of a streamed field that it does not know.
    """
    reasoning = sent.get("reasoning_content")
    whole = recorded.get("reasoning_content")
    if reasoning is not None and whole is not None and whole.endswith(reasoning):
        reasoning = whole
    known = {None, whole}
    ours = [call.get("reasoning_content") for call in recorded.get("tool_calls", ())]
    if ours:
        known.add(ours[0])
    theirs = [call.get("reasoning_content") for call in sent.get("tool_calls", ())]
    return reasoning in known and all(
        thought is None or thought == own for thought, own in zip(theirs, ours, strict=False)
    )
