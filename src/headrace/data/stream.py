"""An endless, shuffled, resumable stream of packed rows from a mixture of sources.

Every source is read in epochs. An epoch is a permutation of the source's documents, cut into
windows of about `WINDOW_ROWS` rows; a window is packed by best fit and its rows shuffled. All of it
is a function of (seed, source, epoch, window), so the position of the stream is a few numbers,
whatever has been read. Sources take turns so that each one's share of tokens follows its weight.

The batches do not depend on the number of ranks: each rank computes the whole plan and reads the
tokens of its own rows only.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.packing import Overlong, Piece, pack_lengths
from headrace.data.sources import Framing, SourceSpec, open_source
from headrace.data.token_store import TokenStore
from headrace.errors import UserError
from headrace.tokens.tokenizer import TextTokenizer

Row = list[tuple[np.ndarray, np.ndarray]]
"""Documents of one row: (ids int32 [T], loss weights float32 [T]), each seeing itself only."""

WINDOW_ROWS = 64
"""Rows packed together: enough for best fit to leave little space, few enough to repack soon."""


@dataclass(frozen=True)
class StreamSpec:
    """What a stream is made of.

    Attributes:
        sources: the mixture.
        framing: special tokens around every document.
        overlong: what becomes of documents longer than a row, see `packing.pack_lengths`.
    """

    sources: tuple[SourceSpec, ...] = (SourceSpec(),)
    framing: Framing = field(default_factory=Framing)
    overlong: Overlong = "cut"

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("stream sources is empty; name at least one")


class TokenStream:
    """Batches of rows. Iterating never ends; `state` and `restore` mark and find the place."""

    def __init__(
        self,
        spec: StreamSpec,
        tokenizer: TextTokenizer,
        row_tokens: int,
        batch_rows: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        cache_dir: Path | None = None,
    ) -> None:
        """
        Args:
            spec: the mixture; its sources are tokenised now if they are not cached.
            tokenizer: of the model that reads the rows.
            row_tokens: most tokens of a row.
            batch_rows: rows of a global batch.
            seed: another seed gives another order.
            rank: which share of each batch to yield.
            world: number of shares; they differ by one row at most.
            cache_dir: of token stores, see `sources.open_source`.

        Raises:
            UserError: sizes out of range, or a source that cannot be read.
        """
        if row_tokens < 2:
            raise UserError(f"stream row_tokens = {row_tokens}: must be at least 2")
        if not 1 <= world <= batch_rows:
            raise UserError(f"stream batch_rows = {batch_rows}: must be at least the {world} ranks")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self._row_tokens = row_tokens
        self._batch_rows = batch_rows
        self._rank, self._world = rank, world
        self._weights = [source.weight for source in spec.sources]
        self._batches = 0
        self._readers = [
            _SourceReader(
                open_source(source, tokenizer, spec.framing, cache_dir),
                _mix(seed, i),
                row_tokens,
                spec.overlong,
            )
            for i, source in enumerate(spec.sources)
        ]
        keys = [reader.store.directory.name for reader in self._readers]
        identity = (keys, self._weights, row_tokens, batch_rows, seed, spec.overlong, WINDOW_ROWS)
        self._identity = hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()

    # ------------------------------------------------------------------ reading

    def __iter__(self) -> Iterator[list[Row]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[Row]:
        """This rank's rows of the next global batch."""
        plan = [self._next_row() for _ in range(self._batch_rows)]
        self._batches += 1
        first = self._rank * self._batch_rows // self._world
        last = (self._rank + 1) * self._batch_rows // self._world
        return [reader.load(pieces) for reader, pieces in plan[first:last]]

    def _next_row(self) -> tuple["_SourceReader", list[Piece]]:
        # The source that is furthest behind its share; the first of equals.
        shares = [
            reader.tokens / weight
            for reader, weight in zip(self._readers, self._weights, strict=True)
        ]
        reader = self._readers[shares.index(min(shares))]
        return reader, reader.next_row()

    # ------------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """The position as a JSON object of a size that does not grow. Equal on all ranks."""
        return {
            "stream": self._identity,
            "batches": self._batches,
            "sources": [reader.position() for reader in self._readers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks.

        Raises:
            UserError: it was taken from a stream with other data, sizes or seed.
        """
        if state.get("stream") != self._identity:
            raise UserError(
                "stream state: was saved with other data, tokenizer, sizes or seed; "
                "restore these or start the stage anew"
            )
        for reader, position in zip(self._readers, state["sources"], strict=True):
            reader.seek(position)
        self._batches = int(state["batches"])

    @property
    def stores(self) -> list[TokenStore]:
        """The tokenised sources, in the order of the spec."""
        return [reader.store for reader in self._readers]

    @property
    def tokens(self) -> list[int]:
        """Tokens read of each source so far, on all ranks together."""
        return [reader.tokens for reader in self._readers]

    @property
    def epochs(self) -> list[float]:
        """How often each source has been read so far."""
        return [reader.tokens / reader.store.total_tokens for reader in self._readers]


class _SourceReader:
    """Rows of one source, epoch after epoch."""

    def __init__(self, store: TokenStore, seed: int, row_tokens: int, overlong: Overlong) -> None:
        self.store = store
        self.tokens = 0
        self._seed = seed
        self._row_tokens = row_tokens
        self._overlong: Overlong = overlong
        self._epoch = self._window = self._row = 0
        self._order, self._windows = self._shuffled(0)
        self._rows = self._packed(0)

    def next_row(self) -> list[Piece]:
        """Pieces of the next row, of at least one token."""
        while self._row >= len(self._rows):  # a loop: windows of empty documents have no rows
            self._row = 0
            self._window += 1
            if self._window >= len(self._windows) - 1:
                self._window = 0
                self._epoch += 1
                self._order, self._windows = self._shuffled(self._epoch)
            self._rows = self._packed(self._window)
        pieces = self._rows[self._row]
        self._row += 1
        self.tokens += sum(piece.stop - piece.start for piece in pieces)
        return pieces

    def load(self, pieces: list[Piece]) -> Row:
        return [(self.store.ids(*piece), self.store.weights(*piece)) for piece in pieces]

    def position(self) -> dict[str, int]:
        return {
            "epoch": self._epoch,
            "window": self._window,
            "row": self._row,
            "tokens": self.tokens,
        }

    def seek(self, position: Mapping[str, int]) -> None:
        self._epoch, self._window, self._row, self.tokens = (
            int(position[name]) for name in ("epoch", "window", "row", "tokens")
        )
        self._order, self._windows = self._shuffled(self._epoch)
        self._rows = self._packed(self._window)

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        """Documents in the epoch's order, and the bounds of its windows in that order."""
        order = _permutation(len(self.store), _mix(self._seed, epoch))
        ends = np.cumsum(self.store.lengths[order])
        size = WINDOW_ROWS * self._row_tokens
        marks = np.arange(size, int(ends[-1]), size)
        # A document belongs to the window in which it begins.
        bounds = np.unique(np.searchsorted(ends, marks) + 1)
        return order, [0, *(int(b) for b in bounds if b < len(order)), len(order)]

    def _packed(self, window: int) -> list[list[Piece]]:
        documents = self._order[self._windows[window] : self._windows[window + 1]]
        lengths = [int(length) for length in self.store.lengths[documents]]
        rows = pack_lengths(lengths, self._row_tokens, self._overlong)
        # Best fit puts long documents first; training should not see them in that order.
        shuffled = _permutation(len(rows), _mix(_mix(self._seed, self._epoch), window + 1))
        return [
            [Piece(int(documents[piece.document]), piece.start, piece.stop) for piece in rows[i]]
            for i in shuffled
        ]


# SplitMix64. An own generator because the streams of numpy's may change with its version, and a
# checkpoint has to find its place again after an upgrade.
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _mix(seed: int, number: int) -> int:
    """A 64-bit seed derived from another one."""
    value = np.array([(seed + (number + 1) * _GOLDEN) & _MASK], np.uint64)
    return int(_finalise(value)[0])


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permutation(size: int, seed: int) -> np.ndarray:
    """A permutation of range(size), int64, the same on every machine."""
    counter = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    keys = _finalise(counter + np.uint64(seed & _MASK))
    return np.argsort(keys, kind="stable")
