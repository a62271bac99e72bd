"""The input of OpenAI's responses: its items as chat messages.

Reasoning, message and function calls that follow each other are one assistant message. Items may
also be named by their id, as clients do that count on the server to have kept them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from headrace.gateway.transcript import Dialect
from headrace.gateway.turn import ApiError, invalid, unsupported

Recall = Callable[[str], dict[str, Any]]
"""The assistant message that a response was, by the response's name; 404 for others."""


def item_id(prefix: str, response: str, number: int) -> str:
    """What item `number` of a response is called; `prefix` is its kind: "rs", "msg" or "fc"."""
    return f"{prefix}_{response}_{number}"


def read_items(given: str | list[Any], recall: Recall | None = None) -> list[dict[str, Any]]:
    """The input as chat messages.

    Args:
        given: a text of the user, or items.
        recall: finds what items were that are named by their id; None where nothing is kept.

    Raises:
        ApiError: 400 or 404, naming the item, its value and what to send instead.
    """
    return _merged(_messages(given, recall))


def _messages(given: str | list[Any], recall: Recall | None) -> Iterator[dict[str, Any]]:
    """Each input item as a chat message of its own."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    referred: Counter[tuple[str, str]] = Counter()
    for i, item in enumerate(given):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            yield from _referred(item.get("id"), f"input[{i}]", recall, referred)
        else:
            yield _read_item(item, i)


def _read_item(item: Any, number: int) -> dict[str, Any]:
    """One that says itself what it is."""
    place = f"input[{number}]"
    if not isinstance(item, dict):
        raise invalid(f"{place} is {type(item).__name__}; send an object", param="input")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        return {"role": role, "content": _text(item.get("content"), f"{place}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        thought = _text(item.get("content") or "", f"{place}.content")
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    raise unsupported(
        f"{place}.type", kind, "send messages, function calls, their outputs and reasoning"
    )


def _referred(
    name: Any, place: str, recall: Recall | None, referred: Counter[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """The item of an earlier response that is called `name`.

    The k-th named call of a response is its k-th call. Its reasoning and its text are whole in the
    first item of their kind that is named, however many it was streamed in.
    """
    prefix, _, rest = name.partition("_") if isinstance(name, str) else ("", "", "")
    response = rest.rpartition("_")[0]
    missing = ApiError(
        404,
        "item_not_found",
        f"{place}.id={name!r} is no item of a response that this session keeps; send the item "
        "itself, as clients do with store=false",
        param="input",
    )
    if recall is None or prefix not in ("rs", "msg", "fc"):
        raise missing
    try:
        answer = recall(response)
    except ApiError as error:
        if error.status != 404:
            raise
        raise missing from error
    k = referred[response, prefix]
    referred[response, prefix] += 1
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if prefix == "fc":
        calls = answer.get("tool_calls", ())
        if k >= len(calls):
            raise missing
        yield message | {"tool_calls": [calls[k]]}
    elif k == 0 and prefix == "msg":
        yield message | {"content": answer.get("content") or ""}
    elif k == 0:
        yield message | {"reasoning_content": answer.get("reasoning_content") or ""}


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{place} must be a text or a list of parts", param="input")
    texts = []
    for j, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise unsupported(f"{place}[{j}].type", kind, "send text parts")
        texts.append(text)
    return "".join(texts)


def _merged(messages: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one answer was made of becomes one message again."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        joined = _joined(merged[-1], message) if merged else None
        if joined is None:
            merged.append(message)
        else:
            merged[-1] = joined
    return merged


def _joined(last: dict[str, Any], message: dict[str, Any]) -> dict[str, Any] | None:
    """Two parts of one answer as one message; None if they are not."""
    if not last["role"] == message["role"] == "assistant":
        return None
    joined = {**last, "content": last["content"] + message["content"]}
    for key, empty in (("reasoning_content", ""), ("tool_calls", [])):
        if message.get(key):
            joined[key] = joined.get(key, empty) + message[key]
    return joined


DIALECT = Dialect(lambda item, number: [_read_item(item, number)], _joined)
"""Of an input without references to items, whose meaning depends on those before."""
