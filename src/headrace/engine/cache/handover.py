"""Keys and values of a prompt on their way from the engine that computed it to the sampling one.

They cross in a file in shared memory, piece by piece, so that whoever takes them in can go on with
its running requests between two pieces. Here is what both sides and the one between them say to
each other, and where the files live; moving the bytes is `kv_transfer`'s business, so that whoever
only passes them on needs no torch.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.errors import UserError
from headrace.model.shared_folder import shared_folder


class Piece(msgspec.Struct, frozen=True):
    """Consecutive tokens of a handover: as many bytes as may hold up running requests at once.

    Attributes:
        first: position of the first token, at the beginning of a block.
        end: position behind the last one.
        offset: of the first byte in the file.
        nbytes: how many there are.
        checksum: of them, 64 bits.
    """

    first: int
    end: int
    offset: int
    nbytes: int
    checksum: int


class Handover(msgspec.Struct, frozen=True):
    """Keys and values of some tokens of a prompt, in a file.

    Attributes:
        path: of the file. It belongs to whoever asked for the handover, who removes it.
        version: of the weights that computed them.
        block_tokens: tokens of a block.
        layout: what a block is of, see `PagedCache.layout`.
        prompt: checksum of all token ids up to the last one handed over.
        pieces: in order, without gaps; at least one.
    """

    path: str
    version: int
    block_tokens: int
    layout: tuple[str, ...]
    prompt: int
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(min_length=1)]

    @property
    def first(self) -> int:
        """Position of the first token: those before it must be held already."""
        return self.pieces[0].first

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.pieces[-1].end

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes


class Prefilled(msgspec.Struct, frozen=True):
    """What became of a request that was only to be computed.

    Attributes:
        handover: its keys and values; None if the request ended early, or nothing could be written.
        reused_tokens: prompt tokens that were held before.
        queue_s: seconds from arrival to the first pass.
    """

    handover: Handover | None
    reused_tokens: int = 0
    queue_s: float = 0.0


class HandoverFiles:
    """Names of files in a folder of their own, which goes when they are closed.

    A killed process cannot close anything. So the folder is locked as long as its owner lives, and
    whoever makes one removes those without a living owner first.

    Args:
        root: where the folders lie; None is shared memory, or the disk without it.

    Raises:
        UserError: no folder can be made.
    """

    def __init__(self, root: Path | None = None) -> None:
        beside = shared_folder("handover-")
        if root is not None:
            beside = root / beside.name
        for old in beside.parent.glob(beside.name + "*"):
            _remove_abandoned(old)
        try:
            self.folder, self._lock = _locked_folder(beside)
        except OSError as error:
            raise UserError(
                f"handovers: no folder can be made in {beside.parent} ({error.strerror or error}); "
                "free memory there, or do without a second engine (engine.prefill_cores = 0)"
            ) from error
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """A path nobody has used; what is there after the block is removed."""
        path = self.folder / str(next(self._numbers))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder and all that is in it. Safe to repeat."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked_folder(beside: Path) -> tuple[Path, int]:
    """A new folder for this user alone, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=beside.name, dir=beside.parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            # Taken for an abandoned one before it was locked.
            os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder unless somebody holds its lock, or it is another user's."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
