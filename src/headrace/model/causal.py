"""Attention over exactly the tokens of one call: what training and scoring use.

Holds no keys from call to call. Documents of a packed row do not see each other; with an indexer,
attention is over the selected keys as soon as a sequence has more than `topk`.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.model.attention import IndexQuery, LatentQuery
from headrace.model.trace import Trace
from headrace.ops import (
    Layout,
    batch_invariant,
    dense_attention,
    select_topk,
    sparse_latent_attention,
)

Mode = Literal["auto", "dense", "sparse"]


class HeadProducts(Protocol):
    """Both up-projections of one latent layer in an engine's order of sums."""

    def absorb(self, q_nope: Tensor, w_uk: Tensor) -> Tensor:
        """Queries [S, H, dn] and W_UK [H, dn, R] -> what scores latents directly, [S, H, R]."""
        ...

    def expand(self, latents: Tensor, w_uv: Tensor) -> Tensor:
        """Attended latents [S, H, R] and W_UV [H, dv, R] -> [S, H, dv]."""
        ...


class CausalAttend:
    """Causal attention over the tokens of the call.

    Args:
        layout: the documents; None for every row of the batch being one.
        mode: "sparse" selects keys whenever the model has an indexer; "dense" never does (the base
            model before adaptation, and its indexer's warm-up); "auto" selects when some sequence
            is longer than topk, which computes what "sparse" does.
        trace: told about selections and attention; usually also given to the forward.
        invariant: grouped-query attention with an engine's order of sums, for float32 and a layout.
        heads: latent layers by number whose attention has an engine's order of sums: absorbed, over
            keys by number whether or not they are selected.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        mode: Mode = "auto",
        trace: Trace | None = None,
        *,
        invariant: bool = False,
        heads: Mapping[int, HeadProducts] | None = None,
    ) -> None:
        self.layout = layout
        self.mode = mode
        self.trace = trace
        self._dense_attention = batch_invariant.attention if invariant else dense_attention
        self._heads = heads or {}
        self._selection: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.attend`."""
        if self.layout is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        batch, _, tokens, size = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = self._dense_attention(q, k, v, self.layout, scale=size**-0.5)
        return out.unflatten(0, (batch, tokens)).transpose(1, 2)

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        """See `Attend.attend_latent`."""
        batch, tokens = query.latent.shape[:2]
        layout = self.layout or Layout.causal(batch, tokens)
        q_nope, q_rope, latent, k_rope = (
            x.flatten(0, 1) for x in (query.q_nope, query.q_rope, query.latent, query.k_rope)
        )
        index = query.index
        if index is not None:
            index = IndexQuery(*(x.flatten(0, 1) for x in index))
        absorbs = layer in self._heads or self._selects(query, layout)
        attend = self._sparse if absorbs else self._dense
        out = attend(layer, query, index, layout, q_nope, q_rope, latent, k_rope)
        return out.unflatten(0, (batch, tokens))

    def _selects(self, query: LatentQuery, layout: Layout) -> bool:
        if query.topk is None or self.mode == "dense":
            return False
        return self.mode == "sparse" or layout.longest > query.topk

    def _dense(
        self,
        layer: int,
        query: LatentQuery,
        index: IndexQuery | None,
        layout: Layout,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
    ) -> Tensor:
        heads, rank = query.w_uk.shape[0], latent.shape[-1]
        k_nope = F.linear(latent, query.w_uk.reshape(-1, rank)).unflatten(-1, (heads, -1))
        v = F.linear(latent, query.w_uv.reshape(-1, rank)).unflatten(-1, (heads, -1))
        q = torch.cat((q_nope, q_rope.to(q_nope.dtype)), dim=-1)
        shared = k_rope.to(k_nope.dtype).unsqueeze(1).expand(-1, heads, -1)
        k = torch.cat((k_nope, shared), dim=-1)
        if index is not None and self.trace is not None:
            self.trace.dense(layer, index, q, k, layout, query.scale)
        return dense_attention(q, k, v, layout, scale=query.scale)

    def _sparse(
        self,
        layer: int,
        query: LatentQuery,
        index: IndexQuery | None,
        layout: Layout,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
    ) -> Tensor:
        selection = self._select(layer, query, index, layout)
        heads = self._heads.get(layer)
        # Absorbed: the queries move into latent space, so keys and values stay one latent.
        absorbed = (
            _per_head(q_nope, query.w_uk) if heads is None else heads.absorb(q_nope, query.w_uk)
        )
        wants_mass = index is not None and self.trace is not None and self.trace.wants_mass
        out, mass = sparse_latent_attention(
            torch.cat((absorbed, q_rope.to(absorbed.dtype)), dim=-1),
            torch.cat((latent, k_rope.to(latent.dtype)), dim=-1),
            selection,
            scale=query.scale,
            value_dim=latent.shape[-1],
            want_mass=wants_mass,
        )
        if mass is not None and index is not None and self.trace is not None:
            self.trace.sparse(layer, index, selection, mass)
        if heads is not None:
            return heads.expand(out, query.w_uv)
        return _per_head(out, query.w_uv.transpose(1, 2))

    def _select(
        self, layer: int, query: LatentQuery, index: IndexQuery | None, layout: Layout
    ) -> Tensor:
        """Keys of every query, int32 [S, K]: those of the last layer with an indexer, or all."""
        if not self._selects(query, layout):
            return _visible(layout, query.latent.device)
        assert query.topk is not None
        if index is not None:
            with torch.no_grad():
                self._selection = select_topk(
                    index.q, index.weights, index.k, layout, min(query.topk, layout.longest)
                )
        if self._selection is None:
            raise ValueError(f"layer {layer} shares a selection, but no layer before made one")
        if self.trace is not None and index is not None:
            self.trace.selected(layer, self._selection)
        return self._selection


@lru_cache(maxsize=2)
def _visible(layout: Layout, device: torch.device) -> Tensor:
    """Every key each query row sees, int32 [S, longest], -1 behind the last; for all layers."""
    rows = [torch.zeros(0, layout.longest, dtype=torch.int32)]
    place = torch.arange(layout.longest, dtype=torch.int32)
    end = 0
    for start, count, first, length in zip(
        *(layout.query_start, layout.query_length, layout.key_start, layout.key_length), strict=True
    ):
        rows.append(torch.full((start - end, layout.longest), -1, dtype=torch.int32))
        last = torch.arange(length - count, length, dtype=torch.int32)
        rows.append(torch.where(place <= last[:, None], first + place, -1).to(torch.int32))
        end = start + count
    return torch.cat(rows).to(device)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [S, H, a] times each head's weight [H, a, b] -> [S, H, b].

    As one batched product over contiguous heads: einsum's own choice of strides makes the bfloat16
    backward of long sequences slower by orders of magnitude.
    """
    return torch.bmm(x.transpose(0, 1).contiguous(), weight).transpose(0, 1)
