"""Tool calls as text: the strict reading of each call format, and what to tell a model about it.

A call is read whole or not at all. What would have to be guessed (a key given twice, text between
parameters, NaN) is a `CallProblemError` whose text a model can act on. Then the declared tools are
asked whether they accept the call.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.tokens.parsed import CallStatus, ParsedCall
from headrace.tokens.schema import Tool, describe, unknown_tool

DEEPEST_ARGUMENTS = 100
"""Arguments may nest this many objects and lists."""

_MOST_DIGITS = 4000
_SHOWN_PROBLEMS = 5
_SHOWN_PARAMETERS = 12
_SHOWN_TEXT = 40


class Lexeme(NamedTuple):
    """A run of ordinary text, or one tag of the format as its literal.

    Attributes:
        text: see above.
        is_tag: which of the two.
        at: position in the completion of a tag that is one id, else -1.
    """

    text: str
    is_tag: bool
    at: int = -1


class CallProblemError(Exception):
    """A call that cannot be read: what is wrong, and the tool it seems to be for."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


def judge_call(name: str, arguments: dict[str, Any], tools: dict[str, Tool]) -> ParsedCall:
    """A well-formed call, checked against the declared tools; without tools any name is right.

    Raises:
        CallProblemError: the arguments are not what JSON can say.
    """
    if too_deep(arguments):
        raise CallProblemError(f"arguments nest deeper than {DEEPEST_ARGUMENTS} levels", name)
    try:
        text = msgspec.json.encode(arguments).decode()
    except UnicodeEncodeError as error:
        raise CallProblemError("a text holds half of a surrogate pair", name) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CallProblemError(f"arguments are not JSON ({error})", name) from error
    tool = tools.get(name)
    if tools and tool is None:
        return ParsedCall(name, text, CallStatus.UNKNOWN_TOOL, unknown_tool(name, tools))
    problems = [] if tool is None else tool.problems(arguments)
    if not problems:
        return ParsedCall(name, text)
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    if len(problems) > _SHOWN_PROBLEMS:
        shown += f"; and {len(problems) - _SHOWN_PROBLEMS} more"
    return ParsedCall(name, text, CallStatus.INVALID_ARGUMENTS, shown)


