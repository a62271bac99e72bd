"""What the engine asks of the store behind its decoder: blocks of tokens, shared between sequences.

A block holds `block_tokens` consecutive tokens of one sequence for every layer; a table says which
blocks a sequence's positions lie in. Before a forward pass the core says which positions of which
sequences it covers (`begin`); during the pass the store keeps what each layer brings and attends
over everything the tables reach. What a position holds (grouped keys and values, or a latent) is
the subclass's own business.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.model.attention import LatentQuery

_FEW_ROWS = 8
"""Rows of a sequence up to which it counts as decoding."""


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


def block_tables(blocks: Sequence[Sequence[int]]) -> Tensor:
    """The blocks of n sequences as a table, int32 [n, B], -1 behind the last one of each."""
    tables = np.full((len(blocks), max(map(len, blocks))), -1, dtype=np.int32)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(tables)
