"""The cache of grouped-query attention: keys and values of Hkv heads per token.

A decoding pass treats the query heads that share a key head as the "tokens" of one attention
problem; a fresh prefill never reads back what it stores.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.cache import SlotCache


class GroupedCache(SlotCache):
    """KV storage: two tensors [layers, slots, Hkv, L + 1, d].

    Args:
        layers: decoder layers.
        kv_heads: key/value heads (Hkv).
        head_dim: d.
        slots: most sequences held at once.
        length: most tokens per sequence (L).
        dtype: of keys and values.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        self._kv_heads = kv_heads
        shape = (layers, slots, kv_heads, length + 1, head_dim)
        # Zeros, not empty: a masked position must still hold finite numbers. Pages that no
        # sequence ever reaches stay uncommitted.
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        super().__init__(length, (self.keys, self.values))
        self._flat_keys = [layer.view(-1, head_dim) for layer in self.keys]
        self._flat_values = [layer.view(-1, head_dim) for layer in self.values]
        # Row of (slot, head, position 0) in the flat views: [slots, Hkv, 1].
        self._slot_offsets = (torch.arange(slots * kv_heads) * self.stride).view(slots, -1, 1)
        self._columns = torch.arange(self.stride)
        self._fresh = False
        self._decoding = False
        self._flat = torch.empty(0, dtype=torch.int64)
        self._mask = torch.empty(0)
        self._layer_keys: list[Tensor] = []
        self._layer_values: list[Tensor] = []

    def begin_decode(self, positions: Tensor, longest: int) -> None:
        """See `SlotCache.begin_decode`."""
        n = positions.shape[0]
        self._decoding = True
        self._view(0, n, longest)
        self._flat = (self._slot_offsets[:n] + positions[:, :, None]).view(-1)
        self._mask = self._visible(positions, longest)

    def begin_extend(
        self, first: int, positions: Tensor, counts: Sequence[int], *, fresh: bool
    ) -> None:
        """See `SlotCache.begin_extend`."""
        count = positions.shape[0]
        self._decoding = False
        self._fresh = fresh
        if fresh:
            self._view(first, count, positions.shape[1])
            return
        starts = positions[:, 0].tolist()
        longest = max(start + new for start, new in zip(starts, counts, strict=True))
        self._view(first, count, longest)
        offsets = self._slot_offsets[first : first + count]
        self._flat = (offsets + positions.clamp(max=self.length)[:, None, :]).view(-1)
        self._mask = self._visible(positions, longest)

    def _view(self, first: int, count: int, longest: int) -> None:
        window = (slice(None), slice(first, first + count), slice(None), slice(0, longest))
        self._layer_keys = list(self.keys[window].unbind(0))
        self._layer_values = list(self.values[window].unbind(0))

    def _visible(self, positions: Tensor, longest: int) -> Tensor:
        """Additive mask [n, 1, T, longest]: a token sees the positions up to its own."""
        hidden = self._columns[:longest] > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self.keys.dtype).masked_fill_(hidden, -torch.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [n, Hkv, T, d], return attention of q [n, H, T, d] over all held."""
        keys, values = self._layer_keys[layer], self._layer_values[layer]
        batch, heads, _, dim = q.shape
        if self._decoding:
            self._flat_keys[layer].index_copy_(0, self._flat, k.reshape(-1, dim))
            self._flat_values[layer].index_copy_(0, self._flat, v.reshape(-1, dim))
            # Query heads that share a key head become the "tokens" of one attention problem:
            # no key is expanded and all of them share one mask row.
            grouped = q.reshape(batch, self._kv_heads, heads // self._kv_heads, dim)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
            return out.reshape(batch, heads, 1, dim)
        gqa = heads != self._kv_heads
        if self._fresh:
            keys.copy_(k)
            values.copy_(v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        self._flat_keys[layer].index_copy_(0, self._flat, k.reshape(-1, dim))
        self._flat_values[layer].index_copy_(0, self._flat, v.reshape(-1, dim))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask, enable_gqa=gqa)
