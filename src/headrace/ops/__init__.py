"""Ops with one contract each and several backends, from attention to cross-entropy.

Call the functions; `use("reference")` or HEADRACE_OPS=reference picks a backend, and
`headrace doctor --ops` checks all of them on this machine.
"""

from headrace.ops import (
    batch_invariant,
    cross_entropy,
    dense,
    draws,
    elementwise,
    grouped,
    packed,
    packed_grouped,
    paged,
    reference,
    sparse,
)
from headrace.ops.draws import Drawn, draw_tokens, token_logprobs
from headrace.ops.functions import (
    dense_attention,
    grouped_matmul,
    indexer_scores,
    is_small,
    linear_cross_entropy,
    paged_attention,
    rms_norm,
    rotate,
    select_topk,
    sparse_latent_attention,
    swiglu,
)
from headrace.ops.layout import Layout
from headrace.ops.packed import PackedMatrix, packed_linear
from headrace.ops.packed_grouped import PackedMatrices, packed_grouped_linear
from headrace.ops.registry import OpFallbackWarning, prepare, register, resolve, use
from headrace.ops.rows import row_independent

__all__ = [
    "Drawn",
    "Layout",
    "OpFallbackWarning",
    "PackedMatrices",
    "PackedMatrix",
    "batch_invariant",
    "cross_entropy",
    "dense",
    "dense_attention",
    "draw_tokens",
    "draws",
    "elementwise",
    "grouped",
    "grouped_matmul",
    "indexer_scores",
    "is_small",
    "linear_cross_entropy",
    "packed",
    "packed_grouped",
    "packed_grouped_linear",
    "packed_linear",
    "paged",
    "paged_attention",
    "prepare",
    "reference",
    "register",
    "resolve",
    "rms_norm",
    "rotate",
    "row_independent",
    "select_topk",
    "sparse",
    "sparse_latent_attention",
    "swiglu",
    "token_logprobs",
    "use",
]
