"""Answers that have to have a form: JSON of a schema, a call of a tool. What each API says of it,
and the grammar that an engine follows for it.
"""

from collections.abc import Sequence
from typing import Any

from headrace.gateway.request import ClientRequest
from headrace.gateway.turn import Constraint, Turn, invalid, unsupported
from headrace.tokens.grammars import answer_grammar, writes_known_calls
from headrace.tokens.renderer import ChatRenderer

ANY_TOOL = ""
"""`Constraint.tool` for a call of whichever tool."""


# -- what clients say ---------------------------------------------------------------------------


def of_format(asked: Any, param: str) -> dict[str, Any] | None:
    """The JSON schema that OpenAI's `response_format` or `text.format` asks for; None for text.

    Raises:
        ApiError: 400.
    """
    kind = "text" if not asked else asked.get("type") if isinstance(asked, dict) else asked
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise unsupported(f"{param}.type", kind, "send 'text', 'json_object' or 'json_schema'")
    # Chat completions nest it, responses do not.
    inner = asked.get("json_schema", asked)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise invalid(f"{param}: a json_schema needs a schema, which is an object", param=param)
    return schema


def of_tool_choice(asked: Any, param: str = "tool_choice") -> str | None:
    """The tool that OpenAI's `tool_choice` forces a call of, `ANY_TOOL`, or None.

    Raises:
        ApiError: 400.
    """
    if asked in (None, "auto", "none"):
        return None
    if asked == "required":
        return ANY_TOOL
    if isinstance(asked, dict) and asked.get("type") == "function":
        function = asked.get("function", asked)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return name
        raise invalid(f"{param} is a function without a name", param=param)
    raise unsupported(param, asked, "send 'auto', 'none', 'required' or a function")


def constraint(schema: dict[str, Any] | None, tool: str | None, param: str) -> Constraint | None:
    """Both as one; None if neither is wanted. `param` is where the schema stands."""
    if schema is None and tool is None:
        return None
    return Constraint(schema=schema, tool=tool, param=param if tool is None else "tool_choice")


# -- whether it can be had ----------------------------------------------------------------------


def check(turn: Turn, renderer: ChatRenderer, *, followed: bool) -> None:
    """Refuse what would not be kept.

    Args:
        followed: whether the engine follows grammars.

    Raises:
        ApiError: 400.
    """
    asked = turn.constraint
    if asked is None:
        return
    param = asked.param
    if not followed:
        remedy = "this server does not constrain sampling; describe the form in a message instead"
        raise unsupported(param, _shown(asked), remedy)
    if asked.tool is not None:
        names = [_name(tool) for tool in turn.tools]
        if not names:
            raise invalid(
                f"{param} asks for a call, and there are no tools; send some", param=param
            )
        if asked.tool != ANY_TOOL and asked.tool not in names:
            raise invalid(
                f"{param} names {asked.tool!r}, which is none of the tools: {', '.join(names)}",
                param=param,
            )
    calls = asked.tool is not None or (turn.calls_allowed and bool(turn.tools))
    if calls and not writes_known_calls(renderer):
        remedy = f"the calls of renderer {renderer.id} have no grammar here; send no tools with it"
        if asked.tool is not None:
            remedy = f"the calls of renderer {renderer.id} have no grammar here; send 'auto'"
        raise unsupported(param, _shown(asked), remedy)


def grammar_of(request: ClientRequest, ids: Sequence[int]) -> tuple[str, int | None]:
    """The grammar of the answer to a prompt, and the id that it begins behind.

    Raises:
        ApiError: 400: thinking has no single token that ends it.
    """
    turn, renderer = request.turn, request.renderer
    asked = turn.constraint
    if asked is None:
        return "", None
    thinks = bool(renderer.close_thinking(ids, ()))
    if thinks and renderer.think_end_id is None:
        remedy = f"thinking of renderer {renderer.id} has no token that ends it; switch it off"
        raise unsupported(asked.param, _shown(asked), remedy)
    tools = turn.tools if turn.calls_allowed else []
    if asked.tool:
        tools = [tool for tool in tools if _name(tool) == asked.tool]
    grammar = answer_grammar(
        renderer,
        schema=asked.schema if asked.tool is None else None,
        tools=tools,
        several=not asked.tool,
        after_thinking=thinks,
    )
    return grammar, renderer.think_end_id if thinks else None


def _name(tool: dict[str, Any]) -> str:
    return tool.get("function", tool)["name"]


def _shown(asked: Constraint) -> str:
    if asked.tool is None:
        return "json_object" if asked.schema == {"type": "object"} else "json_schema"
    return asked.tool or "required"
