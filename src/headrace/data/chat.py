"""Chat and tool conversations for supervised fine-tuning: JSONL in, training samples out.

One line holds one conversation in OpenAI's message format. A mistake in a file is reported with its
line and field. Which tokens are trained, and in which context, is `headrace.tokens.thinking`.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.tokens.messages import TRAINING_KEYS, Message, check_tools, normalise
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.thinking import ThinkingMode, message_weight, render_conversation
from headrace.training.batch import Sample, supervised_sample

_MISSPELLINGS = {
    "weight": "train",
    "loss": "train",
    "loss_mask": "mask",
    "masks": "mask",
    "errors": "error",
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
}
"""Keys of other formats that would change the training and must not be passed over."""
_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


class Conversation(msgspec.Struct, frozen=True):
    """A finished conversation.

    Attributes:
        messages: as `headrace.tokens.thinking.render_conversation` takes them.
        tools: OpenAI function tools.
        mode: how thinking is laid out.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    mode: ThinkingMode = ThinkingMode.TURN


def read_conversations(
    path: str | Path, mode: ThinkingMode = ThinkingMode.TURN
) -> Iterator[Conversation]:
    """Conversations of a JSONL file, in order.

    Each line is an object with `messages`, possibly `tools`, and possibly `thinking`, the mode of
    this one. Empty lines are skipped. Unknown keys of a row are left for others to read.

    Args:
        path: the file.
        mode: of rows that name none.

    Raises:
        UserError: the file is missing, or a line is wrong; the text names file, line and field.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"conversations {str(file)!r}: no such file; give a JSONL file")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield parse_conversation(json.loads(line), mode)
            except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
                what = str(error)
                if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
                    what = f"not valid JSON ({error})"
                raise UserError(f"{file}:{number}: {what}") from error


def parse_conversation(row: Any, mode: ThinkingMode = ThinkingMode.TURN) -> Conversation:
    """Check one row.

    Raises:
        ValueError: the text names field, value and remedy.
    """
    if not isinstance(row, dict):
        raise ValueError(f"row is {type(row).__name__}; write an object with 'messages'")
    raw = row.get("messages")
    if not isinstance(raw, list):
        raise ValueError(f"messages is {_kind(raw)}; write a list of messages")
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise ValueError(f"tools is {_kind(tools)}; write a list of OpenAI function tools")
    check_tools(tools)
    named = row.get("thinking", mode)
    if named not in list(ThinkingMode):
        raise ValueError(f"thinking is {named!r}; use one of {', '.join(ThinkingMode)}")
    messages = normalise(raw)
    for i, (message, source) in enumerate(zip(messages, raw, strict=True)):
        place = f"messages[{i}]"
        _check_keys(source, place)
        message.update({key: source[key] for key in TRAINING_KEYS if key in source})
        message_weight(message, place)
        if message["role"] == "assistant":
            _split_thinking(message, place)
    return Conversation(messages, tools, ThinkingMode(named))


def _check_keys(source: dict[str, Any], place: str) -> None:
    for key in source:
        if key in _MISSPELLINGS:
            raise ValueError(f"{place}.{key} is unknown; did you mean {_MISSPELLINGS[key]!r}?")
    for key in ("train", "mask", "reasoning_mask"):
        if key in source and source["role"] != "assistant":
            raise ValueError(
                f"{place}.{key} is on a {source['role']} message; only assistant messages are "
                "trained, remove it"
            )
    reasoning = source.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"{place}.reasoning_content is {_kind(reasoning)}; write a string")


def _split_thinking(message: Message, place: str) -> None:
    """Move `<think>...</think>` from the start of the content to where thinking belongs."""
    match = _THINKING.fullmatch(message["content"])
    if match is None or "reasoning_content" in message:
        return
    if "mask" in message:
        raise ValueError(
            f"{place}.mask counts characters of a content that holds thinking; "
            "write the thinking as reasoning_content"
        )
    thinking, message["content"] = match[1].strip(), match[2].lstrip("\n")
    if thinking:
        message["reasoning_content"] = thinking


def _kind(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


def conversation_samples(renderer: ChatRenderer, conversation: Conversation) -> list[Sample]:
    """Training samples of one conversation; several when its thinking is dropped on the way.

    Raises:
        ValueError: a message cannot be trained; see `render_conversation`.
    """
    return [
        supervised_sample(sequence.ids, sequence.weights)
        for sequence in render_conversation(
            renderer, conversation.messages, conversation.tools, conversation.mode
        )
    ]


def chat_samples(
    renderer: ChatRenderer,
    conversations: Iterable[Conversation],
    *,
    max_tokens: int | None = None,
    source: str = "conversations",
) -> tuple[list[Sample], int]:
    """Training samples of many conversations, in order.

    Args:
        max_tokens: leave out samples that are longer; None keeps all.
        source: what error messages call the data.

    Returns:
        The samples and how many were left out.

    Raises:
        UserError: a conversation cannot be trained; the text names its number, counted from 1.
    """
    samples: list[Sample] = []
    too_long = 0
    for number, conversation in enumerate(conversations, start=1):
        try:
            found = conversation_samples(renderer, conversation)
        except ValueError as error:
            raise UserError(f"{source}: conversation {number}: {error}") from error
        kept = [sample for sample in found if max_tokens is None or len(sample) <= max_tokens]
        too_long += len(found) - len(kept)
        samples += kept
    return samples, too_long
