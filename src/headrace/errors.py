"""Errors a user can cause and mend, and runs that wait for one.

`UserError` and `RunPaused` are the only exception types whose text is shown to a person as it is:
the CLI prints it on one line and exits with code 2 or 3. Everything else is a bug and keeps its
traceback.
"""


class UserError(Exception):
    """Bad input. The message names the field, the value and the remedy, on one line."""


class RunPaused(Exception):
    """A run stopped itself in good order and waits for a person. The message says why, where to
    look and how to go on."""
