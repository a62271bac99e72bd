"""Where weights lie that processes of one machine share, and how their paths are told apart.

Apart from `shared_weights`, because whoever only names or removes the folder needs no torch.
"""

import os
import shutil
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
    """`shared_folder`, emptied of what a killed process left there, and removed after the block."""
    folder = shared_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_published(path: str | Path) -> bool:
    """Whether a path is a published version's, by its name: it may be gone by now."""
    return Path(path).suffix == PUBLISHED_SUFFIX
