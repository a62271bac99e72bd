"""Attention over keys and values in blocks of a pool on CPUs, over the native library.

Keys are loaded once for all query rows of a tile that see them, from where they lie. Every row is
computed by one order of operations over its own positions, so that it has the same bits alone, in
any batch, in any chunk of a prompt and at any number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.ops.native import build
from headrace.ops.registry import register

BACKEND = "cpu"


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Sequence[int] | Tensor,
    counts: Sequence[int] | Tensor,
    *,
    scale: float,
) -> Tensor:
    """See `headrace.ops.paged_attention`. Products of bf16 are exact, sums and softmax fp32; on
    AMX, a probability is rounded to bf16 before it weighs a value."""
    q, tables = q.contiguous(), tables.contiguous()
    out = torch.empty_like(q)
    blocks, kv_heads, block_tokens, width = keys.shape
    build.call(
        "paged_attention",
        torch.get_num_threads(),
        q.dtype == torch.bfloat16,
        *(q, keys, values, tables),
        *(torch.as_tensor(x, dtype=torch.int64).contiguous() for x in (starts, counts)),
        *(tables.shape[0], blocks, tables.shape[1], q.shape[1], kv_heads, block_tokens, width),
        *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        float(scale),
        out,
    )
    return out


register("paged_attention", BACKEND, paged_attention, available=build.unavailable_reason)
