"""What a failed write into the run directory means to a person."""

import errno
from pathlib import Path

from headrace.errors import UserError


def full_disk(error: OSError, path: Path) -> UserError:
    """A one-line error for a write to `path` that failed, with the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{path}: no space left on the disk; free some, then continue with --resume"
        )
    return UserError(f"{path}: cannot be written ({error.strerror or error}); check permissions")
