"""What to propose for a name that is not known."""

import difflib
from collections.abc import Sequence


def suggest(name: str, known: Sequence[str]) -> str:
    """'; did you mean "x"?' for the nearest known name, else the list of known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; known: {', '.join(known)}" if known else ""
