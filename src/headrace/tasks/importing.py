"""A task service of the user's own, from "package.module:Class" and a table of options.

Options are the class's keyword arguments. Whatever is wrong with the module, the class or an option
is one clear line.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import UserError
from headrace.sandbox.types import SandboxProvider
from headrace.tasks.types import TaskService

PROVIDER = "provider"
"""A parameter of this name gets the sandbox provider."""
_METHODS = ("instance", "train_seed", "evaluation_seed", "content_id", "rollout")


def import_task(
    target: str, options: Mapping[str, Any], provider: SandboxProvider | None
) -> TaskService:
    """The service that a class of the user's makes of some options.

    The current folder is looked in, too.

    Args:
        target: "package.module:Class", or a function instead of the class.
        options: keyword arguments; a parameter named `provider` gets the sandboxes besides.
        provider: where commands run; None gives a service that only has to make instances.

    Raises:
        UserError: it cannot be imported or made, or is no task service.
    """
    make = _find(target)
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f'implementation "{target}": cannot be called ({error})') from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != PROVIDER
    ]
    for key in options:
        if key not in known and not takes_any:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            remedy = (
                f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
            )
            raise UserError(f'option {key!r} of implementation "{target}" is unknown; {remedy}')
    for key in known:
        if key not in options and parameters[key].default is inspect.Parameter.empty:
            raise UserError(f'option {key!r} of implementation "{target}" is missing; give it')
    given = dict(options)
    if PROVIDER in parameters:
        given[PROVIDER] = provider
    try:
        service = make(**given)
    except UserError:
        raise
    except Exception as error:
        # The user's code, and the user is who can mend it.
        words = f"{type(error).__name__}: {error}"
        raise UserError(f'implementation "{target}": cannot be made: {words}') from error
    missing = [name for name in _METHODS if not callable(getattr(service, name, None))]
    if not isinstance(getattr(service, "name", None), str):
        missing.insert(0, "name")
    if missing:
        raise UserError(
            f'implementation "{target}": is no task service, it has no {", ".join(missing)}; see '
            "docs/task-services.md"
        )
    return service


def _find(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UserError(f'implementation "{target}": write package.module:Class')
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # where a command's own folder is not
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise UserError(f'implementation "{target}": cannot be imported: {words}') from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(f'implementation "{target}": module {module_name} has no class {attribute}')
    return found
