"""The sparse attention ops on CPUs, over the native library.

Selection scores blocks of queries against tiles of keys and selects at once, so few score rows ever
exist. Attention gathers each query's rows once per pass. Gradients of gathered rows are summed in
a fixed order: the same bits every run at the same number of threads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.layout import Layout
from headrace.ops.native import build
from headrace.ops.registry import register

BACKEND = "cpu"


def select_topk(q: Tensor, weights: Tensor, k: Tensor, layout: Layout, topk: int) -> Tensor:
    """See `headrace.ops.select_topk`. bf16 inputs: exact products, fp32 sums; fp32: all in fp32."""
    rows, heads, width = q.shape
    lower, upper = layout.bounds(rows, q.device)
    out = torch.empty(rows, topk, dtype=torch.int32)
    build.call(
        "select_topk",
        torch.get_num_threads(),
        q.dtype == torch.bfloat16,
        *(q.contiguous(), weights.contiguous(), k.contiguous(), lower, upper),
        *(rows, k.shape[0], heads, width, topk),
        out,
    )
    return out


def indexer_scores(q: Tensor, weights: Tensor, k: Tensor, indices: Tensor) -> Tensor:
    """See `headrace.ops.indexer_scores`."""
    return _IndexerScores.apply(q, weights, k, indices)  # pyright: ignore[reportReturnType]


def sparse_latent_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    value_dim: int,
    want_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `headrace.ops.sparse_latent_attention`."""
    out, mass = _SparseLatentAttention.apply(q, kv, indices, scale, value_dim, want_mass)
    return out, mass if want_mass else None


class _IndexerScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, weights: Tensor, k: Tensor, indices: Tensor) -> Tensor:
        q, weights, k = q.contiguous(), weights.contiguous(), k.contiguous()
        indices = indices.contiguous()
        scores = torch.empty(indices.shape, dtype=torch.float32)
        sizes = (*q.shape[:1], k.shape[0], *q.shape[1:], indices.shape[1])
        build.call(
            "indexer_forward",
            torch.get_num_threads(),
            q.dtype == torch.bfloat16,
            *(q, weights, k, indices),
            *sizes,
            scores,
        )
        ctx.save_for_backward(q, weights, k, indices)
        ctx.sizes = sizes
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, weights, k, indices = ctx.saved_tensors
        dq, dweights, dk = torch.empty_like(q), torch.empty_like(weights), torch.empty_like(k)
        build.call(
            "indexer_backward",
            torch.get_num_threads(),
            q.dtype == torch.bfloat16,
            *(q, weights, k, indices, grad.contiguous()),
            *ctx.sizes,
            *(dq, dweights, dk),
        )
        return dq, dweights, dk, None


class _SparseLatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        value_dim: int,
        want_mass: bool,
    ) -> tuple[Tensor, Tensor]:
        q, kv, indices = q.contiguous(), kv.contiguous(), indices.contiguous()
        rows, heads, width = q.shape
        sizes = (rows, kv.shape[0], heads, width, value_dim, indices.shape[1])
        out = torch.empty(rows, heads, value_dim, dtype=q.dtype)
        lse = torch.empty(rows, heads, dtype=torch.float32)
        mass = torch.empty(indices.shape if want_mass else (0,), dtype=torch.float32)
        build.call(
            "latent_forward",
            torch.get_num_threads(),
            q.dtype == torch.bfloat16,
            *(q, kv, indices),
            *sizes,
            float(scale),
            *(out, lse, mass if want_mass else None),
        )
        ctx.save_for_backward(q, kv, indices, out, lse)
        ctx.sizes, ctx.scale = sizes, float(scale)
        ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _mass: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, indices, out, lse = ctx.saved_tensors
        dq, dkv = torch.empty_like(q), torch.empty_like(kv)
        build.call(
            "latent_backward",
            torch.get_num_threads(),
            q.dtype == torch.bfloat16,
            *(q, kv, indices, out, lse, grad.contiguous()),
            *ctx.sizes,
            ctx.scale,
            *(dq, dkv),
        )
        return dq, dkv, None, None, None, None


for _function in (select_topk, indexer_scores, sparse_latent_attention):
    register(_function.__name__, BACKEND, _function, available=build.unavailable_reason)
