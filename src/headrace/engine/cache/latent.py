"""The cache of multi-latent attention: one latent row per token instead of keys and values.

A row is the key/value latent followed by the rotated key that all heads share, so that attention
in absorbed form reads it as key and its leading part as value. Layers with an indexer of their own
keep its keys too. A decoding query attends to token rows by number, all it can see or the ones its
indexer selects: the same arithmetic in the same order either way. Prompt tokens take the cheaper of
two dense forms while no sequence of the pass is longer than the indexer's top-k; in an engine whose
rows must not depend on others they attend as decoding ones do.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.cache.paged import PagedBatch, PagedCache
from headrace.model.attention import LatentQuery
from headrace.ops import Layout, dense_attention, select_topk, sparse_latent_attention
from headrace.ops.pages import LargePages

_EXPANDED_ELEMENTS = 1 << 26
"""Most numbers in keys and values expanded from latents for one layer of a prefill pass."""


class HeadProducts(Protocol):
    """Both up-projections of one layer, a row at a time: other rows change no bit of a result."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Queries [S, H, dn] -> what scores latents directly, [S, H, R]."""
        ...

    def expand(self, latents: Tensor) -> Tensor:
        """Attended latents [S, H, R] -> [S, H, dv]."""
        ...


class LatentCache(PagedCache):
    """Latents [layers, N, P, R + dr], and indexer keys [indexed, N, P, di].

    Args:
        layers: decoder layers.
        latent_dim: width R of the key/value latent.
        rope_dim: width dr of the rotated key.
        index_dim: width di of indexer keys; 0 without indexer.
        index_layers: the layers that run the indexer, ascending; the others share a selection.
        blocks: number of blocks (N).
        block_tokens: tokens of a block (P).
        dtype: of everything held.
        heads: of every layer, for tokens that attend as decoding ones do; None multiplies by the
            weights of the queries.
        one_form: every token attends as decoding ones do; else prompts take whichever form of
            attention is cheapest for the pass.
    """

    def __init__(
        self,
        *,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        index_dim: int = 0,
        index_layers: Sequence[int] = (),
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        heads: Mapping[int, HeadProducts] | None = None,
        one_form: bool = False,
    ) -> None:
        self._latent_dim = latent_dim
        self._heads = heads
        self._one_form = one_form
        width = latent_dim + rope_dim
        # Zeros, not empty: pages that no sequence ever reaches stay uncommitted.
        pages = LargePages()
        self.rows = pages.zeros((layers, blocks, block_tokens, width), dtype)
        self.index_keys = pages.zeros((len(index_layers), blocks, block_tokens, index_dim), dtype)
        super().__init__(blocks, block_tokens, (self.rows, self.index_keys), token_dim=0)
        self._flat_rows = [layer.view(-1, width) for layer in self.rows]
        self._flat_index_keys = {
            layer: keys.view(-1, index_dim)
            for layer, keys in zip(index_layers, self.index_keys, strict=True)
        }
        self._columns = torch.arange(block_tokens, dtype=torch.int32)
        self._batch = PagedBatch([], [], torch.empty(0), torch.empty(0), torch.empty(0))
        self._longest = 0
        # Row number of every position of every sequence of the pass: int32 [n, B * P].
        self._slots = torch.empty(0, dtype=torch.int32)
        self._visible: Tensor | None = None
        self._held: _Held | None = None
        self._prompts: _Held | None = None
        self._selection: Tensor | None = None

    @property
    def selection(self) -> Tensor | None:
        """Token rows that the newest layer with an indexer selected in this pass, int32 [S, K].

        Numbers of rows of the cache in order of position, or -1. None while nothing was selected.
        """
        return self._selection

    def begin(self, batch: PagedBatch) -> None:
        """See `PagedCache.begin`."""
        self._batch = batch
        self._longest = batch.longest
        tables = batch.tables[:, : -(-self._longest // self.block_tokens)]
        self._slots = (tables[:, :, None] * self.block_tokens + self._columns).flatten(1)
        self._visible = self._held = self._prompts = self._selection = None

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        """Store the latents of 1 x S tokens and attend over all held: [1, S, H, dv]."""
        rows = self._flat_rows[layer]
        rows.index_copy_(0, self._batch.slots, torch.cat((query.latent, query.k_rope), -1)[0])
        if query.index is not None:
            self._flat_index_keys[layer].index_copy_(0, self._batch.slots, query.index.k[0])
        selects = query.topk is not None and self._longest > query.topk
        heads = None if self._heads is None else self._heads[layer]
        # Which form a prompt took would depend on what else is in the pass.
        short = len(self._batch.counts) if self._one_form else self._batch.short
        if selects or short == len(self._batch.counts):
            picked = self._select(layer, query) if selects else self._all_visible(short)
            return self._attend_picked(query, rows, picked, slice(None), heads)[None]
        parts = []
        few = sum(self._batch.counts[:short])
        if short:
            picked = self._all_visible(short)
            parts.append(self._attend_picked(query, rows, picked, slice(0, few), heads))
        parts.append(self._attend_prompts(query, rows, short, slice(few, None)))
        return torch.cat(parts)[None]

    def _select(self, layer: int, query: LatentQuery) -> Tensor:
        """Rows each query attends to; a layer without indexer takes over the last selection."""
        index = query.index
        if index is not None:
            assert query.topk is not None
            held = self._held = self._held or _Held.of(self._batch, self._slots, 0)
            chosen = select_topk(
                index.q[0],
                index.weights[0],
                held.of_store(self._flat_index_keys[layer]),
                held.layout,
                query.topk,
            )
            rows = held.rows[chosen.clamp(min=0).long()].to(torch.int32)
            self._selection = torch.where(chosen < 0, chosen, rows)
        if self._selection is None:
            raise ValueError(f"layer {layer} shares a selection and no layer before it made one")
        return self._selection

    def _all_visible(self, sequences: int) -> Tensor:
        """Every row each query of the first sequences sees, int32 [queries, longest]."""
        if self._visible is None:
            counts = self._batch.counts[:sequences]
            slots = self._slots[:sequences, : self._longest]
            if max(counts) > 1:
                slots = slots.repeat_interleave(torch.tensor(counts), 0)
            hidden = torch.arange(slots.shape[1]) > self._batch.positions[: len(slots), None]
            self._visible = slots.masked_fill(hidden, -1)
        return self._visible

    def _attend_picked(
        self,
        query: LatentQuery,
        rows: Tensor,
        picked: Tensor,
        part: slice,
        heads: HeadProducts | None = None,
    ) -> Tensor:
        """[S, H, dv] of the queries in `part`, each over its own rows."""
        if heads is None:
            absorbed = _absorb(query, part)
        else:
            nope = heads.absorb(query.q_nope[0, part])
            absorbed = torch.cat((nope, query.q_rope[0, part]), -1)
        out, _ = sparse_latent_attention(
            absorbed, rows, picked, scale=query.scale, value_dim=self._latent_dim
        )
        return _expand_values(out, query) if heads is None else heads.expand(out)

    def _attend_prompts(self, query: LatentQuery, rows: Tensor, first: int, part: slice) -> Tensor:
        """[S, H, dv] of the queries of sequences from `first` on, which are the rows in `part`, in
        the cheaper of two dense forms."""
        held = self._prompts = self._prompts or _Held.of(self._batch, self._slots, first)
        if _expanding_pays(query, held.layout):
            return _attend_expanded(query, rows[held.rows], held.layout, part)
        compact = rows[held.rows]
        latents = compact[:, None, : self._latent_dim]
        out = dense_attention(
            _absorb(query, part), compact[:, None], latents, held.layout, scale=query.scale
        )
        return _expand_values(out, query)


class _Held:
    """The rows of some sequences side by side, and where their queries look."""

    def __init__(self, rows: Tensor, layout: Layout) -> None:
        self.rows = rows
        self.layout = layout
        first = int(rows[0])
        # Blocks given out one after the other lie side by side, and need not be copied together.
        self._run: slice | None = None
        if int(rows[-1]) - first == len(rows) - 1 and bool((rows.diff() == 1).all()):
            self._run = slice(first, first + len(rows))

    def of_store(self, store: Tensor) -> Tensor:
        """These rows of a store [rows, ...], in order."""
        return store[self.rows] if self._run is None else store[self._run]

    @classmethod
    def of(cls, batch: PagedBatch, slots: Tensor, first: int) -> "_Held":
        """Of the sequences from `first` on."""
        counts = batch.counts[first:]
        ends = [start + n for start, n in zip(batch.starts[first:], counts, strict=True)]
        rows = torch.cat([slots[first + i, :end] for i, end in enumerate(ends)])
        queries, keys = _before(counts), _before(ends)
        return cls(rows.long(), Layout(queries, tuple(counts), keys, tuple(ends)))


def _before(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each of several pieces begins when they lie side by side."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += length
    return tuple(starts)


def _expanding_pays(query: LatentQuery, layout: Layout) -> bool:
    """Whether fewer multiplications expand the held latents to keys and values per head.

    Absorbing moves the up-projections from every held token to every new one, and pays for it
    with wider heads. A pure function of the pass, so that equal passes give equal bits.
    """
    heads, nope, latent = query.w_uk.shape
    values, rope = query.w_uv.shape[1], query.q_rope.shape[-1]
    new, held = sum(layout.query_length), sum(layout.key_length)
    pairs = sum(n * k for n, k in zip(layout.query_length, layout.key_length, strict=True))
    expanded = held * latent * (nope + values) + pairs * (nope + rope + values)
    absorbed = new * latent * (nope + values) + pairs * (2 * latent + rope)
    size = held * heads * (nope + rope + values)
    return expanded <= absorbed and size <= _EXPANDED_ELEMENTS


def _attend_expanded(query: LatentQuery, held: Tensor, layout: Layout, part: slice) -> Tensor:
    """[S, H, dv] with keys and values of every head, as in training."""
    heads, _, width = query.w_uk.shape
    latents, rope = held.split((width, held.shape[1] - width), dim=1)
    each = latents.expand(heads, -1, -1)
    nope = torch.bmm(each, query.w_uk.transpose(1, 2)).transpose(0, 1)
    values = torch.bmm(each, query.w_uv.transpose(1, 2)).transpose(0, 1)
    keys = torch.cat((nope, rope[:, None].expand(-1, heads, -1)), -1)
    queries = torch.cat((query.q_nope[0, part], query.q_rope[0, part]), -1)
    return dense_attention(queries, keys, values, layout, scale=query.scale)


def _absorb(query: LatentQuery, part: slice) -> Tensor:
    """Queries that score latent rows directly, [S, H, R + dr]: q_nope W_UK and q_rope."""
    nope = query.q_nope[0, part].transpose(0, 1)
    latent = torch.bmm(nope, query.w_uk).transpose(0, 1)
    return torch.cat((latent, query.q_rope[0, part]), -1)


def _expand_values(out: Tensor, query: LatentQuery) -> Tensor:
    """Attended latents [S, H, R] -> [S, H, dv]."""
    values = torch.bmm(out.transpose(0, 1), query.w_uv.transpose(1, 2))
    return values.transpose(0, 1).contiguous()
