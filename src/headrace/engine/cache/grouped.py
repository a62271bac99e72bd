"""The cache of grouped-query attention: keys and values of Hkv heads per token."""

import torch
from torch import Tensor

from headrace.engine.cache.paged import PagedBatch, PagedCache
from headrace.ops import paged_attention
from headrace.ops.pages import LargePages


class GroupedCache(PagedCache):
    """Keys and values, [layers, N, Hkv, P, d] each.

    The two of a block and head lie side by side: they are read together, and memory is read the
    faster the longer the pieces are.

    Args:
        layers: decoder layers.
        kv_heads: key/value heads (Hkv).
        head_dim: d.
        blocks: number of blocks (N).
        block_tokens: tokens of a block (P).
        dtype: of keys and values.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, blocks, kv_heads, 2, block_tokens, head_dim)
        # Zeros, not empty: pages that no sequence ever reaches stay uncommitted. Large ones, since
        # a long context is spread over more small ones than a processor has in mind.
        store = LargePages().zeros(shape, dtype)
        self.keys, self.values = store.unbind(3)
        super().__init__(blocks, block_tokens, (store,), token_dim=2)
        self._flat = [layer.view(-1, head_dim) for layer in store]
        self._heads = torch.arange(kv_heads)
        self._scale = head_dim**-0.5
        self._batch = PagedBatch([], [], torch.empty(0), torch.empty(0), torch.empty(0))
        self._starts = self._counts = torch.empty(0, dtype=torch.int64)
        # Where the pass writes keys, in rows of all heads of all blocks of a layer: int64
        # [S * Hkv]; values come a block later.
        self._written = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: PagedBatch) -> None:
        """See `PagedCache.begin`."""
        self._batch = batch
        self._starts, self._counts = torch.tensor(batch.starts), torch.tensor(batch.counts)
        block, row = batch.slots // self.block_tokens, batch.slots % self.block_tokens
        head = block[:, None] * len(self._heads) + self._heads
        self._written = (head * 2 * self.block_tokens + row[:, None]).view(-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [1, Hkv, S, d], return attention of q [1, H, S, d] over all held."""
        rows, dim = self._flat[layer], q.shape[-1]
        for new, place in ((k, self._written), (v, self._written + self.block_tokens)):
            rows.index_copy_(0, place, new[0].transpose(0, 1).reshape(-1, dim))
        batch = self._batch
        out = paged_attention(
            q[0].transpose(0, 1).contiguous(),
            self.keys[layer],
            self.values[layer],
            batch.tables,
            self._starts,
            self._counts,
            scale=self._scale,
        )
        return out.transpose(0, 1)[None]
