"""Write a directory so that a reader, or a crash at any moment, finds the old one or the new one.

The new contents are written beside the target and then exchanged with it in one system call. A
killed writer leaves a hidden sibling behind; the next writer of the same target removes it.
"""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replaced_directory(target: Path) -> Iterator[Path]:
    """Yield a fresh directory that becomes `target` when the block ends without an exception.

    Files already open in an old `target` stay readable to whoever holds them.

    Raises:
        OSError: the parent cannot be written, or `target` is something other than a directory.
    """
    # Symbolic links are followed here, so that the link stays and what it names is replaced.
    target = target.resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    draft = _new_sibling(target)
    try:
        yield draft
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            _exchange(draft, target)
    finally:
        # After an exchange this is the old contents, after a failure the unfinished new ones.
        shutil.rmtree(draft, ignore_errors=True)


def _exchange(draft: Path, target: Path) -> None:
    """Swap two directories of one file system."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(draft), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
    if rename is not None and rename(*arguments) == 0:
        return
    # A file system without exchange: the target is missing for an instant.
    old = _new_sibling(target)
    target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _new_sibling(target: Path) -> Path:
    sibling = target.parent / f"{_prefix(target)}{os.getpid()}-{secrets.token_hex(4)}"
    sibling.mkdir()
    return sibling


def _prefix(target: Path) -> str:
    return f".{target.name}.draft-"


def _remove_abandoned(target: Path) -> None:
    """Remove drafts of this target whose writer is no longer alive."""
    for path in target.parent.glob(f"{_prefix(target)}*"):
        pid = path.name.removeprefix(_prefix(target)).split("-")[0]
        if not pid.isdigit():
            continue
        # Any other error (another user's process) means that the writer lives.
        with suppress(PermissionError):
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
