"""Grammars of answers: one JSON value, calls of tools, or either, as a chat format writes them.

In llguidance's dialect of Lark, which engines follow token by token. Tokens that are no text are
written by number. Whether an engine can follow a grammar is not known here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokens.calls import TagNames
from headrace.tokens.chatml import TemplateRenderer
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.schema import Tool, index_tools

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DEFINITIONS = ("$defs", "definitions")
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""A blank after commas and colons or none: without a bound, a weak model goes on with blanks. No
\\u: half of a surrogate pair is no text, and all of Unicode but control characters stands as it is.
"""
_TEXT = r"/(.|\n)+/"


def answer_grammar(
    renderer: ChatRenderer,
    *,
    schema: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    several: bool = True,
    after_thinking: bool = False,
) -> str:
    """What an answer may spell.

    Args:
        renderer: of the checkpoint.
        schema: JSON schema of the text; None allows no text.
        tools: OpenAI function tools that may be called; none allows no calls.
        several: more than one call may be made.
        after_thinking: it follows the end of thinking, where formats leave some space.

    Raises:
        ValueError: how this format writes calls is not known here, or nothing is allowed.
    """
    lines: list[str] = []
    kinds = []
    if schema is not None:
        kinds.append("text")
        lines.append(f"text: {_json(schema, schema)}")
    if tools:
        kinds.append("calls")
        lines.append("calls: call+" if several else "calls: call")
        lines += _call_rules(renderer, list(index_tools(tools).values()))
    if not kinds:
        raise ValueError("a grammar of answers needs a schema or tools")
    lead = "BLANK? " if after_thinking else ""
    if after_thinking:
        lines.append(r"BLANK: /[ \n]{1,2}/")
    return "\n".join([f"start: {lead}({' | '.join(kinds)})", *lines]) + "\n"


def writes_known_calls(renderer: ChatRenderer) -> bool:
    """Whether `answer_grammar` knows how this format writes calls."""
    return _call_style(renderer) is not None


def _call_style(renderer: ChatRenderer) -> str | None:
    """ "tags" as GLM writes calls, "json" as Hermes and Qwen do, or None."""
    if isinstance(renderer, LibraryRenderer):
        return renderer.call_style
    if isinstance(renderer, CompactRenderer):
        return "tags"
    if isinstance(renderer, TemplateRenderer) and renderer.id == "chatml":
        return "json"
    return None


def _call_rules(renderer: ChatRenderer, tools: list[Tool]) -> list[str]:
    style = _call_style(renderer)
    if style is None:
        raise ValueError(f"renderer {renderer.id!r}: how it writes calls has no grammar here")
    opener, closer = _tag(renderer, _CALL), _tag(renderer, _CALL_END)
    names = [f"tool{i}" for i in range(len(tools))]
    lines = [f"call: {opener} NEWLINE? ({' | '.join(names)}) {closer} NEWLINE?", 'NEWLINE: "\\n"']
    for name, tool in zip(names, tools, strict=True):
        if style == "json":
            lines.append(f"{name}: {_json_call(tool)} NEWLINE?")
        else:
            lines += _tagged_call(renderer, name, tool)
    return lines


def _json_call(tool: Tool) -> str:
    """{"name": ..., "arguments": {...}}"""
    arguments: dict[str, Any] = {"type": "object", **tool.parameters}
    if tool.properties:
        # Others are refused when the call is read.
        arguments.setdefault("additionalProperties", False)
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return _json(call, tool.parameters)


def _tagged_call(renderer: ChatRenderer, rule: str, tool: Tool) -> list[str]:
    """NAME (<arg_key> KEY </arg_key> <arg_value> VALUE </arg_value>)*, keys in declared order."""
    tags = TagNames()
    key, key_end, value, value_end = (
        _tag(renderer, tag) for tag in (tags.key, tags.key_end, tags.value, tags.value_end)
    )
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else ()
    parts, lines = [], []
    for number, (name, schema) in enumerate(tool.properties.items()):
        parameter = f"{rule}_p{number}"
        parts.append(parameter if name in required else f"{parameter}?")
        lines.append(
            f"{parameter}: {key} {json.dumps(name)} {key_end} NEWLINE? "
            f"{value} {_value(tool, name, schema)} {value_end} NEWLINE?"
        )
    return [" ".join([f"{rule}: {json.dumps(tool.name)} NEWLINE?", *parts]), *lines]


def _value(tool: Tool, name: str, schema: Any) -> str:
    """A value between tags: a text as it is, anything else as JSON."""
    declared = schema if isinstance(schema, dict) else {}
    if tool.expects_text(name):
        options = declared.get("enum", [declared["const"]] if "const" in declared else None)
        if isinstance(options, list) and options:
            return f"({' | '.join(json.dumps(str(option)) for option in options)})"
        return f"({_TEXT})?"
    return _json(declared, tool.parameters) if declared else f"({_TEXT})?"


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """JSON of a schema, whose references are to the definitions of `root`."""
    lent = {name: root[name] for name in _DEFINITIONS if name in root}
    return f"%json {json.dumps({**lent, **schema, 'x-guidance': _JSON_OPTIONS})}"


def _tag(renderer: ChatRenderer, literal: str) -> str:
    token = renderer.tokenizer.special_ids.get(literal)
    return json.dumps(literal) if token is None else f"<[{token}]>"
