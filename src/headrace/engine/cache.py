"""Keys and values of every sequence the engine holds, one preallocated slot per sequence.

The cache is the engine's side of the decoder's `Attend` protocol. Before a forward pass the core
says which slots and positions the pass covers (`begin_decode` or `begin_extend`); `attend` then
stores the new keys and values and attends over everything the slot holds. Slots of one pass are
always neighbours, so that a pass works on views and copies nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class SlotCache:
    """KV storage: two tensors [layers, slots, Hkv, L + 1, d].

    The extra last position takes the writes of padding tokens and is never attended to.

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
        self.length = length
        self._kv_heads = kv_heads
        self.stride = length + 1
        shape = (layers, slots, kv_heads, self.stride, head_dim)
        # Zeros, not empty: a masked position must still hold finite numbers. Pages that no
        # sequence ever reaches stay uncommitted.
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
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
        """The next pass feeds one token to each of slots 0..n-1.

        Args:
            positions: [n, 1] int64, where each slot's token goes.
            longest: largest position + 1.
        """
        n = positions.shape[0]
        self._decoding = True
        self._view(0, n, longest)
        self._flat = (self._slot_offsets[:n] + positions[:, :, None]).view(-1)
        self._mask = self._visible(positions, longest)

    def begin_extend(self, first: int, positions: Tensor, longest: int, *, fresh: bool) -> None:
        """The next pass feeds T tokens to each of slots first..first+P-1.

        Args:
            first: first slot.
            positions: [P, T] int64, rising by one along T; padding may run past `longest`.
            longest: largest position of a real token + 1.
            fresh: every row starts at position 0, so nothing held before matters.
        """
        count = positions.shape[0]
        self._decoding = False
        self._fresh = fresh
        if fresh:
            self._view(first, count, positions.shape[1])
            return
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

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another's."""
        if length:
            for store in (self.keys, self.values):
                store[:, target, :, :length] = store[:, source, :, :length]

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots holding length_a and length_b positions."""
        if not length_a or not length_b:
            self.copy(a, b, length_a)
            self.copy(b, a, length_b)
            return
        for store in (self.keys, self.values):
            held = store[:, a, :, :length_a].clone()
            store[:, a, :, :length_b] = store[:, b, :, :length_b]
            store[:, b, :, :length_a] = held

    def clear(self, slot: int) -> None:
        """Zero a slot. Needed after non-finite values were written: masks cannot hide NaN."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()
