"""Puts a message together from the pieces that a reader recognises, and the deltas beside it.

Knows no format: readers say "this is thinking", "this is a call", "this cannot be read". It decides
what a message looks like: which spaces are kept, how several thoughts are told apart, which state
the message is in, and what the model is told when something was wrong.
"""

from collections.abc import Callable
from enum import Enum

from headrace.rollout.types import ParseState
from headrace.tokens.calls import CallProblemError
from headrace.tokens.parsed import (
    THOUGHT_SEPARATOR,
    CallStatus,
    Delta,
    DeltaKind,
    ParsedCall,
    ParsedMessage,
)
from headrace.tokens.schema import Tool

_SHOWN_PROBLEMS = 8


class Spaces(Enum):
    """What happens to white space around the content of a message."""

    KEPT = "kept"
    """All of it is content."""
    KEPT_WITHOUT_CALLS = "kept without calls"
    """At the end of the content it is content only if the message makes no calls."""
    STRIPPED = "stripped"
    """None of it is content, as in templates that strip it when they render."""


class MessageBuilder:
    """One assistant message in the making.

    Args:
        tools: declared tools by name.
        spaces: see `Spaces`.
        example: how a call is written in this format, of the given tool or of any.
    """

    def __init__(
        self,
        tools: dict[str, Tool],
        spaces: Spaces,
        example: Callable[[Tool | None], str],
    ) -> None:
        self.tools = tools
        self._spaces = spaces
        self._example = example
        self._deltas: list[Delta] = []
        self._content: list[str] = []
        self._content_spaces: list[str] = []
        self._reasoning: list[str] = []
        self._thought: list[str] = []
        self._thought_spaces: list[str] = []
        self._loose_thoughts: list[str] = []
        """Thoughts since the last readable call."""
        self._calls: list[ParsedCall] = []
        self._call_thoughts: list[str] = []
        self._unreadable: list[ParsedCall] = []
        self._complaints: list[str] = []
        self.speaks = False
        """Whether there is visible text since the last call, or since the beginning."""

    @property
    def has_thought(self) -> bool:
        """Whether the thought that is open has text."""
        return bool(self._thought)

    def add_content(self, text: str) -> None:
        """Visible text."""
        self.speaks = self.speaks or bool(text.strip())
        if self._spaces is not Spaces.KEPT:
            if self._spaces is Spaces.STRIPPED and not self._content:
                text = text.lstrip()
            text, after = _split_spaces(text)
            if text:
                text = "".join([*self._content_spaces, text])
                self._content_spaces = []
            if after:
                self._content_spaces.append(after)
        if text:
            self._content.append(text)
            self._deltas.append(Delta(DeltaKind.CONTENT, text))

    def add_thought(self, text: str) -> None:
        """Text of the thought that is open."""
        if not self._thought:
            text = text.lstrip()
        text, after = _split_spaces(text)
        if text:
            text = "".join([*self._thought_spaces, text])
            self._thought_spaces = []
            if not self._thought and self._reasoning:
                self._put_reasoning(THOUGHT_SEPARATOR)
            self._thought.append(text)
            self._put_reasoning(text)
        if after:
            self._thought_spaces.append(after)

    def end_thought(self) -> None:
        """The thought is complete; what follows begins another one."""
        if self._thought:
            self._loose_thoughts.append("".join(self._thought))
        self._thought = []
        self._thought_spaces = []

    def add_call(self, call: ParsedCall) -> None:
        """A call that can be read."""
        self._call_thoughts.append(THOUGHT_SEPARATOR.join(self._loose_thoughts))
        self._loose_thoughts = []
        self.speaks = False
        position = len(self._calls)
        self._calls.append(call)
        self._deltas.append(Delta(DeltaKind.CALL, call.name, position))
        self._deltas.append(Delta(DeltaKind.ARGUMENTS, call.arguments, position))

    def add_unreadable(self, status: CallStatus, problem: CallProblemError, raw: str) -> None:
        """An attempted call that is none; its text stays in the content."""
        self._unreadable.append(ParsedCall(problem.name, "{}", status, str(problem), None, raw))
        self.add_content(raw)

    def complain(self, text: str) -> None:
        """Something apart from calls that is not the format."""
        self._complaints.append(text)

    def drain(self) -> list[Delta]:
        """Deltas since the last time; neighbours of one kind are one."""
        merged: list[Delta] = []
        run: list[str] = []
        kind: DeltaKind | None = None
        for delta in self._deltas:
            if delta.kind is not kind or delta.call is not None:
                if run and kind is not None:
                    merged.append(Delta(kind, "".join(run)))
                run, kind = [], delta.kind
            if delta.call is not None:
                merged.append(delta)
                kind = None
            else:
                run.append(delta.text)
        if run and kind is not None:
            merged.append(Delta(kind, "".join(run)))
        self._deltas = []
        return merged

    def finish(self, raw_text: str, *, stopped: bool) -> tuple[list[Delta], ParsedMessage]:
        """End of the completion.

        Args:
            raw_text: for the record.
            stopped: whether a stop id was sampled; otherwise the completion was cut.
        """
        self.end_thought()
        if self._spaces is Spaces.KEPT_WITHOUT_CALLS and not self._calls and self._content_spaces:
            text = "".join(self._content_spaces)
            self._content.append(text)
            self._deltas.append(Delta(DeltaKind.CONTENT, text))
        if not stopped:
            state = ParseState.TRUNCATED
        elif self._unreadable or self._complaints:
            state = ParseState.MALFORMED
        else:
            state = ParseState.OK
        message = ParsedMessage(
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=self._thoughtful_calls(),
            state=state,
            raw_text=raw_text,
            unreadable=tuple(self._unreadable),
            error=self._error(),
        )
        return self.drain(), message

    def _put_reasoning(self, text: str) -> None:
        self._reasoning.append(text)
        self._deltas.append(Delta(DeltaKind.REASONING, text))

    def _thoughtful_calls(self) -> tuple[ParsedCall, ...]:
        """Calls with their thoughts, unless all there is is one thought before the first call."""
        if not any(self._call_thoughts[1:]) and not (self._calls and self._loose_thoughts):
            return tuple(self._calls)
        return tuple(
            ParsedCall(call.name, call.arguments, call.status, call.error, thought or None)
            for call, thought in zip(self._calls, self._call_thoughts, strict=True)
        )

    def _error(self) -> str | None:
        lines = [
            f"The tool call{_to(call)} could not be read: {call.error}."
            for call in self._unreadable
        ]
        refused = [call for call in self._calls if call.error is not None]
        lines += [
            f"The tool call{_to(call)} was not carried out: {call.error}." for call in refused
        ]
        lines += [text + "." for text in self._complaints]
        if not lines:
            return None
        if len(lines) > _SHOWN_PROBLEMS:
            lines[_SHOWN_PROBLEMS:] = [f"{len(lines) - _SHOWN_PROBLEMS} more problems follow."]
        wrong = [*self._unreadable, *refused]
        if wrong:
            tool = next((self.tools[c.name] for c in wrong if c.name in self.tools), None)
            lines.append(f"Write a tool call as: {self._example(tool)}")
        return "\n".join(lines)


def _to(call: ParsedCall) -> str:
    return f" to {call.name[:100]!r}" if call.name else ""


def _split_spaces(text: str) -> tuple[str, str]:
    """The text up to its last visible character, and the white space after that."""
    visible = text.rstrip()
    return visible, text[len(visible) :]
