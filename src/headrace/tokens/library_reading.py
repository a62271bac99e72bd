"""Reads completions of the `renderers` library's formats.

Formats whose calls stand between <tool_call> tokens (GLM, Qwen) are read by `TaggedReader`, those
of llama-3 by `JsonReader`; both stream, and say what is wrong with a call. Blocks whose inside has
no strict reading here, and formats with other tags, go through the library's own parsers, the
latter when the completion is complete.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.tokens.calls import (
    CallProblemError,
    json_example,
    judge_call,
    read_json,
    read_json_call,
    read_tagged_call,
    tagged_example,
)
from headrace.tokens.detokenise import TokenBytes
from headrace.tokens.json_reader import PYTHON_TAG, JsonReader
from headrace.tokens.lexer import Tags
from headrace.tokens.message_builder import MessageBuilder, Spaces
from headrace.tokens.parsed import (
    CallStatus,
    Delta,
    ParsedCall,
    ParsedMessage,
    StreamReader,
)
from headrace.tokens.reader import Block, Grammar, TaggedReader, read_whole
from headrace.tokens.schema import Tool, index_tools
from headrace.tokens.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers import Renderer
    from renderers.base import ParsedResponse, ParsedToolCall

_log = logging.getLogger(__name__)

THINK, THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"

_HERMES = ("qwen3", "qwen3-vl")
"""Formats with JSON between the tags. Names that begin with "glm-" have GLM's tags."""

_ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_TURN_TAGS = (
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<tool_response>",
    "</tool_response>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
)
"""Tokens that shape conversations and have no place inside a message."""


class LibraryReading:
    """How one of the library's renderers is read back.

    Args:
        name: the library's name of the format.
        library: its renderer.
        tokenizer: of the checkpoint.

    Attributes:
        think_id, think_end_id: tokens around thinking; None where they are not single tokens, or
            where only the library knows what is thinking.
        call_id, call_end_id: the same around tool calls.
    """

    def __init__(self, name: str, library: "Renderer", tokenizer: TextTokenizer) -> None:
        special = tokenizer.special_ids
        self._name = name
        self._library = library
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(library.get_stop_token_ids())
        self.think_id = special.get(THINK)
        self.think_end_id = special.get(THINK_END) if THINK in special else None
        self.call_id, self.call_end_id = special.get(_CALL), special.get(_CALL_END)
        literals = [*_TURN_TAGS, PYTHON_TAG, THINK, THINK_END, _CALL, _CALL_END]
        if name.startswith("glm-"):
            literals += _ARGUMENT_TAGS
        self._atoms = {special[tag]: tag for tag in literals if tag in special}
        self._atoms |= {token: tokenizer.decode([token]) for token in self._stop_ids}
        self._tags = Tags(TokenBytes(tokenizer), self._atoms)
        self._grammar = self._find_grammar()
        if self._grammar is None:
            self.think_id = self.think_end_id = None

    def reader(
        self,
        prompt_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
        parse: "Callable[[list[int]], ParsedResponse]",
    ) -> StreamReader:
        """A reader of one completion; `parse` is the library's parser, for formats that need it."""
        if self._name == "llama-3":
            return JsonReader(self._tags, tools, self._stop_ids, self._tokenizer.decode)
        if self._grammar is None:
            return WholeReader(parse, tools, self._stop_ids, self._tokenizer.decode)
        return TaggedReader(self._grammar, tools, thinking=self.in_thinking(prompt_ids))

    def in_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt, or a prompt with a part of its completion, ends inside thinking."""
        for token in reversed(prompt_ids):
            if token == self.think_id:
                return True
            if token in self._atoms:
                return False
        return False

    def has_ended_thinking(self, ids: Sequence[int]) -> bool:
        """Whether a completion certainly ended its thinking, seen without reading it.

        False where only a reader can tell. Here tags are always single ids: after the one that ends
        thinking, a message is outside of it until the next one that begins it.
        """
        if self.think_end_id is None or self.think_end_id not in ids:
            return False
        last = len(ids) - 1 - ids[::-1].index(self.think_end_id)
        return self.think_id not in ids[last + 1 :]

    def holds_thinking(self, ids: Sequence[int]) -> bool:
        """Whether there is thinking with any text in it."""
        at = -1
        while self.think_id is not None:
            try:
                at = ids.index(self.think_id, at + 1)
            except ValueError:
                return False
            end = at + 1
            while end < len(ids) and ids[end] not in self._atoms:
                end += 1
                if self._tokenizer.decode(ids[end - 1 : end]).strip():
                    return True
        return False

    def join_parts(self, ids: list[int], places: list[int], continued: Sequence[int]) -> None:
        """Make one turn of each message in `continued` and the one before, which it continues.

        Takes out what the template puts between the last call of one and the thinking or calls of
        the other.

        Args:
            ids: of a conversation.
            places: message of each id.
            continued: ascending.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, place in enumerate(places):
            first.setdefault(place, i)
            last[place] = i
        for place in reversed(continued):
            begin, end = first[place], last[place] + 1
            opens = (i for i in range(begin, end) if ids[i] in (self.think_id, self.call_id))
            start = next(opens, end)
            ends = range(begin - 1, first[place - 1] - 1, -1)
            call = next((i for i in ends if ids[i] == self.call_end_id), None)
            if call is not None:  # else the part before makes no calls
                # A thought that the template leaves out leaves nothing behind.
                cut = slice(call + 1 if start < end else begin, start)
                del ids[cut], places[cut]

    @property
    def call_style(self) -> str | None:
        """See `LibraryRenderer.call_style`."""
        if self._grammar is None:
            return None
        return (
            "tags" if self._name.startswith("glm-") else "json" if self._name in _HERMES else None
        )

    @property
    def joins_parts(self) -> bool:
        """Whether `join_parts` is possible."""
        return self._grammar is not None

    # ------------------------------------------------------------------ formats

    def _find_grammar(self) -> Grammar | None:
        if self.call_id is None or self.call_end_id is None:
            return None
        read_block, example = self._read_by_library, _described_example
        if self._name.startswith("glm-"):
            read_block, example = _read_glm, tagged_example
        elif self._name in _HERMES:
            read_block, example = _read_hermes, _hermes_example
        grammar = Grammar(
            tags=self._tags,
            call=_CALL,
            call_end=_CALL_END,
            read_block=read_block,
            example=example,
            stop_ids=self._stop_ids,
            decode=self._tokenizer.decode,
            think=None if self.think_end_id is None else THINK,
            think_end=None if self.think_end_id is None else THINK_END,
        )
        known = read_block != self._read_by_library
        return grammar if known or self._reads_back(grammar) else None

    def _reads_back(self, grammar: Grammar) -> bool:
        """Whether a call as the library renders it is what this grammar reads."""
        function = {"name": "f", "arguments": {"x": "b"}}
        turns: list[Any] = [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
        ]
        try:
            prompt = self._library.render_ids(turns[:1], add_generation_prompt=True)
            whole = self._library.render_ids(turns)
        except Exception as error:  # a template that knows no such conversation has other calls
            _log.debug("%s: no call to read back: %r", self._name, error)
            return False
        pairs = zip(prompt, whole, strict=False)
        begin = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prompt))
        stop = next((i for i in range(begin, len(whole)) if whole[i] in self._stop_ids), len(whole))
        reader = TaggedReader(grammar, (), thinking=self.in_thinking(prompt))
        read = read_whole(reader, whole[begin:stop])
        calls = [(call.name, call.arguments) for call in read.tool_calls]
        return (read.content, calls, read.unreadable) == ("a", [("f", '{"x":"b"}')], ())

    def _read_by_library(self, block: Block, tools: dict[str, Tool]) -> list[ParsedCall]:
        """What the library finds in one block."""
        declared = [{"name": t.name, "parameters": t.parameters} for t in tools.values()]
        try:
            parsed = self._library.parse_response(
                [self.call_id or 0, *block.ids, self.call_end_id or 0],
                tools=declared or None,  # type: ignore[arg-type]  # flat tools, as it documents
            )
        except Exception as error:  # law L13: foreign parsers may raise, this one may not
            raise CallProblemError(f"it is not the format ({type(error).__name__})") from error
        if not parsed.tool_calls:
            raise CallProblemError("it is not the format")
        return [judge_library_call(call, tools) for call in parsed.tool_calls]


