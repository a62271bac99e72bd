"""Ops of a training forward that computes what a deterministic engine computes, to the bit.

The forwards are those of `packed_linear`, `packed_grouped_linear`, `paged_attention` and
`token_logprobs`, whose rows do not depend on other rows; the gradients are those of the ordinary
ops. Within `row_independent`, where norms, gates and rotations keep the same promise, a token then
has the engine's logprob exactly, whatever is packed or batched beside it. float32 only. These ops
know no model.
Source: He et al., Defeating Nondeterminism in LLM Inference, Thinking Machines Lab, 2025.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.cross_entropy import projected_cross_entropy
from headrace.ops.draws import token_logprobs
from headrace.ops.functions import (
    CHUNK_ELEMENTS,
    check_cross_entropy,
    dense_attention,
    grouped_matmul,
    paged_attention,
)
from headrace.ops.layout import Layout
from headrace.ops.packed import PackedMatrix, packed_linear
from headrace.ops.packed_grouped import PackedMatrices, packed_grouped_linear


def linear(x: Tensor, weight: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias with the bits of `packed_linear`, differentiable in x, weight and bias.

    Args:
        x: float32 [..., D].
        weight: float32 [O, D], which only the gradients read.
        matrix: the same values, packed as "float32".
        bias: float32 [O].

    Returns:
        [..., O].

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_float32(x=x, weight=weight)
    _check_packed(matrix, weight)
    rows = x.reshape(-1, x.shape[-1])
    out = _Linear.apply(rows, weight, bias, matrix)
    assert isinstance(out, Tensor)
    return out.view(*x.shape[:-1], matrix.outputs)


def grouped_linear(
    x: Tensor, weight: Tensor, matrices: PackedMatrices, counts: Sequence[int] | Tensor
) -> Tensor:
    """As `grouped_matmul`, with the bits of `packed_grouped_linear`.

    Args:
        x: float32 [N, D], rows sorted by group.
        weight: float32 [E, O, D], which only the gradients read.
        matrices: the same values, packed as "float32".
        counts: rows of each of the E groups, summing to N; zeros are allowed.

    Returns:
        [N, O], differentiable in x and weight.

    Raises:
        ValueError: shapes, dtypes, counts or devices do not fit.
    """
    _check_float32(x=x, weight=weight)
    shape = (len(matrices), matrices.outputs, matrices.inputs)
    if matrices.kind != "float32" or weight.shape != shape:
        raise ValueError(
            f"matrices are {matrices.kind} {list(shape)}, must be float32 {list(weight.shape)} as "
            "the weight is"
        )
    rows = counts.tolist() if isinstance(counts, Tensor) else [int(n) for n in counts]
    out = _GroupedLinear.apply(x, weight, matrices, rows)
    assert isinstance(out, Tensor)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """As `dense_attention`, with the bits of `paged_attention`; differentiable in q, k and v.

    The backward computes the forward once more by `dense_attention`, whose gradients these are.

    Args:
        q: float32 [S, H, d].
        k, v: float32 [T, Hkv, d].
        layout: which keys a query may see; every query row is in some sequence.
        scale: factor on the scores.

    Returns:
        [S, H, d].

    Raises:
        ValueError: shapes, dtypes or layout do not fit.
    """
    _check_float32(q=q, k=k, v=v)
    if sum(layout.query_length) != q.shape[0]:
        raise ValueError(
            f"layout holds {sum(layout.query_length)} query rows, but q has {q.shape[0]}"
        )
    out = _Attention.apply(q, k, v, layout, scale)
    assert isinstance(out, Tensor)
    return out


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    matrix: PackedMatrix,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """As the op of this name, with the bits of `packed_linear` and `token_logprobs`.

    Args:
        hidden: float32 [N, D].
        weight: float32 [V, D], which only the gradients read.
        matrix: the same values, packed as "float32".
        targets: int64 [N], each in [0, V).
        temperature: logits are divided by it; > 0.
        chunk_elements: most logits alive at once, >= 1.

    Returns:
        logprobs float32 [N], differentiable in hidden and weight; entropies of the distributions
        in nats, float32 [N], without gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, or an argument is out of range.
    """
    _check_float32(hidden=hidden, weight=weight)
    check_cross_entropy(hidden, weight, targets, temperature, chunk_elements)
    _check_packed(matrix, weight)

    def project(rows: Tensor) -> Tensor:
        return packed_linear(rows, matrix)

    return projected_cross_entropy(
        *(hidden, weight, targets, project, _measure),
        temperature=temperature,
        chunk_elements=chunk_elements,
    )


def _measure(z: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A `Measure` with the engine's logprobs."""
    logprobs = token_logprobs(z, targets[:, None])[:, 0]
    normalizers = z.gather(-1, targets[:, None])[:, 0] - logprobs
    z -= normalizers[:, None]
    probabilities = z.exp()
    if kept is not None:
        kept.copy_(probabilities)
    # Of a logit at -inf there is no entropy, and 0 * -inf is not 0.
    z = z.clamp_(min=_LEAST)
    return logprobs, probabilities.mul_(z).sum(-1).neg_(), normalizers


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, matrix: PackedMatrix
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return packed_linear(x, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if wants_x else None,
            grad.t() @ x if wants_weight else None,
            grad.sum(0) if wants_bias else None,
            None,
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return packed_grouped_linear(x, matrices, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        wants_x, wants_weight, _, _ = ctx.needs_input_grad
        groups = zip(grad.split(ctx.rows), x.split(ctx.rows), strict=True)
        return (
            grouped_matmul(grad, weight.transpose(1, 2), ctx.rows) if wants_x else None,
            torch.stack([g.t() @ rows for g, rows in groups]) if wants_weight else None,
            None,
            None,
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.scale = layout, scale
        where = _places(layout)
        # Blocks of one token: keys and values are read where they lie.
        keys, values = (_head_rows(x).unsqueeze(2) for x in (k, v))
        return paged_attention(
            q, keys, values, where.tables, where.starts, where.counts, scale=scale
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_(needed)
                for x, needed in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            q, k, v = inputs
            out = dense_attention(q, k, v, ctx.layout, scale=ctx.scale)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads[0]))
        return *(next(found) if needed else None for needed in wanted), None, None


_LEAST = -1e4
"""A log-probability whose probability is 0 in float32."""


class _Places(NamedTuple):
    """A layout as `paged_attention` takes it, with blocks of one token."""

    tables: Tensor
    starts: Tensor
    counts: Tensor


@lru_cache(maxsize=32)
def _places(layout: Layout) -> _Places:
    """Kept because every layer of a forward needs the same one."""
    fields = (layout.query_length, layout.key_start, layout.key_length)
    rows = [row for row in zip(*fields, strict=True) if row[0]]
    counts, first, lengths = torch.tensor(rows, dtype=torch.int64).view(-1, 3).unbind(1)
    place = torch.arange(int(lengths.max()) if rows else 0)
    tables = torch.where(place < lengths[:, None], first[:, None] + place, -1)
    return _Places(tables.int(), lengths - counts, counts.contiguous())


def _head_rows(x: Tensor) -> Tensor:
    """`x` [T, Hkv, d] with the heads of a token side by side in memory."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _check_float32(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype != torch.float32:
            raise ValueError(f"{name} is {x.dtype}, must be float32")


def _check_packed(matrix: PackedMatrix, weight: Tensor) -> None:
    if matrix.kind != "float32" or weight.shape != (matrix.outputs, matrix.inputs):
        raise ValueError(
            f"matrix is {matrix.kind} [{matrix.outputs}, {matrix.inputs}], must be float32 "
            f"{list(weight.shape)} as the weight is"
        )
