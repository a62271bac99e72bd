"""Reads completions of formats that put thinking and tool calls between tags, while they stream.

One pass, one lexeme after the other: thinking, content, calls, thinking again. `read_whole` is
the same reader fed once, so streaming and parsing cannot disagree. What a call looks like between
its tags is the grammar's business.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from headrace.tokens.calls import CallProblemError, Lexeme
from headrace.tokens.lexer import Lexer, Tags
from headrace.tokens.message_builder import MessageBuilder, Spaces
from headrace.tokens.parsed import CallStatus, Delta, ParsedCall, ParsedMessage, StreamReader
from headrace.tokens.schema import Tool, index_tools


class Block(NamedTuple):
    """What stands between the tags of a call.

    Attributes:
        lexemes: neighbouring texts are one.
        ids: the same as ids; () where the tags are no ids.
    """

    lexemes: Sequence[Lexeme]
    ids: Sequence[int]

    @property
    def text(self) -> str:
        """Everything, tags as their literals."""
        return "".join(lexeme.text for lexeme in self.lexemes)


class Grammar(NamedTuple):
    """One format as its reader sees it.

    Attributes:
        tags: every tag there is; those that the next fields do not name belong inside calls or
            nowhere.
        call, call_end: around calls.
        read_block: the calls in a block; raises CallProblemError.
        example: how a call of a tool, or of any, is written.
        stop_ids: end a completion.
        decode: ids to text, special tokens as literals.
        think, think_end: around thinking, None in formats without.
        think_anywhere: whether a message may think again after it began to speak; otherwise such
            tags are text, as they are in prose about them.
        spaces: around content.
    """

    tags: Tags
    call: str
    call_end: str
    read_block: Callable[[Block, dict[str, Tool]], list[ParsedCall]]
    example: Callable[[Tool | None], str]
    stop_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    think: str | None = None
    think_end: str | None = None
    think_anywhere: bool = True
    spaces: Spaces = Spaces.STRIPPED


class _State(Enum):
    CONTENT = auto()
    THINKING = auto()
    CALL = auto()
    DRAFT = auto()
    """After a call's tag inside thinking: a draft if thinking is ended later, else calls."""


