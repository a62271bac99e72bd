"""Where weights lie that processes of one machine share, and how their paths are told apart.

Apart from `shared_weights`, because whoever only names or removes the folder needs no torch.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PUBLISHED_SUFFIX = ".weights"
"""Ending of a published version's directory."""
_SHARED_MEMORY = Path("/dev/shm")


def shared_folder(name: str) -> Path:
    """Where the versions of `name` go: in shared memory where the machine has it, else on disk."""
    root = _SHARED_MEMORY
    if not (root.is_dir() and os.access(root, os.W_OK | os.X_OK)):
        root = Path(tempfile.gettempdir())
    return root / f"headrace-{name}"


@contextmanager
def own_folder(name: str) -> Iterator[Path]:
    """`shared_folder`, emptied of what was left there, and removed after the block.

    When this process is killed inside the block, the folder goes too: memory that nobody can reach
    would otherwise be lost until the machine restarts.
    """
    folder = shared_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    with _removed_with_this_process(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _removed_with_this_process(folder: Path) -> Iterator[None]:
    """A shell outside this process's group waits for the end of a pipe that only this process
    holds; the kernel closes that however this process ends."""
    try:
        keeper = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$1"', "headrace-shared-folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
        )
    except OSError:  # no shell: the next run of this name removes what a killed one left
        yield
        return
    try:
        yield
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def is_published(path: str | Path) -> bool:
    """Whether a path is a published version's, by its name: it may be gone by now."""
    return Path(path).suffix == PUBLISHED_SUFFIX
