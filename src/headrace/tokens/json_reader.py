"""Reads completions of llama-3's format: a message is either text, or one call as bare JSON.

No tag announces a call, so a message that begins like JSON is held back to its end; then it is a
call, an attempt at one, or JSON that was meant as an answer.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from headrace.tokens.calls import CallProblemError, json_example, read_json, read_json_call
from headrace.tokens.lexer import Lexer, Tags
from headrace.tokens.message_builder import MessageBuilder, Spaces
from headrace.tokens.parsed import CallStatus, Delta, ParsedMessage
from headrace.tokens.schema import index_tools

PYTHON_TAG = "<|python_tag|>"
"""Some llama-3 models sample it before a call."""

_KEYS = ("parameters", "arguments")
_ATTEMPT = re.compile(r'\s{0,9}\{\s{0,9}"(?:name|type|function)"\s{0,9}:')


class JsonReader:
    """Reads one completion. See `StreamReader`.

    Args:
        tags: the format's special tokens; besides `PYTHON_TAG` none belongs into a message.
        tools: OpenAI function tools.
        stop_ids: end a completion.
        decode: ids to text, special tokens as literals.
    """

    def __init__(
        self,
        tags: Tags,
        tools: Sequence[dict[str, Any]],
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._lexer = Lexer(tags)
        self._built = MessageBuilder(
            index_tools(tools), Spaces.STRIPPED, lambda tool: json_example(tool, _KEYS[0])
        )
        self._stop_ids = stop_ids
        self._decode = decode
        self._ids: list[int] = []
        self._stop: list[int] = []
        self._held: list[str] = []
        """The whole message, if it begins as a call does."""
        self._begun = False
        self._tagged = False

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `StreamReader.feed`."""
        body = [*self._stop, *ids]
        self._stop = body[-1:] if body and body[-1] in self._stop_ids else []
        if self._stop:
            body.pop()
        self._ids += body
        for text, is_tag, _ in self._lexer.feed(body):
            self._take(text, is_tag)
        return self._built.drain()

    def finish(self) -> tuple[list[Delta], ParsedMessage]:
        """See `StreamReader.finish`."""
        for text, is_tag, _ in self._lexer.finish():
            self._take(text, is_tag)
        stopped = bool(self._stop)
        if self._held:
            self._read_held("".join(self._held), stopped=stopped)
        return self._built.finish(self._decode(self._ids), stopped=stopped)

    def _take(self, text: str, is_tag: bool) -> None:
        if not self._begun and is_tag and text == PYTHON_TAG:
            self._tagged = True
            return
        if not self._begun and not is_tag:
            text = text.lstrip()
            if not text:
                return
        if self._held or (not self._begun and (self._tagged or text.startswith("{"))):
            self._held.append(text)
        else:
            self._built.add_content(text)
        if is_tag:
            self._built.complain(f"{text} stands where it does not belong")
        self._begun = True

    def _read_held(self, text: str, *, stopped: bool) -> None:
        attempt = self._tagged or bool(_ATTEMPT.match(text))
        try:
            value = read_json(text)
        except CallProblemError:
            if not attempt:
                self._built.add_content(text)
                return
            value = None
        if value is not None and not self._is_call(value):
            self._built.add_content(text)
            return
        key = next((key for key in _KEYS if isinstance(value, dict) and key in value), _KEYS[0])
        try:
            self._built.add_call(read_json_call(text, self._built.tools, key))
        except CallProblemError as problem:
            status = CallStatus.MALFORMED if stopped else CallStatus.TRUNCATED
            self._built.add_unreadable(status, problem, text)

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return self._tagged
        return self._tagged or value["name"] in self._built.tools or any(k in value for k in _KEYS)
