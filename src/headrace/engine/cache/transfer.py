"""Blocks of a cache into a handover's file, and out of one into the blocks of another cache.

What comes in is put into the prefix tree, where a request finds it as if it had been computed here;
what is not there or not right is computed by that request. So nothing that goes wrong on the way is
more than a loss of time, and it is counted. Knows nothing of processes.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from headrace.engine.cache.blocks import BlockPool
from headrace.engine.cache.handover import Handover, Piece
from headrace.engine.cache.paged import PagedCache
from headrace.engine.cache.prefix import PrefixTree
from headrace.engine.config import EngineStats
from headrace.engine.sequence import Tokens
from headrace.engine.types import EngineError
from headrace.model.shared_weights import checksum

_PIECE_BYTES = 4 << 20
"""Taken in at once: one to three milliseconds."""


class Handovers:
    """One engine's side of handing over, whichever role it plays. For between two steps.

    Args:
        cache: whose blocks are read and filled.
        pool: of those blocks.
        tree: what they hold.
        lend: gives up to so many blocks that nobody needs, with a reference each.
        stats: counted into.
    """

    def __init__(
        self,
        cache: PagedCache,
        pool: BlockPool,
        tree: PrefixTree,
        lend: Callable[[int], list[int]],
        stats: EngineStats,
    ) -> None:
        self.cache = cache
        self.pool = pool
        self.tree = tree
        self.lend = lend
        self.stats = stats
        self._per_piece = max(1, _PIECE_BYTES * cache.blocks // max(1, cache.nbytes))

    def held(self, ids: Sequence[int]) -> int:
        """Leading tokens that a request with this prompt would not compute."""
        return self.tree.peek(_tokens(ids), len(ids) - 1)

    def export(self, ids: Sequence[int], first: int, file: Path) -> Handover | None:
        """Write what is held of `ids` from position `first` on.

        Args:
            ids: token ids, from the beginning of a prompt.
            first: tokens that the other side has; the block it lies in is written from its start.
            file: to be made.

        Returns:
            None if nothing behind `first` is held, or the file cannot be written; there is none
            then.
        """
        size = self.pool.block_tokens
        tokens = _tokens(ids)
        match = self.tree.match(tokens, len(tokens))
        held = match.blocks if match.partial is None else [*match.blocks, match.partial]
        skipped = first // size
        try:
            if match.tokens <= first:
                return None
            pieces = self._write(held[skipped:], skipped * size, match.tokens, file)
        except OSError:
            file.unlink(missing_ok=True)
            self.stats.handovers_failed += 1
            return None
        finally:
            self.pool.release(held)
        handover = Handover(
            str(file),
            self.tree.version,
            size,
            self.cache.layout,
            _prompt_checksum(tokens[: match.tokens]),
            tuple(pieces),
        )
        self.stats.handovers += 1
        self.stats.handover_bytes += handover.nbytes
        return handover

    def _write(self, blocks: list[int], first: int, end: int, file: Path) -> list[Piece]:
        size, pieces, offset = self.pool.block_tokens, [], 0
        # Not through a mapping: a full file system would end the process instead of raising.
        with file.open("xb") as opened:
            for at in range(0, len(blocks), self._per_piece):
                some = blocks[at : at + self._per_piece]
                memory, contents = self.cache.packed(len(some))
                self.cache.gather(some, contents)
                data = memory.numpy().data
                opened.write(data)
                begin = first + at * size
                until = min(end, begin + len(some) * size)
                pieces.append(Piece(begin, until, offset, len(data), checksum(data)))
                offset += len(data)
        return pieces

    def adopt(self, ids: Sequence[int], handover: Handover) -> int:
        """Take in a whole handover; see `Adoption`. Returns the leading tokens of `ids` held."""
        adoption = Adoption(self, ids, handover)
        while adoption.advance():
            pass
        return adoption.held


class Adoption:
    """A handover being taken in, piece by piece.

    Between two pieces anything may happen: what is in already counts as any held prefix does, and
    the rest is left out if it has no prefix to stand behind any more, or if the weights changed.

    Args:
        engine: who takes it in.
        ids: the prompt; the handover must be of a beginning of it.
        handover: to be taken in.
    """

    def __init__(self, engine: Handovers, ids: Sequence[int], handover: Handover) -> None:
        self._engine = engine
        self._ids = _tokens(ids)
        self._handover = handover
        self._pieces = list(reversed(handover.pieces))
        self._file = -1
        if not self._fits():
            engine.stats.handovers_stale += 1
            self.close()
            return
        try:
            self._file = os.open(handover.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fail()

    @property
    def held(self) -> int:
        """Leading tokens that a request with this prompt would not compute."""
        return self._engine.tree.peek(self._ids, len(self._ids) - 1)

    def _fits(self) -> bool:
        """Is it of these weights, of a cache like this one, and of this prompt?"""
        engine, handover = self._engine, self._handover
        return (
            handover.version == engine.tree.version
            and handover.layout == engine.cache.layout
            and handover.block_tokens == engine.pool.block_tokens
            and 0 < handover.end <= len(self._ids)
            and handover.prompt == _prompt_checksum(self._ids[: handover.end])
        )

    def _fail(self) -> None:
        self._engine.stats.handovers_failed += 1
        self.close()

    def close(self) -> None:
        """Take in no more. Safe to repeat."""
        self._pieces = []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def advance(self) -> bool:
        """Take in one more piece; whether there is another."""
        if not self._pieces:
            return False
        if self._handover.version != self._engine.tree.version:
            self._engine.stats.handovers_stale += 1
            self.close()
        elif not self._take(self._pieces.pop()):
            self.close()
        elif not self._pieces:
            self._engine.stats.handovers += 1
            self.close()
        return bool(self._pieces)

    def _take(self, piece: Piece) -> bool:
        """Put a piece into blocks and tree; False if what follows cannot be put behind it."""
        engine, size = self._engine, self._engine.pool.block_tokens
        match = engine.tree.match(self._ids, piece.end)
        blocks = match.blocks
        try:
            if match.partial is not None:
                engine.pool.release((match.partial,))
            missing = len(blocks) * size
            if match.tokens >= piece.end:
                return True
            if missing < piece.first:
                # What was before it was evicted.
                return False
            contents = self._read(piece)
            if contents is None:
                self._fail()
                return False
            skipped = (missing - piece.first) // size
            taken = engine.lend(-(-piece.end // size) - len(blocks))
            blocks += taken
            if taken:
                part = [content[:, skipped : skipped + len(taken)] for content in contents]
                engine.cache.scatter(taken, part)
                engine.stats.handover_bytes += sum(content.nbytes for content in part)
                end = min(piece.end, len(blocks) * size)
                engine.tree.insert(self._ids[:end], blocks)
            return len(blocks) * size >= piece.end
        finally:
            engine.pool.release(blocks)

    def _read(self, piece: Piece) -> list[Tensor] | None:
        """Its contents, [layers, n, ...] of each store; None if the file does not hold them.

        Read, not mapped: a file cut short would end the process.
        """
        blocks = -(-(piece.end - piece.first) // self._handover.block_tokens)
        memory, contents = self._engine.cache.packed(blocks)
        data = memory.numpy().data
        try:
            found = os.preadv(self._file, [data], piece.offset)
        except OSError:
            return None
        if found != len(data) or found != piece.nbytes or checksum(data) != piece.checksum:
            return None
        return contents


def _tokens(ids: Sequence[int]) -> Tokens:
    try:
        return np.asarray(ids, dtype=np.int32)
    except (OverflowError, ValueError, TypeError) as error:
        raise EngineError(
            EngineError.INVALID, f"prompt_ids holds what is no token id ({error})"
        ) from error


def _prompt_checksum(tokens: Tokens) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")
