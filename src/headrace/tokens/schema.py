"""JSON schemas of the kind tools use: whether they accept a value, and what is wrong if not.

Reads type, enum, const, anyOf, oneOf, required, properties, additionalProperties and items.
Arguments that a schema with properties does not declare are refused; other keywords are passed
over. Schemas come from clients, so parts of them that are no schema accept everything.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import msgspec

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}

_SHOWN_VALUE = 60


class Tool(msgspec.Struct, frozen=True):
    """A declared tool, ready to check calls against.

    Attributes:
        name: as declared.
        parameters: JSON schema of its arguments object.
    """

    name: str
    parameters: dict[str, Any]

    @property
    def properties(self) -> dict[str, Any]:
        """Schema of each declared parameter."""
        return _mapping(self.parameters.get("properties"))

    def expects_text(self, key: str) -> bool:
        """Whether the parameter's only type is a string, so that its text is never JSON."""
        return _mapping(self.properties.get(key)).get("type") in ("string", ["string"])

    def problems(self, arguments: dict[str, Any]) -> list[str]:
        """What the tool would not accept, one line each that names the parameter; [] if nothing."""
        properties = self.properties
        required = self.parameters.get("required")
        others = self.parameters.get("additionalProperties", not properties)
        found = [
            f"parameter {key!r} is missing"
            for key in (required if isinstance(required, list) else ())
            if isinstance(key, str) and key not in arguments
        ]
        for key, value in arguments.items():
            if key in properties:
                if not accepts(properties[key], value):
                    found.append(
                        f"parameter {key!r} must be {describe(properties[key])}, "
                        f"not {_kind(value)} {_shown(value)}"
                    )
            elif not accepts(others, value):
                found.append(f"there is no parameter {key!r}; {_nearest(key, list(properties))}")
        return found


def index_tools(tools: Sequence[dict[str, Any]]) -> dict[str, Tool]:
    """Declared tools by name; of two with one name the first."""
    index: dict[str, Tool] = {}
    for tool in tools:
        function = _mapping(_mapping(tool).get("function", tool))
        name = function.get("name")
        if isinstance(name, str) and name:
            index.setdefault(name, Tool(name, _mapping(function.get("parameters"))))
    return index


def unknown_tool(name: str, tools: dict[str, Tool]) -> str:
    """What to tell a model that calls a tool nobody declared."""
    return f"there is no tool {_shown(name)}; {_nearest(name, list(tools), 'tools are')}"


def accepts(schema: Any, value: Any) -> bool:
    """Whether a schema accepts a value."""
    if not isinstance(schema, dict):
        return schema is not False
    options = schema.get("enum")
    if isinstance(options, list) and value not in options:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and not any(accepts(branch, value) for branch in branches):
            return False
    types = _types(schema)
    if types and not any(_has_type(value, name) for name in types):
        return False
    if isinstance(value, dict):
        return _accepts_object(schema, value)
    if isinstance(value, list) and "items" in schema:
        return all(accepts(schema["items"], item) for item in value)
    return True


def describe(schema: Any) -> str:
    """A schema in a few words, for people and models: "integer", "one of ["a", "b"]"."""
    schema = _mapping(schema)
    options = schema.get("enum")
    if isinstance(options, list):
        return f"one of {_shown(options)}"
    if "const" in schema:
        return _shown(schema["const"])
    types = [name for name in _types(schema) if isinstance(name, str)]
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            types += [describe(branch) for branch in branches]
    return " or ".join(types) or "as its schema says"


def _accepts_object(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    properties = _mapping(schema.get("properties"))
    others = schema.get("additionalProperties", not properties)
    required = schema.get("required")
    return all(
        key in value for key in (required if isinstance(required, list) else ()) if _hashable(key)
    ) and all(accepts(properties.get(key, others), item) for key, item in value.items())


def _types(schema: dict[str, Any]) -> list[Any]:
    named = schema.get("type")
    return named if isinstance(named, list) else [named] if named else []


def _has_type(value: Any, name: Any) -> bool:
    if isinstance(value, bool) and name in ("boolean", "integer", "number", "string"):
        return name == "boolean"  # in Python True is an int, in JSON it is not
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, (object,)) if _hashable(name) else object)


def _hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _nearest(name: str, known: list[str], listed: str = "parameters are") -> str:
    near = difflib.get_close_matches(name[:_SHOWN_VALUE], known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{listed} {', '.join(map(repr, known))}" if known else "there are none"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _TYPES.items() if isinstance(value, types)), "value")


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 3] + "..."
