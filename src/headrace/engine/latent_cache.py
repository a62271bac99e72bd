"""The cache of multi-latent attention: one latent row per token instead of keys and values.

A row is the key/value latent followed by the rotated key that all heads share, so that attention
in absorbed form reads it as key and its leading part as value. Layers with an indexer of their own
keep its keys too. Short sequences are attended to in full; when one is longer than the indexer's
top-k, every query of the pass attends to its selection.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.cache import SlotCache
from headrace.model.attention import LatentQuery
from headrace.ops import Layout, dense_attention, select_topk, sparse_latent_attention

_EXPANDED_ELEMENTS = 1 << 26
"""Most numbers in keys and values expanded from latents for one layer of a prefill pass."""


class LatentCache(SlotCache):
    """Latent storage: [layers, slots, L + 1, R + dr], and [indexed, slots, L + 1, di].

    Args:
        layers: decoder layers.
        latent_dim: width R of the key/value latent.
        rope_dim: width dr of the rotated key.
        index_dim: width di of indexer keys; 0 without indexer.
        index_layers: the layers that run the indexer, ascending; the others share a selection.
        slots: most sequences held at once.
        length: most tokens per sequence (L).
        dtype: of everything held.
    """

    def __init__(
        self,
        *,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        index_dim: int = 0,
        index_layers: Sequence[int] = (),
        slots: int,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        self._latent_dim = latent_dim
        width, stride = latent_dim + rope_dim, length + 1
        # Zeros, not empty: a masked position must still hold finite numbers. Pages that no
        # sequence ever reaches stay uncommitted.
        self.rows = torch.zeros((layers, slots, stride, width), dtype=dtype)
        self.index_keys = torch.zeros((len(index_layers), slots, stride, index_dim), dtype=dtype)
        super().__init__(length, (self.rows, self.index_keys))
        self._flat_rows = [layer.view(-1, width) for layer in self.rows]
        self._flat_index_keys = {
            layer: keys.view(-1, index_dim)
            for layer, keys in zip(index_layers, self.index_keys, strict=True)
        }
        self._slot_offsets = (torch.arange(slots) * stride)[:, None]
        self._columns = torch.arange(stride)
        self._decoding = False
        self._longest = 0
        # Where this pass writes, in all rows of a layer: int64 [n * T].
        self._written = torch.empty(0, dtype=torch.int64)
        # The rows of the slots it covers; the layouts count from their beginning.
        self._window = slice(0, 0)
        self._layout = Layout((), (), (), ())
        self._compact_layout = self._layout
        self._mask = torch.empty(0)
        self._selection: Tensor | None = None

    @property
    def selection(self) -> Tensor | None:
        """What the newest layer with an indexer selected in this pass, int32 [n * T, K].

        Rows of the cache, counted from the pass's first slot (`stride` rows each), or -1. None
        while nothing was selected: attention is dense.
        """
        return self._selection

    def begin_decode(self, positions: Tensor, longest: int) -> None:
        """See `SlotCache.begin_decode`."""
        n = positions.shape[0]
        self._begin(0, positions, [1] * n, longest)
        self._decoding = True
        hidden = self._columns[:longest] > positions
        mask = torch.zeros(hidden.shape, dtype=self.rows.dtype).masked_fill_(hidden, -torch.inf)
        self._mask = mask[:, None, None]

    def begin_extend(
        self, first: int, positions: Tensor, counts: Sequence[int], *, fresh: bool
    ) -> None:
        """See `SlotCache.begin_extend`."""
        del fresh  # What was just written is read back: a latent row is small.
        starts = positions[:, 0].tolist()
        longest = max(start + new for start, new in zip(starts, counts, strict=True))
        self._begin(first, positions.clamp(max=self.length), counts, longest)
        self._decoding = False

    def _begin(self, first: int, positions: Tensor, counts: Sequence[int], longest: int) -> None:
        count, width = positions.shape
        self._written = (self._slot_offsets[first : first + count] + positions).view(-1)
        self._window = slice(first * self.stride, (first + count) * self.stride)
        self._longest = longest
        self._selection = None
        queries = tuple(range(0, count * width, width))
        held = tuple(
            start + new for start, new in zip(positions[:, 0].tolist(), counts, strict=True)
        )
        self._layout, self._compact_layout = (
            Layout(queries, tuple(counts), tuple(range(0, count * step, step)), held)
            for step in (self.stride, longest)
        )

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        """Store the latents of n x T tokens and attend over all held: [n, T, H, dv]."""
        batch, tokens, heads, _ = query.q_nope.shape
        rows = torch.cat((query.latent, query.k_rope), -1).flatten(0, 1)
        self._flat_rows[layer].index_copy_(0, self._written, rows)
        held = self._flat_rows[layer][self._window]
        if query.index is not None:
            keys = query.index.k.flatten(0, 1)
            self._flat_index_keys[layer].index_copy_(0, self._written, keys)
        if query.topk is not None and self._longest > query.topk:
            out = self._attend_selected(layer, query, held, query.topk)
        elif self._decoding:
            out = self._attend_decoding(query, held)
        elif self._expanding_pays(query):
            out = self._attend_expanded(query, held)
        else:
            latents = held[:, None, : self._latent_dim]
            absorbed = dense_attention(
                _absorb(query), held[:, None], latents, self._layout, scale=query.scale
            )
            out = _expand_values(absorbed, query)
        return out.view(batch, tokens, heads, -1)

    def _attend_selected(self, layer: int, query: LatentQuery, held: Tensor, topk: int) -> Tensor:
        """[S, H, dv] of every query over the keys its indexer selects."""
        index = query.index
        if index is not None:
            self._selection = select_topk(
                index.q.flatten(0, 1),
                index.weights.flatten(0, 1),
                self._flat_index_keys[layer][self._window],
                self._layout,
                topk,
            )
        if self._selection is None:
            raise ValueError(f"layer {layer} shares a selection and no layer before it made one")
        out, _ = sparse_latent_attention(
            _absorb(query), held, self._selection, scale=query.scale, value_dim=self._latent_dim
        )
        return _expand_values(out, query)

    def _attend_decoding(self, query: LatentQuery, held: Tensor) -> Tensor:
        """[n, H, dv]: one query per slot, all heads of it one attention problem over its rows."""
        rows = held.view(-1, self.stride, held.shape[1])[:, None, : self._longest]
        # The whole row serves as value: torch's fast kernel wants keys and values of one width,
        # and the few columns too many cost less than leaving it.
        out = F.scaled_dot_product_attention(
            _absorb(query)[:, None], rows, rows, attn_mask=self._mask, scale=query.scale
        )
        return _expand_values(out[:, 0, :, : self._latent_dim], query)

    def _expanding_pays(self, query: LatentQuery) -> bool:
        """Whether fewer multiplications expand the held latents to keys and values per head.

        Absorbing moves the up-projections from every held token to every new one, and pays for it
        with wider heads. A pure function of the pass, so that equal passes give equal bits.
        """
        heads, nope, latent = query.w_uk.shape
        values, rope = query.w_uv.shape[1], query.q_rope.shape[-1]
        new = query.q_nope.shape[0] * query.q_nope.shape[1]
        held = query.q_nope.shape[0] * self._longest
        pairs = new * self._longest
        expanded = held * latent * (nope + values) + pairs * (nope + rope + values)
        absorbed = new * latent * (nope + values) + pairs * (2 * latent + rope)
        size = held * heads * (nope + rope + values)
        return expanded <= absorbed and size <= _EXPANDED_ELEMENTS

    def _attend_expanded(self, query: LatentQuery, held: Tensor) -> Tensor:
        """[S, H, dv] with keys and values of every head, as in training."""
        window = held.view(-1, self.stride, held.shape[1])[:, : self._longest].flatten(0, 1)
        latents, rope = window.split((self._latent_dim, window.shape[1] - self._latent_dim), dim=1)
        heads = query.w_uk.shape[0]
        each = latents.expand(heads, -1, -1)
        nope = torch.bmm(each, query.w_uk.transpose(1, 2)).transpose(0, 1)
        values = torch.bmm(each, query.w_uv.transpose(1, 2)).transpose(0, 1)
        keys = torch.cat((nope, rope[:, None].expand(-1, heads, -1)), -1)
        queries = torch.cat((query.q_nope, query.q_rope), -1).flatten(0, 1)
        return dense_attention(queries, keys, values, self._compact_layout, scale=query.scale)


def _absorb(query: LatentQuery) -> Tensor:
    """Queries that score latent rows directly, [S, H, R + dr]: q_nope W_UK and q_rope."""
    nope = query.q_nope.flatten(0, 1).transpose(0, 1)
    latent = torch.bmm(nope, query.w_uk).transpose(0, 1)
    return torch.cat((latent, query.q_rope.flatten(0, 1)), -1)


def _expand_values(out: Tensor, query: LatentQuery) -> Tensor:
    """Attended latents [S, H, R] -> [S, H, dv]."""
    values = torch.bmm(out.transpose(0, 1), query.w_uv.transpose(1, 2))
    return values.transpose(0, 1).contiguous()
