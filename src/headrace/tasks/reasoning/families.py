"""Which families of reasoning-gym a recipe may name, and what is wrong with those it may not.

Reads the library's registry; nothing here generates a problem or runs a scorer.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import UserError

WEIGHT = "weight"
_OURS = ("seed", "size")

_UNUSABLE = {
    "composite": "name the families it would hold beside each other",
    "game_of_life_halting": "its scorer gives full marks to any answer",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family with its difficulty and how often it is drawn, relative to the others."""

    name: str
    settings: Mapping[str, Any]
    weight: float = 1.0


def require_library() -> None:
    """Import reasoning-gym, which takes seconds once.

    Raises:
        UserError: it is not installed.
    """
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise UserError(
            "task 'reasoning' needs the package reasoning-gym; install it with "
            f'pip install "headrace[reasoning]" ({error})'
        ) from error


def select_families(wanted: Mapping[str, Mapping[str, Any]]) -> tuple[Family, ...]:
    """The named families with their settings, in order.

    Raises:
        UserError: reasoning-gym is missing, or an unknown family or setting, or values that the
            family refuses; the nearest known names stand in the message.
    """
    require_library()
    if not wanted:
        raise UserError("families: none is named; name one, e.g. families = { chain_sum = {} }")
    return tuple(_family(name, settings) for name, settings in wanted.items())


def prompt_text(name: str) -> str:
    """A system prompt of the library by its name there.

    Raises:
        UserError: reasoning-gym is missing, or it has no such prompt.
    """
    require_library()
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name not in SYSTEM_PROMPTS:
        near = _near(name, SYSTEM_PROMPTS)
        raise UserError(f"prompt: {name!r} is no prompt of reasoning-gym{near}")
    return SYSTEM_PROMPTS[name].strip()


def _family(name: str, given: Mapping[str, Any]) -> Family:
    from reasoning_gym.factory import DATASETS

    from headrace.tasks.reasoning.worker import dataset

    if name not in DATASETS:
        known = [n for n in DATASETS if n not in _UNUSABLE]
        raise UserError(f"families: {name!r} is no family of reasoning-gym{_near(name, known)}")
    if name in _UNUSABLE:
        raise UserError(f"families: {name!r} cannot be used; {_UNUSABLE[name]}")
    weight = given.get(WEIGHT, 1.0)
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise UserError(f"families.{name}.{WEIGHT} is {weight!r}; use a number above 0")
    settings = {key: value for key, value in given.items() if key != WEIGHT}
    known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in _OURS]
    for key in settings:
        if key in _OURS:
            raise UserError(f"families.{name}.{key}: the task sets it itself; leave it out")
        if key not in known:
            near = _near(key, [*known, WEIGHT])
            raise UserError(f"families.{name}.{key} is no setting of this family{near}")
    try:
        dataset(name, settings, 0)
    except Exception as error:
        # Families check themselves with assertions of their own wording.
        shown = ", ".join(f"{key} = {value!r}" for key, value in settings.items()) or "no settings"
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"families.{name}: the family refuses {shown}: {message}; see its configuration in "
            "reasoning-gym"
        ) from error
    return Family(name, settings, float(weight))


def _near(word: str, known: Iterable[str]) -> str:
    """A remedy: the closest known words, or all of them."""
    candidates = list(known)
    close = difflib.get_close_matches(word, candidates, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; known: {', '.join(candidates)}"