def too_deep(value: Any) -> bool:
    """Whether a JSON value nests deeper than `DEEPEST_ARGUMENTS`."""
    level = [value]
    for _ in range(DEEPEST_ARGUMENTS + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def is_finite(value: Any) -> bool:
    """Whether no number in a JSON value, at most `DEEPEST_ARGUMENTS` deep, is NaN or infinite."""
    if isinstance(value, float):
        return value - value == 0.0
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return all(map(is_finite, value)) if isinstance(value, list) else True


# ---------------------------------------------------------------- JSON


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CallProblemError(f"key {_short(key)} stands twice in one object")
            seen.add(key)
    return made


def _no_constant(text: str) -> Any:
    raise CallProblemError(f"{text} is no JSON number; use a finite number, null or a string")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise CallProblemError(f"number {_short(text)} is too large")
    return number


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise CallProblemError(f"number {_short(text)} has more than {_MOST_DIGITS} digits")
    return int(text)


_JSON = json.JSONDecoder(
    object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
)


def read_json(text: str) -> Any:
    """One JSON value, read strictly: no key twice, no NaN, nothing after it.

    Raises:
        CallProblemError: it is not, with the place.
    """
    text = text.strip()
    try:
        value, end = _JSON.raw_decode(text)
    except json.JSONDecodeError as error:
        raise CallProblemError(
            f"not valid JSON: {error.msg} at character {error.pos}{_near(text, error.pos)}"
        ) from error
    except RecursionError as error:
        raise CallProblemError(f"JSON nests deeper than {DEEPEST_ARGUMENTS} levels") from error
    if text[end:].strip():
        raise CallProblemError(f"not valid JSON: text after its end{_near(text, end)}")
    return value


def value_of(text: str) -> Any:
    """A value whose type is not declared to be a string: JSON if it is JSON, else the text."""
    try:
        return read_json(text)
    except CallProblemError:
        return text


def read_json_call(text: str, tools: dict[str, Tool], key: str = "arguments") -> ParsedCall:
    """A call written as {"name": ..., KEY: {...}}.

    Args:
        key: "arguments" (Hermes, Qwen) or "parameters" (llama-3).

    Raises:
        CallProblemError: it is not one.
    """
    try:
        call = read_json(text)
    except CallProblemError as problem:
        raise CallProblemError(str(problem), _name_in(text)) from problem
    if not isinstance(call, dict):
        raise CallProblemError(f"a call is a JSON object with name and {key}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise CallProblemError('"name" must be the name of a tool')
    others = sorted(map(str, call.keys() - {"name", key, "id", "type"}))
    if others:
        raise CallProblemError(
            f"unexpected key {_short(others[0])}; parameters go inside {key!r}", name
        )
    arguments = call.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except CallProblemError as problem:
            raise CallProblemError(f'"{key}": {problem}', name) from problem
    if not isinstance(arguments, dict):
        raise CallProblemError(f'"{key}" must be an object of parameters', name)
    return judge_call(name, arguments, tools)


def json_example(tool: Tool | None, key: str = "arguments") -> str:
    """How a call is written as JSON."""
    arguments = ", ".join(f'"{name}": {kind}' for name, kind in _placeholders(tool))
    return f'{{"name": "{_tool_name(tool)}", "{key}": {{{arguments}}}}}'


_NAME_IN = re.compile(r'"name"\s{0,9}:\s{0,9}"([^"\\]{1,100})"')


def _name_in(text: str) -> str:
    found = _NAME_IN.search(text[:400])
    return found.group(1) if found else ""


# ---------------------------------------------------------------- GLM's tags


class TagNames(NamedTuple):
    """Tags inside a call of GLM's format."""

    key: str = "<arg_key>"
    key_end: str = "</arg_key>"
    value: str = "<arg_value>"
    value_end: str = "</arg_value>"


_TAGS = TagNames()


def read_tag_pairs(block: Sequence[Lexeme]) -> tuple[str, dict[str, str]]:
    """NAME (<arg_key> KEY </arg_key> <arg_value> TEXT </arg_value>)*, spaces between allowed.

    Returns:
        Name and the text of each parameter, as written.

    Raises:
        CallProblemError: the block is something else.
    """
    at, name = _text(block, 0)
    name = name.strip()
    if at < len(block) and block[at].text != _TAGS.key:
        raise CallProblemError(f"unexpected {block[at].text} after the tool's name", name)
    if not name:
        raise CallProblemError("the tool's name is missing")
    pairs: dict[str, str] = {}
    while at < len(block):
        at, key = _text(block, _expect(block, at, _TAGS.key, name, "between parameters"))
        key = key.strip()
        at = _expect(block, at, _TAGS.key_end, name, f"in the key {_short(key)}")
        if not key:
            raise CallProblemError("a parameter has no name", name)
        if key in pairs:
            raise CallProblemError(f"parameter {_short(key)} is given twice", name)
        at = _space(block, at, name, f"after the key {_short(key)}")
        at = _expect(block, at, _TAGS.value, name, f"after the key {_short(key)}")
        at, pairs[key] = _text(block, at)
        at = _expect(block, at, _TAGS.value_end, name, f"in the value of {_short(key)}")
        at = _space(block, at, name, f"after parameter {_short(key)}")
    return name, pairs


def read_tagged_call(block: Sequence[Lexeme], tools: dict[str, Tool]) -> ParsedCall:
    """A call of GLM's format, texts exactly as written.

    Raises:
        CallProblemError: it is not one.
    """
    name, pairs = read_tag_pairs(block)
    return judge_call(name, typed_pairs(name, pairs, tools), tools)


def typed_pairs(name: str, pairs: dict[str, str], tools: dict[str, Tool]) -> dict[str, Any]:
    """Texts of parameters as values of their declared types, where they are such values."""
    tool = tools.get(name)
    return {
        key: text if tool is not None and tool.expects_text(key) else value_of(text)
        for key, text in pairs.items()
    }


def _text(block: Sequence[Lexeme], at: int) -> tuple[int, str]:
    if at < len(block) and not block[at].is_tag:
        return at + 1, block[at].text
    return at, ""


def _expect(block: Sequence[Lexeme], at: int, tag: str, name: str, where: str) -> int:
    if at >= len(block):
        raise CallProblemError(f"{tag} is missing {where}", name)
    if not block[at].is_tag or block[at].text != tag:
        raise CallProblemError(f"{_short(block[at].text)} where {tag} is expected, {where}", name)
    return at + 1


def _space(block: Sequence[Lexeme], at: int, name: str, where: str) -> int:
    after, text = _text(block, at)
    if text.strip():
        raise CallProblemError(f"unexpected text {_short(text.strip())} {where}", name)
    return after


def tagged_example(tool: Tool | None) -> str:
    """How a call is written in GLM's format."""
    parameters = "".join(
        f"{_TAGS.key}{key}{_TAGS.key_end}{_TAGS.value}{kind}{_TAGS.value_end}"
        for key, kind in _placeholders(tool)
    )
    return f"<tool_call>{_tool_name(tool)}{parameters}</tool_call>"


# ---------------------------------------------------------------- XML with invoke and parameter

_INVOKE = re.compile(r'\s*<invoke name="([^"<>]{1,200})">')
_PARAMETER = re.compile(r'\s*<parameter name="([^"<>]{1,200})">')
_INVOKE_END = re.compile(r"\s*</invoke>")


def read_invocations(text: str, tools: dict[str, Tool]) -> list[ParsedCall]:
    """(<invoke name="N"> (<parameter name="K"> TEXT </parameter>)* </invoke>)+; text is no XML.

    Raises:
        CallProblemError: the text is something else; then none of the calls is made.
    """
    calls: list[ParsedCall] = []
    at = 0
    while True:
        opened = _INVOKE.match(text, at)
        if opened is None:
            if calls and not text[at:].strip():
                return calls
            raise CallProblemError(f'<invoke name="TOOL"> is expected{_near(text, at)}')
        name, at = opened.group(1), opened.end()
        arguments: dict[str, str] = {}
        while parameter := _PARAMETER.match(text, at):
            key, start = parameter.group(1), parameter.end()
            end = text.find("</parameter>", start)
            if end < 0:
                raise CallProblemError(f"</parameter> is missing after {_short(key)}", name)
            if key in arguments:
                raise CallProblemError(f"parameter {_short(key)} is given twice", name)
            arguments[key], at = text[start:end], end + len("</parameter>")
        closed = _INVOKE_END.match(text, at)
        if closed is None:
            raise CallProblemError(f"</invoke> is expected{_near(text, at)}", name)
        at = closed.end()
        calls.append(judge_call(name, typed_pairs(name, arguments, tools), tools))


def invocation_example(tool: Tool | None) -> str:
    """How a call is written as XML."""
    parameters = "".join(
        f'<parameter name="{key}">{kind}</parameter>' for key, kind in _placeholders(tool)
    )
    return (
        f'<function_calls><invoke name="{_tool_name(tool)}">{parameters}</invoke></function_calls>'
    )


def _tool_name(tool: Tool | None) -> str:
    return "TOOL" if tool is None else tool.name


def _placeholders(tool: Tool | None) -> list[tuple[str, str]]:
    """Parameters of a tool and what kind of value stands there; a made-up one without a tool."""
    if tool is None:
        return [("PARAMETER", "VALUE")]
    return [
        (key, describe(schema).upper())
        for key, schema in list(tool.properties.items())[:_SHOWN_PARAMETERS]
    ]


def _short(text: str) -> str:
    text = repr(text[: _SHOWN_TEXT + 1])
    return text if len(text) <= _SHOWN_TEXT + 3 else f"{text[:_SHOWN_TEXT]}...'"


def _near(text: str, at: int) -> str:
    rest = text[at : at + _SHOWN_TEXT]
    return f", at {rest!r}" if rest else ", at its end"
