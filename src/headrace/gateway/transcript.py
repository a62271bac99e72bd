"""What a session's clients sent so far, so that of the next body only what is new in it is read.

A client repeats the whole conversation with every request, nearly always in the very bytes of the
request before. Those bytes are compared, not parsed: messages that are known come back as the
objects they became the first time. Whatever does not begin with known bytes is read as a whole.
Knows JSON and messages; not what they are matched with.
"""

from typing import Any, NamedTuple

from headrace.gateway.turn import decode, invalid
from headrace.tokens.messages import Message, normalise

_KEPT = 4
"""Conversations of one session that are remembered: its agent, and some subagents."""
_KEPT_BYTES = 4 * 1024 * 1024
"""Of all of them together."""


class Conversation(NamedTuple):
    """Messages as they were sent, and normalised. Neither is ever changed."""

    sent: list[dict[str, Any]]
    messages: list[Message]


class _Known(NamedTuple):
    """The text of an array up to the end of its last element, and what it says."""

    text: bytes
    conversation: Conversation


class Transcript:
    """The latest conversations of one session."""

    def __init__(self) -> None:
        self._known: list[_Known] = []  # the latest last

    def read(self, text: bytes) -> Conversation:
        """The messages of a JSON array, those that are known as the objects they were.

        Raises:
            ApiError: 400, not JSON or not messages.
        """
        known = max(
            (known for known in self._known if _continues(text, known.text)),
            key=lambda known: len(known.text),
            default=None,
        )
        sent: list[dict[str, Any]] = []
        messages: list[Message] = []
        tail = text
        if known is not None:
            sent, messages = known.conversation
            rest = text[len(known.text) :].lstrip()
            tail = b"[" + rest[1:] if rest[:1] == b"," else b"[]"
        added = decode(tail, list[Any])
        if added or not sent:
            try:
                fresh = normalise(added, len(sent))
            except ValueError as error:
                raise invalid(str(error), param="messages") from error
            sent, messages = [*sent, *added], [*messages, *fresh]
        found = _Known(text[:-1].rstrip(), Conversation(sent, messages))
        # What it continues is not needed any more: who goes back there is read as a whole once.
        self._known = [other for other in self._known if other is not known]
        self._known.append(found)
        size = sum(len(other.text) for other in self._known)
        while self._known and (len(self._known) > _KEPT or size > _KEPT_BYTES):
            size -= len(self._known.pop(0).text)
        return found.conversation


def _continues(text: bytes, known: bytes) -> bool:
    """Whether the array begins with the elements of `known`; both are whole elements then."""
    return text.startswith(known) and text[len(known) :].lstrip()[:1] in (b",", b"]")
