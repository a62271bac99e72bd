"""Tokenised documents on disk, read through memory maps.

A store is a directory: ids.bin (uint32, all documents after each other), offsets.npy, bytes.npy,
weights.bin (float32, only if some document has weights of its own) and meta.json. It is written
under another name and renamed when complete, so that readers see whole stores only, whatever dies
in between and however many processes write the same one.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.errors import UserError

FORMAT = 1
"""Raised whenever the files' layout or meaning changes."""

_log = logging.getLogger(__name__)
_ABANDONED_AFTER_S = 24 * 3600.0
_ATTEMPTS = 3


class TokenDocument(NamedTuple):
    """A document ready for the store.

    Attributes:
        ids: token ids [T], 0 <= id < 2**31.
        text_bytes: UTF-8 bytes of the text they stand for, to score bits per byte.
        weights: loss weights float32 [T], or None for 1 on all of `ids` but the first
            `unweighted` ones.
        unweighted: leading tokens without loss (at least the first: nothing predicts it).
    """

    ids: np.ndarray
    text_bytes: int
    weights: np.ndarray | None = None
    unweighted: int = 1


class BrokenStoreError(Exception):
    """The directory is no complete store of this format."""


class TokenStore:
    """Read access to a store.

    Attributes:
        directory: where it is.
        lengths: int64 [N], tokens of each document.
        text_bytes: int64 [N], UTF-8 bytes of each document's text.
    """

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            BrokenStoreError: a file is missing or has the wrong size.
        """
        self.directory = directory
        try:
            meta = json.loads((directory / "meta.json").read_bytes())
            offsets = np.load(directory / "offsets.npy", allow_pickle=False)
            self.text_bytes: np.ndarray = np.load(directory / "bytes.npy", allow_pickle=False)
            self._unweighted = int(meta["unweighted"])
            total = int(offsets[-1])
            files = ["ids.bin", *(["weights.bin"] if meta["weights"] else [])]
            sizes = [(directory / name).stat().st_size for name in files]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise BrokenStoreError(f"{directory}: {error!r}") from error
        if meta.get("format") != FORMAT or any(size != 4 * total for size in sizes):
            raise BrokenStoreError(f"{directory}: format or size does not match its meta.json")
        self._offsets: np.ndarray = offsets
        self.lengths: np.ndarray = np.diff(offsets)
        self._ids = _map(directory / "ids.bin", np.uint32, total)
        self._weights = _map(directory / "weights.bin", np.float32, total) if files[1:] else None

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._offsets[-1])

    def ids(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids int32 of tokens start <= t < stop of one document."""
        first, last = self._range(document, start, stop)
        return self._ids[first:last].astype(np.int32)

    def weights(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Loss weights float32, likewise; 0 for a piece's first token, which nothing predicts."""
        first, last = self._range(document, start, stop)
        if self._weights is not None:
            weights = np.array(self._weights[first:last])
        else:
            weights = np.ones(last - first, np.float32)
            weights[: max(0, self._unweighted - start)] = 0
        weights[:1] = 0
        return weights

    def _range(self, document: int, start: int, stop: int | None) -> tuple[int, int]:
        length = int(self.lengths[document])
        if stop is None:
            stop = length
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start}..{stop} of a document of {length}")
        offset = int(self._offsets[document])
        return offset + start, offset + stop


def _map(path: Path, dtype: type, size: int) -> np.ndarray:
    if size == 0:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, mode="r", shape=(size,))


def write_store(directory: Path, documents: Iterable[TokenDocument]) -> None:
    """Write `documents` into the existing empty `directory` and flush them to disk.

    Either all of them have weights or none, and all have the same `unweighted`.
    """
    offsets, text_bytes = [0], []
    unweighted: int | None = None
    weighted = False
    with (directory / "ids.bin").open("wb") as ids, (directory / "weights.bin").open("wb") as out:
        for document in documents:
            array = np.asarray(document.ids)
            if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
                raise ValueError("token ids must be at least 0 and below 2**31")
            if unweighted is None:
                unweighted, weighted = document.unweighted, document.weights is not None
            if (unweighted, weighted) != (document.unweighted, document.weights is not None):
                raise ValueError("documents of one store must be weighted alike")
            ids.write(array.astype("<u4").tobytes())
            if document.weights is not None:
                if len(document.weights) != len(array):
                    raise ValueError(f"{len(document.weights)} weights for {len(array)} ids")
                out.write(np.asarray(document.weights).astype("<f4").tobytes())
            offsets.append(offsets[-1] + len(array))
            text_bytes.append(document.text_bytes)
        for file in (ids, out):
            file.flush()
            os.fsync(file.fileno())
    if not weighted:
        (directory / "weights.bin").unlink()
    np.save(directory / "offsets.npy", np.asarray(offsets, np.int64))
    np.save(directory / "bytes.npy", np.asarray(text_bytes, np.int64))
    meta = {"format": FORMAT, "weights": weighted, "unweighted": unweighted or 1}
    (directory / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")


def cached_store(
    cache: Path, key: str, documents: Callable[[], Iterable[TokenDocument]]
) -> TokenStore:
    """The store called `key` in `cache`, written from `documents` if it is not there.

    Several processes may ask at once: each that finds nothing writes a copy of its own, the first
    to finish wins, and all return equal stores. A broken store is written again.

    Raises:
        UserError: the cache directory cannot be written.
    """
    final = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            if not final.is_dir():
                _sweep(cache)
                own = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=cache))
                try:
                    write_store(own, documents())
                    _publish(own, final)
                finally:
                    shutil.rmtree(own, ignore_errors=True)
            try:
                return TokenStore(final)
            except BrokenStoreError as error:
                _log.warning("token cache: %s; writing it again", error)
                _discard(final)
    except OSError as error:
        raise UserError(
            f"token cache {str(cache)!r}: {error}; set cache_dir to a writable directory"
        ) from error
    raise UserError(f"token cache {str(final)!r}: broken again and again; check the disk")


def _publish(own: Path, final: Path) -> None:
    try:
        own.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        # Another process was faster; its store is equal to ours.


def _discard(store: Path) -> None:
    """Take a directory out of the way in one step, then delete it."""
    grave = Path(tempfile.mkdtemp(prefix=f".{store.name}.", dir=store.parent))
    try:
        store.rename(grave / "broken")
    except FileNotFoundError:
        pass  # another process discarded it
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Delete what killed processes left unfinished."""
    for entry in cache.glob(".*.*"):
        try:
            if entry.is_dir() and time.time() - entry.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(entry, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process was faster