class TaggedReader:
    """Reads one completion of a tagged format. See `StreamReader`.

    Args:
        grammar: the format.
        tools: OpenAI function tools.
        thinking: whether the prompt ends inside thinking.
    """

    def __init__(
        self, grammar: Grammar, tools: Sequence[dict[str, Any]], *, thinking: bool = False
    ) -> None:
        self._grammar = grammar
        self._lexer = Lexer(grammar.tags)
        self._built = MessageBuilder(index_tools(tools), grammar.spaces, grammar.example)
        self._state = _State.THINKING if thinking else _State.CONTENT
        self._just_thought = False
        self._ids: list[int] = []
        self._stop: list[int] = []
        """A stop id that no other id has followed so far."""
        self._block: list[Lexeme] = []
        self._run: list[str] = []
        """Pieces of the text at the end of the block."""
        self._opened_at = -1
        self._draft: list[Lexeme] = []
        self._draft_in_call = False

    @property
    def thinks(self) -> bool:
        """Whether the completion is inside thinking after what was fed."""
        return self._state in (_State.THINKING, _State.DRAFT)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `StreamReader.feed`."""
        body = [*self._stop, *ids]
        self._stop = body[-1:] if body and body[-1] in self._grammar.stop_ids else []
        if self._stop:
            body.pop()
        self._ids += body
        for lexeme in self._lexer.feed(body):
            self._take(lexeme)
        return self._built.drain()

    def finish(self) -> tuple[list[Delta], ParsedMessage]:
        """See `StreamReader.finish`."""
        for lexeme in self._lexer.finish():
            self._take(lexeme)
        stopped = bool(self._stop)
        if self._state is _State.DRAFT:
            if stopped:
                self._call_from_draft()
            else:
                self._think_the_draft()
        if self._state is _State.CALL:
            self._leave_open(stopped=stopped)
        if self._state is _State.THINKING and stopped:
            self._built.complain(f"Thinking has no {self._grammar.think_end} at its end")
        return self._built.finish(self._grammar.decode(self._ids), stopped=stopped)

    # ------------------------------------------------------------------ states

    def _take(self, lexeme: Lexeme) -> None:
        match self._state:
            case _State.CONTENT:
                self._in_content(lexeme)
            case _State.THINKING:
                self._in_thinking(lexeme)
            case _State.CALL:
                self._in_call(lexeme)
            case _State.DRAFT:
                self._in_draft(lexeme)

    def _in_content(self, lexeme: Lexeme) -> None:
        grammar, ended, self._just_thought = self._grammar, self._just_thought, False
        if not lexeme.is_tag:
            self._just_thought = ended and not lexeme.text.strip()
            self._built.add_content(lexeme.text)
        elif lexeme.text == grammar.call:
            self._state, self._opened_at = _State.CALL, lexeme.at
        elif lexeme.text == grammar.think and (grammar.think_anywhere or not self._built.speaks):
            self._state = _State.THINKING
        elif lexeme.text in (grammar.think, grammar.think_end) and not grammar.think_anywhere:
            self._built.add_content(lexeme.text)
        elif lexeme.text != grammar.think_end or not ended:
            self._built.add_content(lexeme.text)
            self._built.complain(f"{lexeme.text} stands where it does not belong")

    def _in_thinking(self, lexeme: Lexeme) -> None:
        grammar = self._grammar
        if lexeme.is_tag and lexeme.text == grammar.think_end:
            self._end_thought()
        elif lexeme.is_tag and lexeme.text == grammar.call:
            self._state, self._draft, self._draft_in_call = _State.DRAFT, [lexeme], True
        elif not lexeme.is_tag or lexeme.text != grammar.think or self._built.has_thought:
            self._built.add_thought(lexeme.text)

    def _in_call(self, lexeme: Lexeme) -> None:
        if not lexeme.is_tag:
            self._run.append(lexeme.text)
        elif lexeme.text == self._grammar.call_end:
            self._close_call(lexeme.at)
        else:
            self._end_run()
            self._block.append(lexeme)

    def _in_draft(self, lexeme: Lexeme) -> None:
        grammar = self._grammar
        if lexeme.is_tag and lexeme.text == grammar.think_end:
            self._think_the_draft()
            self._end_thought()
        elif lexeme.is_tag and lexeme.text == grammar.think and not self._draft_in_call:
            self._call_from_draft()
            self._take(lexeme)
        else:
            self._draft.append(lexeme)
            if lexeme.is_tag and lexeme.text in (grammar.call, grammar.call_end):
                self._draft_in_call = lexeme.text == grammar.call

    def _end_thought(self) -> None:
        self._built.end_thought()
        self._state, self._just_thought = _State.CONTENT, True

    def _think_the_draft(self) -> None:
        """What was held back is thinking."""
        draft, self._draft, self._state = self._draft, [], _State.THINKING
        for lexeme in draft:
            self._built.add_thought(lexeme.text)

    def _call_from_draft(self) -> None:
        """What was held back came after thinking that was never ended."""
        draft, self._draft = self._draft, []
        self._end_thought()
        for lexeme in draft:
            self._take(lexeme)

    # ------------------------------------------------------------------ calls

    def _end_run(self) -> None:
        if self._run:
            self._block.append(Lexeme("".join(self._run), False))
            self._run = []

    def _take_block(self, end: int) -> Block:
        self._end_run()
        ids = self._ids[self._opened_at + 1 : end] if self._opened_at >= 0 else ()
        block, self._block, self._state = Block(self._block, ids), [], _State.CONTENT
        return block

    def _close_call(self, end: int) -> None:
        block = self._take_block(end)
        try:
            calls = self._grammar.read_block(block, self._built.tools)
        except CallProblemError as problem:
            raw = f"{self._grammar.call}{block.text}{self._grammar.call_end}"
            self._built.add_unreadable(CallStatus.MALFORMED, problem, raw)
            return
        for call in calls:
            self._built.add_call(call)

    def _leave_open(self, *, stopped: bool) -> None:
        block = self._take_block(len(self._ids))
        end = self._grammar.call_end
        problem = CallProblemError(
            f"{end} is missing" if stopped else f"it was cut before {end}",
            self._name_in(block),
        )
        status = CallStatus.MALFORMED if stopped else CallStatus.TRUNCATED
        self._built.add_unreadable(status, problem, f"{self._grammar.call}{block.text}")

    def _name_in(self, block: Block) -> str:
        """The tool an unfinished call seems to be for."""
        try:
            calls = self._grammar.read_block(block, {})
        except CallProblemError as problem:
            return problem.name
        return calls[0].name if calls else ""


def read_whole(reader: StreamReader, ids: Sequence[int]) -> ParsedMessage:
    """A completion read at once."""
    reader.feed(ids)
    return reader.finish()[1]
