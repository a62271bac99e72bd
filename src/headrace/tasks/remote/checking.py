"""Reads what a task service elsewhere says, and believes nothing that cannot be.

Total functions from bytes: the result is either of the right type, within bounds and an answer to
what was asked, or a `Misreport` whose text names the field and its value.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from headrace.tasks.results import problem_with, problem_with_rewards, shown
from headrace.tasks.serving.wire import (
    DemonstrationsAnswer,
    Description,
    InstancesAnswer,
    NamedInstance,
    RolloutState,
    SeedsAnswer,
)
from headrace.tasks.types import Demonstration

MOST_BYTES = 1 << 20
"""Size of any answer but demonstrations."""
MOST_DEMONSTRATION_BYTES = 256 << 20
_LONGEST_WORD = 200
_PATH = re.compile(r" - at `(\$.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

Said = TypeVar("Said")


class Misreport(Exception):
    """A service said something that cannot be; the text names the field and its value."""


def read(data: bytes, kind: type[Said], what: str) -> Said:
    """An answer as its type.

    Args:
        data: the body.
        kind: what it has to be.
        what: the answer's name in messages.

    Raises:
        Misreport: it is not that.
    """
    return _convert(_parse(data, what), kind, what)


def read_description(data: bytes) -> Description:
    """The answer to GET /v1/service. Its version and name are the caller's to compare."""
    found = read(data, Description, "service")
    if not 0 < len(found.name) <= _LONGEST_WORD:
        raise Misreport(f"service.name is {shown(found.name)}; a name is expected")
    return found


def read_seeds(data: bytes, count: int) -> list[int]:
    """As many seeds as were asked for."""
    found = read(data, SeedsAnswer, "seeds").seeds
    if len(found) != count:
        raise Misreport(f"seeds has {len(found)} entries, {count} were asked for")
    return found


def read_instances(data: bytes, task: str, seeds: Sequence[int]) -> list[NamedInstance]:
    """The instances of these seeds, of this task."""
    found = read(data, InstancesAnswer, "instances").instances
    if len(found) != len(seeds):
        raise Misreport(f"instances has {len(found)} entries, {len(seeds)} were asked for")
    for position, (named, seed) in enumerate(zip(found, seeds, strict=True)):
        instance, place = named.instance, f"instances[{position}]"
        if instance.task != task:
            raise Misreport(
                f"{place}.instance.task is {shown(instance.task)}; {task!r} was asked for"
            )
        if instance.seed != seed:
            raise Misreport(
                f"{place}.instance.seed is {shown(instance.seed)}; {seed} was asked for"
            )
        for field in ("family", "level", "min_turns"):
            value = getattr(instance, field)
            if isinstance(value, str):
                wrong = len(value) > _LONGEST_WORD
            else:
                wrong = not 0 <= value < 1 << 31
            if wrong:
                raise Misreport(f"{place}.instance.{field} is {shown(value)}, out of range")
        try:
            msgspec.json.encode(named)
        except ValueError as error:
            raise Misreport(f"{place} is {shown(named)}, which is no text ({error})") from error
    return found


def read_state(data: bytes, rollout_id: str, content_id: str | None) -> RolloutState:
    """How the rollout `rollout_id` is doing; a result in it can be believed.

    Args:
        data: the body.
        rollout_id: the one asked about.
        content_id: what its instance asks, where that is known.
    """
    raw = _parse(data, "rollout")
    result = raw.get("result") if isinstance(raw, dict) else None
    if isinstance(result, dict) and "rewards" in result:
        # Here, because a type does not say which of several numbers is wrong.
        problem = problem_with_rewards(result["rewards"])
        if problem is not None:
            raise Misreport(f"result.{problem}")
    state = _convert(raw, RolloutState, "rollout")
    if state.id != rollout_id:
        raise Misreport(f"rollout.id is {shown(state.id)}; {rollout_id!r} was asked for")
    if (state.status == "done") != (state.result is not None):
        raise Misreport(f'rollout.result is {shown(state.result)} with status "{state.status}"')
    if state.result is not None and (problem := problem_with(state.result)) is not None:
        raise Misreport(f"result.{problem}")
    if content_id is not None and state.content_id not in ("", content_id):
        raise Misreport(
            f"rollout.content_id is {shown(state.content_id)}, but the instance of its seed was "
            f"{shown(content_id)} before"
        )
    return state


def read_demonstrations(data: bytes, count: int) -> list[Demonstration]:
    """As many demonstrations as were asked for."""
    found = read(data, DemonstrationsAnswer, "demonstrations").demonstrations
    if len(found) != count:
        raise Misreport(f"demonstrations has {len(found)} entries, {count} were asked for")
    for position, shown_one in enumerate(found):
        place = f"demonstrations[{position}]"
        if len(shown_one.train) != len(shown_one.messages):
            raise Misreport(
                f"{place}.train has {len(shown_one.train)} entries for "
                f"{len(shown_one.messages)} messages"
            )
        if not 0.0 <= shown_one.reward <= 1.0:
            raise Misreport(f"{place}.reward is {shown(shown_one.reward)}, which is not in [0, 1]")
    return found


def _parse(data: bytes, what: str) -> Any:
    """Any JSON. Python's reader takes NaN and Infinity, which then are found at their field."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        head = data[:40].decode("utf-8", "replace")
        raise Misreport(f"{what} is no JSON ({error}): {shown(head)}") from error


def _convert(raw: Any, kind: type[Said], what: str) -> Said:
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        text = str(error)
        found = _PATH.search(text)
        path = found.group(1) if found else "$"
        reason = text[: found.start()] if found else text
        place = what + path.removeprefix("$")
        raise Misreport(f"{place} is {shown(_at(raw, path))}: {reason}") from error


def _at(raw: Any, path: str) -> Any:
    """The value at a path of msgspec's, as far as the path leads."""
    for name, position in _STEP.findall(path):
        try:
            raw = raw[name] if name else raw[int(position)]
        except (KeyError, IndexError, TypeError):
            break
    return raw
