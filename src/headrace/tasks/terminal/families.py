"""Every family of terminal problems, in a fixed order that seeds refer to."""

import difflib
from collections.abc import Sequence

from headrace.errors import UserError
from headrace.tasks.terminal.answer_families import ANSWER_FAMILIES
from headrace.tasks.terminal.chain_families import CHAIN_FAMILIES
from headrace.tasks.terminal.problem import Family
from headrace.tasks.terminal.state_families import STATE_FAMILIES

FAMILIES: dict[str, Family] = {
    f.name: f for f in (*ANSWER_FAMILIES, *STATE_FAMILIES, *CHAIN_FAMILIES)
}


def select_families(names: Sequence[str]) -> tuple[Family, ...]:
    """The named families in registry order; none named means all.

    Raises:
        UserError: an unknown or repeated name.
    """
    for name in names:
        if name not in FAMILIES:
            close = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.4)
            remedy = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(FAMILIES)}"
            raise UserError(f"families: {name!r} is no terminal task family; {remedy}")
    if len(set(names)) != len(names):
        raise UserError(f"families: {list(names)} repeats a name; name each family once")
    return tuple(f for f in FAMILIES.values() if not names or f.name in names)
