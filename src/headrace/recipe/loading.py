"""Reads recipe files, applies overrides, and says in one line what is wrong with one."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from headrace.errors import UserError
from headrace.recipe.recipe import Recipe
from headrace.recipe.stages import Stage, StageTable
from headrace.recipe.suggestions import suggest
from headrace.recipe.tables import CorpusTable, NamedModelTable, Table
from headrace.recipe.tasks import TaskTable

_NAMED_TABLES: dict[str, type[Table]] = {
    "data": CorpusTable,
    "models": NamedModelTable,
    "tasks": TaskTable,
}
"""Tables of tables, and what an entry is."""

AnyTable = TypeVar("AnyTable", bound=Table)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), seed: int | None = None) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: TOML file, or the name of one under recipes/ of a source checkout ("quickstart").
        overrides: "table.key=value" strings; a stage is addressed by its name:
            "stages.rl.updates=10". Values are TOML; what is no TOML value is taken as a string.
        seed: replaces the recipe's seed.

    Raises:
        UserError: missing file, TOML syntax, unknown key, bad value.
    """
    file = find_recipe(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid TOML: {error}") from error
    for override in overrides:
        apply_override(data, override)
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(data, str(file))


def find_recipe(path: str | Path) -> Path:
    """The recipe file `path` names.

    Raises:
        UserError: there is none.
    """
    given = Path(path)
    root = Path(__file__).resolve().parents[3] / "recipes"
    for candidate in (given, root / given.name, root / f"{given.name}.toml"):
        if candidate.is_file():
            return candidate
    known = sorted(p.stem for p in root.glob("*.toml"))
    raise UserError(f"recipe {given}: no such file{suggest(given.stem, known)}")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one value in raw recipe data. See `load_recipe`.

    Raises:
        UserError: not of the form table.key=value, or it runs through a value that is no table.
    """
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.strip().split(".")]
    if not separator or not all(parts):
        raise UserError(f'--set "{override}": write table.key=value, e.g. engine.max_running=32')
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            names = [str(stage.get("name")) for stage in node]
            if part not in names:
                raise UserError(f'--set "{override}": no stage "{part}"{suggest(part, names)}')
            node = node[names.index(part)]
            continue
        node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f'--set "{override}": {".".join(parts[: depth + 1])} is not a table')
    if isinstance(node, list):
        raise UserError(f'--set "{override}": name the stage\'s key, e.g. stages.rl.updates=10')
    node[parts[-1]] = value


def parse_recipe(data: dict[str, Any], source: str) -> Recipe:
    """Check raw recipe data.

    Raises:
        UserError: the first problem, with its place and remedy, on one line.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{source}: {_explain(first, data)}") from error


def _explain(problem: Any, data: dict[str, Any]) -> str:
    """One line for one pydantic problem."""
    location = list(problem["loc"])
    kinds = stage_kinds()
    # The discriminator's value appears in the location of a stage's problem; it is no key.
    path: list[str] = []
    table: type[Table] | None = Recipe
    node: Any = data
    choices: dict[str, type[Table]] = {}
    for part in location:
        if part in choices:
            table, choices = choices[str(part)], {}
            continue
        if isinstance(part, int) and isinstance(node, list) and part < len(node):
            node = node[part]
            path.append(str(node.get("name", part)) if isinstance(node, dict) else str(part))
            continue
        if path and path[0] == "stages" and part in kinds and len(path) == 2:
            table = kinds[part]
            continue
        path.append(str(part))
        node = node.get(part) if isinstance(node, dict) else None
        if table is None:
            continue
        entries = _NAMED_TABLES.get(path[0]) if len(path) == 2 else None
        found = table.model_fields.get(str(part)) if entries is None else None
        inner = tables_in(found.annotation) if found is not None else []
        chosen = len(inner) > 1 and path != ["stages"]
        choices = _by_kind(inner) if chosen and all("kind" in t.model_fields for t in inner) else {}
        if part is location[-1]:
            continue
        if entries is not None:
            table = entries
        elif inner:
            table = inner[0] if len(inner) == 1 else None
    where = ".".join(path) or "recipe"
    kind = problem["type"]
    if kind == "extra_forbidden":
        known = sorted(table.model_fields) if table is not None else []
        return f'unknown key "{where}"{suggest(path[-1], known)}'
    if kind == "missing":
        return f"{where} is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"{where}: kind must be one of {', '.join(choices or kinds)}"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    shown = "" if isinstance(value, dict | list | tuple) else f" (got {value!r})"
    return f"{where}: {message}{shown}"


def stage_kinds() -> dict[str, type[StageTable]]:
    """Stage tables by the `kind` that chooses them."""
    return _by_kind([table for table in tables_in(Stage) if issubclass(table, StageTable)])


def _by_kind(tables: list[type[AnyTable]]) -> dict[str, type[AnyTable]]:
    """Tables that a `kind` chooses from, by it."""
    return {get_args(table.model_fields["kind"].annotation)[0]: table for table in tables}


def tables_in(annotation: Any) -> list[type[Table]]:
    """Recipe tables an annotation mentions, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for argument in get_args(annotation) for table in tables_in(argument)]