def judge_library_call(call: "ParsedToolCall", tools: dict[str, Tool]) -> ParsedCall:
    """A call that the library parsed, held to the rules of this package.

    Raises:
        CallProblemError: it is not well formed.
    """
    arguments = call.arguments
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    # The library calls two things an error that are none of form: both are the schema's business.
    if call.status not in ("ok", "unknown_tool", "invalid_json") or not isinstance(arguments, dict):
        problem = str(call.status).replace("_", " ")
        raise CallProblemError(f"it is not the format ({problem})", str(call.name or ""))
    if not call.name or not isinstance(call.name, str):
        raise CallProblemError("the tool's name is missing")
    return judge_call(call.name, arguments, tools)


class WholeReader:
    """Reads one completion with the library's parser, at its end. See `StreamReader`.

    Args:
        parse: the library's parser.
        tools: OpenAI function tools.
        stop_ids: end a completion.
        decode: ids to text, special tokens as literals.
    """

    def __init__(
        self,
        parse: "Callable[[list[int]], ParsedResponse]",
        tools: Sequence[dict[str, Any]],
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._parse = parse
        self._built = MessageBuilder(index_tools(tools), Spaces.KEPT, _described_example)
        self._stop_ids = stop_ids
        self._decode = decode
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `StreamReader.feed`."""
        self._ids += ids
        return []

    def finish(self) -> tuple[list[Delta], ParsedMessage]:
        """See `StreamReader.finish`."""
        stopped = bool(self._ids) and self._ids[-1] in self._stop_ids
        raw = self._decode(self._ids[:-1] if stopped else self._ids)
        try:
            self._read(self._parse(self._ids), stopped=stopped)
        except Exception as error:  # law L13: foreign parsers may raise, this one may not
            _log.warning("parse failed: %r", error)
            self._built.add_content(raw)
            self._built.complain("The message is not in the format that it should have")
        return self._built.finish(raw, stopped=stopped)

    def _read(self, read: "ParsedResponse", *, stopped: bool) -> None:
        reasoning, content = read.reasoning_content or "", read.content or ""
        self._built.add_thought(str(reasoning))
        self._built.end_thought()
        if read.reasoning_complete is False and stopped:
            self._built.complain("Thinking does not end")
        self._built.add_content(str(content))
        for call in read.tool_calls:
            try:
                self._built.add_call(judge_library_call(call, self._built.tools))
            except CallProblemError as problem:
                status = CallStatus.MALFORMED if stopped else CallStatus.TRUNCATED
                self._built.add_unreadable(status, problem, str(call.raw))


def _read_glm(block: Block, tools: dict[str, Tool]) -> list[ParsedCall]:
    return [read_tagged_call(block.lexemes, tools)]


def _read_hermes(block: Block, tools: dict[str, Tool]) -> list[ParsedCall]:
    return [read_json_call(block.text, tools)]


def _hermes_example(tool: Tool | None) -> str:
    return f"{_CALL}{json_example(tool)}{_CALL_END}"


def _described_example(tool: Tool | None) -> str:
    name = "" if tool is None else f" to {tool.name}"
    return f"a call{name} in the form that your instructions describe"
