"""A mode in which what is computed for a row does not depend on how many rows there are.

Compiled code works row by row anyway. In this mode nothing takes a shorter way for few rows, and
the reference computes in float64: its own rounding, which may depend on the other rows, is lost in
the rounding that follows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_row_independent: ContextVar[bool] = ContextVar("headrace_ops_row_independent", default=False)


@contextmanager
def row_independent() -> Iterator[None]:
    """Turns the mode on inside the with-statement, in this thread (or async task) only.

    Matrix products of plain torch are the caller's own business.
    """
    token = _row_independent.set(True)
    try:
        yield
    finally:
        _row_independent.reset(token)


def is_row_independent() -> bool:
    """Whether the mode is on."""
    return _row_independent.get()
