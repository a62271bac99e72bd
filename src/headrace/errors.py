"""Errors a user can cause and mend.

`UserError` is the only exception type whose text is shown to a person as it is: the CLI prints it
on one line and exits with code 2. Everything else is a bug and keeps its traceback.
"""


class UserError(Exception):
    """Bad input. The message names the field, the value and the remedy, on one line."""
