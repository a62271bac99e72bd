"""What reading a completion gives: a message, its tool calls, what was wrong with them, and deltas.

Types only. Renderers make them, gateways shape them for clients; nothing here knows a format.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from headrace.rollout.types import ParseState

THOUGHT_SEPARATOR = "\n\n"
"""Stands between the thoughts of one message when they are shown as one text."""


class CallStatus(StrEnum):
    """What can be said of one tool call that a model attempted."""

    OK = "ok"
    UNKNOWN_TOOL = "unknown_tool"
    """Well formed, but no tool of that name is declared."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """Well formed, but the tool's schema does not accept the arguments."""
    MALFORMED = "malformed"
    """Not the format; there is no call in it that could be carried out."""
    TRUNCATED = "truncated"
    """Cut before its end."""

    @property
    def readable(self) -> bool:
        """Whether there is a name and an object of arguments, right or wrong."""
        return self not in (CallStatus.MALFORMED, CallStatus.TRUNCATED)


class ParsedCall(msgspec.Struct, frozen=True):
    """One tool call.

    Attributes:
        name: of the tool; "" when an unreadable call does not say.
        arguments: the JSON text of an object; "{}" when it cannot be read.
        status: see `CallStatus`.
        error: for the model: what is wrong with this call; None when it is right.
        reasoning: the thought this call was made from, where a message holds several thoughts.
        raw: the text of an unreadable call, tags included; "" of the others.
    """

    name: str
    arguments: str
    status: CallStatus = CallStatus.OK
    error: str | None = None
    reasoning: str | None = None
    raw: str = ""


class ParsedMessage(msgspec.Struct, frozen=True):
    """A completion read as an assistant message (law L13: there always is one).

    Attributes:
        content: visible text, in every state without thinking and without readable calls. What
            cannot be read as a call stays in it as it was written.
        reasoning: thinking text, or None. Several thoughts are joined by `THOUGHT_SEPARATOR`.
        tool_calls: calls with a name and an object of arguments, in every state; their status
            says whether a declared tool accepts them.
        state: MALFORMED when something in it is not the format, TRUNCATED when it was cut.
        raw_text: everything sampled, special tokens as literals, without the final stop token.
        unreadable: attempted calls that are none, in order.
        error: for the model, to be returned in the place of a tool result: what was wrong, in
            which tool and parameter, and how a call is written. None when nothing was.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ParsedCall, ...]
    state: ParseState
    raw_text: str
    unreadable: tuple[ParsedCall, ...] = ()
    error: str | None = None


class DeltaKind(StrEnum):
    """What a piece of a streamed message belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """A tool call begins; the text is the tool's name."""
    ARGUMENTS = "arguments"


class Delta(msgspec.Struct, frozen=True):
    """The next piece of a streamed message.

    Attributes:
        kind: where `text` goes.
        text: not empty.
        call: position in `ParsedMessage.tool_calls`, of CALL and ARGUMENTS.
    """

    kind: DeltaKind
    text: str
    call: int | None = None


class StreamReader(Protocol):
    """Reads one completion while it is sampled.

    However the ids are cut into feeds, the texts of all deltas put together are what
    `ChatRenderer.parse` says of the whole: its reasoning ("" for None), its content, and each tool
    call's name and arguments. Never raises for any ids; the cost of all feeds together is linear
    in the number of ids, plus a constant for each feed.
    """

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Read the next ids. What may still turn out to be part of a tag is held back."""
        ...

    def finish(self) -> tuple[list[Delta], ParsedMessage]:
        """End of the completion: the deltas held back, and the message. Call it once, last."""
        ...
