"""Task services by name, as recipes refer to them.

Turns a name and a plain options table into a running service, and bad input into one clear line.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from headrace.errors import UserError
from headrace.sandbox.types import SandboxProvider
from headrace.tasks.importing import import_task
from headrace.tasks.reasoning.service import ReasoningOptions, ReasoningTasks
from headrace.tasks.terminal.service import TerminalOptions, TerminalTasks
from headrace.tasks.types import TaskService

_SERVICES: dict[str, tuple[type[BaseModel], Callable[[SandboxProvider | None, Any], TaskService]]]
_SERVICES = {
    TerminalTasks.name: (TerminalOptions, TerminalTasks),
    ReasoningTasks.name: (ReasoningOptions, ReasoningTasks),
}


def task_names() -> tuple[str, ...]:
    """Every name `create_task` accepts."""
    return tuple(_SERVICES)


def create_task(
    name: str, options: Mapping[str, Any], provider: SandboxProvider | None
) -> TaskService:
    """The task service `name`.

    Args:
        name: one of `task_names()`.
        options: the service's option table, e.g. `TerminalOptions` fields for "terminal".
        provider: where commands run; None gives a service that can only make instances.

    Raises:
        UserError: unknown name, unknown option, or an option value out of range.
    """
    parsed = _parse(name, options)
    return _SERVICES[name][1](provider, parsed)


def resolved_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as the service `name` reads them, as JSON: what another process that serves
    it says of itself. Those of a task headrace does not have stay as they are.

    Raises:
        UserError: as `create_task`.
    """
    if name not in _SERVICES:
        return dict(options)
    values = _parse(name, options).model_dump(mode="json")
    return {key: values[key] for key in options}


def _parse(name: str, options: Mapping[str, Any]) -> BaseModel:
    if name not in _SERVICES:
        raise UserError(f"task {name!r} is unknown{_nearest(name, _SERVICES)}")
    options_type = _SERVICES[name][0]
    known = options_type.model_fields
    for key in options:
        if key not in known:
            raise UserError(f"option {key!r} of task {name!r} is unknown{_nearest(key, known)}")
    try:
        return options_type.model_validate(dict(options))
    except ValidationError as error:
        raise UserError(_explain(name, error)) from error


def make_task(
    name: str,
    options: Mapping[str, Any],
    provider: SandboxProvider | None,
    implementation: str | None = None,
) -> TaskService:
    """The task service of a recipe's table `[tasks.NAME]` in this process.

    Args:
        name: of the table.
        options: see `create_task` and `import_task`.
        provider: see there.
        implementation: "package.module:Class" of the user's; None for a service by its name.

    Raises:
        UserError: see there; or the implementation makes another task than the table's.
    """
    if implementation is None:
        return create_task(name, options, provider)
    service = import_task(implementation, options, provider)
    if service.name != name:
        raise UserError(
            f'implementation "{implementation}" is task {service.name!r}; name its table '
            f"[tasks.{service.name}] instead of [tasks.{name}]"
        )
    return service


def _nearest(word: str, known: Iterable[str]) -> str:
    """A remedy: the closest known word, or all of them."""
    candidates = list(known)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(candidates)}"


def _explain(name: str, error: ValidationError) -> str:
    """The first problem of a validation error on one line."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "options"
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    value = str(first["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"option {field!r} of task {name!r} is {shown}: {message}"
