"""What the engine asks of the store behind its decoder: blocks of tokens, shared between sequences.

A block holds `block_tokens` consecutive tokens of one sequence for every layer; a table says which
blocks a sequence's positions lie in. Before a forward pass the core says which positions of which
sequences it covers (`begin`); during the pass the store keeps what each layer brings and attends
over everything the tables reach. What a position holds (grouped keys and values, or a latent) is
the subclass's own business.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.model.attention import LatentQuery

_FEW_ROWS = 8
"""Rows of a sequence up to which it counts as decoding."""
_ALIGNMENT = 64


class PagedBatch(NamedTuple):
    """The tokens of one pass: S rows, sequence after sequence.

    Attributes:
        starts: position of each sequence's first row.
        counts: its rows, >= 1; they sum to S.
        tables: int32 [n, B], the blocks of each sequence, -1 behind the last one.
        positions: int64 [S], of every row.
        slots: int64 [S], where its row goes: block * block_tokens + row in the block.
    """

    starts: list[int]
    counts: list[int]
    tables: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(
        cls, starts: list[int], counts: list[int], tables: Tensor, block_tokens: int
    ) -> "PagedBatch":
        """Work out positions and slots. The arguments are those of the attributes."""
        first = torch.tensor(starts)
        if max(counts) == 1:
            positions, sequence = first, torch.arange(len(starts))
        else:
            rows = torch.tensor(counts)
            sequence = torch.repeat_interleave(torch.arange(len(starts)), rows)
            before = rows.cumsum(0) - rows
            positions = torch.arange(len(sequence)) + (first - before)[sequence]
        blocks = tables[sequence, positions // block_tokens].long()
        return cls(
            starts, counts, tables, positions, blocks * block_tokens + positions % block_tokens
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, this pass included."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @property
    def short(self) -> int:
        """How many of the leading sequences bring few rows: one, or one and some drafts."""
        return next((i for i, n in enumerate(self.counts) if n > _FEW_ROWS), len(self.counts))


class PagedCache(ABC):
    """Blocks of `block_tokens` token rows.

    Args:
        blocks: number of blocks (N).
        block_tokens: tokens of a block (P).
        stores: everything held, each [layers, N, ...] with a dimension of P somewhere behind.
        token_dim: which dimension that is, of one block of one layer.
    """

    def __init__(
        self, blocks: int, block_tokens: int, stores: Sequence[Tensor], token_dim: int
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._stores = tuple(stores)
        self._token_dim = token_dim

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(store.nbytes for store in self._stores)

    @property
    def layout(self) -> tuple[str, ...]:
        """What a block is of, store by store: "dtype [layers, ...]". Caches of one layout can take
        over each other's blocks."""
        return tuple(
            f"{str(store.dtype).removeprefix('torch.')} {[len(store), *store.shape[2:]]}"
            for store in self._stores
        )

    def packed(self, n: int) -> tuple[Tensor, list[Tensor]]:
        """Room outside the cache for the contents of n blocks, zeros, in one piece of memory.

        Returns:
            All of it, uint8; and views of it, [layers, n, ...] for each store.
        """
        shapes = [(len(store), n, *store.shape[2:]) for store in self._stores]
        sizes = [
            math.prod(shape) * store.itemsize
            for shape, store in zip(shapes, self._stores, strict=True)
        ]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        memory = torch.zeros(sum(padded), dtype=torch.uint8)
        views = [
            part[:size].view(store.dtype).view(shape)
            for part, size, store, shape in zip(
                memory.split(padded), sizes, self._stores, shapes, strict=True
            )
        ]
        return memory, views

    def gather(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Copy n blocks to the views that `packed` gave."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for store, content in zip(self._stores, contents, strict=True):
            torch.index_select(store, 1, index, out=content)

    def scatter(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Fill n blocks with what `gather` of a cache of this layout gave, [layers, n, ...]."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for store, content in zip(self._stores, contents, strict=True):
            store.index_copy_(1, index, content)

    @abstractmethod
    def begin(self, batch: PagedBatch) -> None:
        """The next pass feeds the tokens of `batch`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.attend`; a cache of grouped keys and values overrides it."""
        raise TypeError(f"{type(self).__name__} holds no grouped keys and values")

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        """See `Attend.attend_latent`; a cache of latents overrides it."""
        raise TypeError(f"{type(self).__name__} holds no latents")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` rows of one block over another's."""
        for store in self._stores:
            to, of = (
                store[:, block].narrow(1 + self._token_dim, 0, tokens) for block in (target, source)
            )
            to.copy_(of)

    def fill_normal(self, blocks: Sequence[int], generator: torch.Generator) -> None:
        """Random numbers, standard normal, for everything that these blocks hold."""
        for store in self._stores:
            for layer in store:
                layer[blocks] = torch.randn(
                    (len(blocks), *layer.shape[1:]), generator=generator
                ).to(layer.dtype)


def block_tables(blocks: Sequence[Sequence[int]]) -> Tensor:
    """The blocks of n sequences as a table, int32 [n, B], -1 behind the last one of each."""
    tables = np.full((len(blocks), max(map(len, blocks))), -1, dtype=np.int32)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(tables)
