"""Messages as the `renderers` library takes them.

Arguments are objects there, and text from outside is marked so that no special token can be written
into it. A message of several thoughts, for which no template has a place, becomes several messages
where thinking is kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.tokens.messages import TRAINING_KEYS, Message, call_arguments, message_parts
from headrace.tokens.tokenizer import TextTokenizer


def shape_messages(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    keeps_thinking: bool = True,
    *,
    batches: bool = False,
) -> tuple[list[Any], list[int]]:
    """Normalised messages in the library's shape.

    Args:
        tokenizer: of the checkpoint.
        messages: normalised.
        keeps_thinking: whether thinking from before the last user message is laid out.
        batches: whether the format has a way to lay out several thoughts; otherwise they stand
            together at the front.

    Returns:
        The messages, and the positions of those that continue the one before.
    """
    shaped: list[Any] = []
    continued: list[int] = []
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    thinking_from = users[-1] if users and not keeps_thinking else 0
    for i, message in enumerate(messages):
        new: dict[str, Any] = {k: v for k, v in message.items() if k not in TRAINING_KEYS}
        if message["role"] == "developer":
            new["role"] = "system"
        if message["role"] != "assistant":
            new["content"] = tokenizer.shield(message["content"])
            shaped.append(new)
            continue
        split = batches and i >= thinking_from
        for number, part in enumerate(message_parts(new) if split else [new]):
            if number:
                continued.append(len(shaped))
            shaped.append(_shape_assistant(part, tokenizer.shield))
    return shaped, continued


def _shape_assistant(message: Message, shield: Callable[[str], str]) -> dict[str, Any]:
    """Its texts and arguments shielded, except thinking that a client left inside the content."""
    shaped = dict(message)
    if "reasoning_content" in message:
        shaped["reasoning_content"] = shield(message["reasoning_content"])
    if "reasoning_content" in message or "</think>" not in message["content"]:
        shaped["content"] = shield(message["content"])
    if "tool_calls" in message:
        shaped["tool_calls"] = [_shape_call(call, shield) for call in message["tool_calls"]]
    return shaped


def _shape_call(call: dict[str, Any], shield: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    arguments = call_arguments(function["arguments"]) or {}
    shaped = {"name": function["name"], "arguments": _shield_strings(arguments, shield)}
    return {"function": shaped, **{k: call[k] for k in ("id", "type") if k in call}}


def _shield_strings(value: Any, shield: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, dict):
        return {key: _shield_strings(item, shield) for key, item in value.items()}
    if isinstance(value, list):
        return [_shield_strings(item, shield) for item in value]
    return value
