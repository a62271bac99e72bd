"""What a session's clients sent so far, so that of the next body only what is new in it is read.

A client repeats the whole conversation with every request, nearly always in the very bytes of the
request before. Those bytes are compared, not parsed: messages that are known come back as the
objects they became the first time. What comes after the last element in common is read afresh: new
messages, and an old one that is spelled otherwise now, such as one that was marked for a cache.
Knows JSON and messages; what the elements of each API's array mean is its `Dialect`'s business.
"""

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from headrace.gateway.turn import decode, invalid
from headrace.tokens.messages import Message, normalise

_KEPT = 4
"""Conversations of one session that are remembered: its agent, and some subagents."""
_KEPT_BYTES = 4 * 1024 * 1024
"""Of all of them together."""


class Dialect(NamedTuple):
    """How one API writes a conversation.

    Attributes:
        read: chat messages of one element of its array, whose place is given.
        join: what two messages that follow each other are as one, or None if they stay two; None
            where that never happens. Only assistant messages are joined.
    """

    read: Callable[[Any, int], list[dict[str, Any]]]
    join: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None] | None = None


CHAT = Dialect(lambda element, _: [element])
"""Each element is a message of its own."""


class Conversation(NamedTuple):
    """Messages as they were sent, in chat form, and normalised. Neither is ever changed."""

    sent: list[dict[str, Any]]
    messages: list[Message]


class _Known(NamedTuple):
    """The text of an array up to the end of its last element, and what it says.

    Attributes:
        ends: where each element ends in `text`.
        counts: messages up to and with each element.
    """

    dialect: Dialect
    text: bytes
    ends: list[int]
    counts: list[int]
    conversation: Conversation

    def shared(self, text: bytes) -> int:
        """How many of its elements another array begins with, in the same spelling."""
        count = len(self.ends)
        if not text.startswith(self.text):
            # Texts that agree up to the end of an element agree up to all ends before it.
            count = bisect.bisect_left(
                self.ends, True, key=lambda end: not text.startswith(self.text[:end])
            )
        while count and not (self._ends_in(text, count) and self._whole(count)):
            count -= 1
        return count

    def _ends_in(self, text: bytes, count: int) -> bool:
        """Whether the last of these elements ends there, too, and does not go on."""
        end = self.ends[count - 1]
        while text[end : end + 1] in (b" ", b"\n", b"\t", b"\r"):
            end += 1
        return text[end : end + 1] in (b",", b"]")

    def _whole(self, count: int) -> bool:
        """Whether nothing that follows could be joined to their last message."""
        if self.dialect.join is None:
            return True
        last = self.counts[count - 1]
        return last > 0 and self.conversation.sent[last - 1]["role"] != "assistant"


class Transcript:
    """The latest conversations of one session."""

    def __init__(self) -> None:
        self._known: list[_Known] = []  # the latest last
        self._leads: list[Conversation] = []

    def read(
        self, text: bytes, dialect: Dialect = CHAT, lead: dict[str, Any] | None = None
    ) -> Conversation:
        """The messages of a JSON array, those that are known as the objects they were.

        Args:
            text: begins with "[".
            dialect: of the API; one object for each.
            lead: a message that goes before them, from elsewhere in the body.

        Raises:
            ApiError: 400, not JSON or not messages.
        """
        count, known = 0, None
        for other in self._known:
            if other.dialect is dialect and (shared := other.shared(text)) > count:
                count, known = shared, other
        found = self._go_on(text, dialect, known, count)
        if known is not None and count == len(known.ends):
            # What it continues is not needed any more: who goes back there is read anew once.
            self._known = [other for other in self._known if other is not known]
        self._known.append(found)
        size = sum(len(other.text) for other in self._known)
        while self._known and (len(self._known) > _KEPT or size > _KEPT_BYTES):
            size -= len(self._known.pop(0).text)
        sent, messages = found.conversation
        if lead is None:
            return found.conversation
        before = self._lead(lead)
        return Conversation([*before.sent, *sent], [*before.messages, *messages])

    def _go_on(self, text: bytes, dialect: Dialect, known: _Known | None, count: int) -> _Known:
        """The whole array, of which the first elements are known."""
        sent: list[dict[str, Any]] = []
        messages: list[Message] = []
        ends: list[int] = []
        counts: list[int] = []
        tail, at = text, 0
        if known is not None:
            ends, counts, at = known.ends[:count], known.counts[:count], known.ends[count - 1]
            sent = known.conversation.sent[: counts[-1]]
            messages = known.conversation.messages[: counts[-1]]
            rest = text[at:].lstrip()
            tail = b"[" + rest[1:] if rest[:1] == b"," else b"[]"
        begun = len(sent)
        texts = decode(tail, list[msgspec.Raw])
        for element, its_text in zip(decode(tail, list[Any]), texts, strict=True):
            raw = bytes(its_text)
            for message in dialect.read(element, len(ends)):
                joined = None
                if dialect.join is not None and len(sent) > begun:
                    joined = dialect.join(sent[-1], message)
                if joined is None:
                    sent.append(message)
                else:
                    sent[-1] = joined
            at = text.index(raw, at) + len(raw)  # only spaces and a comma are in between
            ends.append(at)
            counts.append(len(sent))
        if len(sent) > begun or not sent:
            try:
                messages = [*messages, *normalise(sent[begun:], begun)]
            except ValueError as error:
                raise invalid(str(error), param="messages") from error
        return _Known(dialect, text[:at], ends, counts, Conversation(sent, messages))

    def _lead(self, message: dict[str, Any]) -> Conversation:
        for lead in self._leads:
            if lead.sent[0] == message:
                return lead
        try:
            lead = Conversation([message], normalise([message]))
        except ValueError as error:
            raise invalid(str(error), param="messages") from error
        self._leads = [*self._leads[1 - _KEPT :], lead]
        return lead
