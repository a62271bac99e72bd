"""The cache of grouped-query attention: keys and values of Hkv heads per token."""

import torch
from torch import Tensor

from headrace.engine.cache.paged import PagedBatch, PagedCache
from headrace.ops import paged_attention
from headrace.ops.pages import LargePages


class GroupedCache(PagedCache):
    """Keys and values, two tensors [layers, N, Hkv, P, d].

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
        shape = (layers, blocks, kv_heads, block_tokens, head_dim)
        # Zeros, not empty: pages that no sequence ever reaches stay uncommitted. Large ones, since
        # a long context is spread over more small ones than a processor has in mind.
        pages = LargePages()
        self.keys, self.values = (pages.zeros(shape, dtype) for _ in range(2))
        super().__init__(blocks, block_tokens, (self.keys, self.values), token_dim=1)
        self._flat = [
            (k.view(-1, head_dim), v.view(-1, head_dim))
            for k, v in zip(self.keys, self.values, strict=True)
        ]
        self._heads = torch.arange(kv_heads)
        self._scale = head_dim**-0.5
        self._batch = PagedBatch([], [], torch.empty(0), torch.empty(0), torch.empty(0))
        self._starts = self._counts = torch.empty(0, dtype=torch.int64)
        # Where the pass writes, in rows of all heads of all blocks of a layer: int64 [S * Hkv].
        self._written = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: PagedBatch) -> None:
        """See `PagedCache.begin`."""
        self._batch = batch
        self._starts, self._counts = torch.tensor(batch.starts), torch.tensor(batch.counts)
        block, row = batch.slots // self.block_tokens, batch.slots % self.block_tokens
        head = block[:, None] * len(self._heads) + self._heads
        self._written = (head * self.block_tokens + row[:, None]).view(-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [1, Hkv, S, d], return attention of q [1, H, S, d] over all held."""
        keys, values = self._flat[layer]
        dim = q.shape[-1]
        keys.index_copy_(0, self._written, k[0].transpose(0, 1).reshape(-1, dim))
        values.index_copy_(0, self._written, v[0].transpose(0, 1).reshape(-1, dim))
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
