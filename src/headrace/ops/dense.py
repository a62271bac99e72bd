"""Dense causal attention on CPUs: torch's flash kernel forward, and a backward that suits length.

Sequences are batched where that saves calls: equal neighbours as they lie, short ones of similar
length padded together. torch's bfloat16 backward repacks every tile and is up to ten times slower
than plain matrix products on short sequences; those get a blockwise backward of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.layout import Layout
from headrace.ops.registry import register

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_SHORT = 256
"""Sequences up to this many tokens may be padded to share a call; a longer one fills it alone."""

_WASTE = 1.25
"""Most tokens of a padded batch per real token."""

_BLOCK = 128
"""Query rows whose probabilities the blockwise backward holds at once."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """See `headrace.ops.dense_attention`."""
    return _DenseAttention.apply(*(_unit_stride(x) for x in (q, k, v)), layout, scale)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        groups = _groups(layout)
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lses = []
        for group in groups:
            part, lse = _attend(group.queries(q), group.keys(k), group.keys(v), scale)
            group.put_queries(out, part)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        grad = _unit_stride(grads[0])
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        # Key ranges may overlap (a shared prefix); their sum must not be rounded at every step.
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        for group, lse in zip(ctx.groups, lses, strict=True):
            inputs = (group.queries(q), group.keys(k), group.keys(v))
            small = q.dtype == torch.bfloat16 and group.key_length <= _longest_blockwise(q.shape[2])
            gradients = (_blockwise_backward if small else _long_backward)(
                *inputs, group.queries(out), lse, group.gradients(grad), ctx.scale
            )
            group.put_queries(dq, gradients[0])
            group.add_keys(dk, gradients[1])
            group.add_keys(dv, gradients[2])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _longest_blockwise(head_dim: int) -> int:
    """Keys up to which the blockwise bfloat16 backward is the faster one (measured)."""
    return 1024 if head_dim <= 128 else 2048


# -- attention of equally long sequences, all [B, H or Hkv, rows, width] ----------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, float32 log-sum-exp [B, H, rows]); the queries are the last of the keys' tokens."""
    width = v.shape[3]
    if k.shape[3] != width:
        # The kernel wants one width; zeros change neither a product nor a sum.
        wide = max(k.shape[3], width)
        q, k, v = (F.pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    older = k.shape[2] - q.shape[2]
    if q.shape[2] == 1 or older == 0:
        out, lse = _flash(q, k, v, 0.0, older == 0, attn_mask=None, scale=scale)
        return out[..., :width], lse
    # The kernel aligns causality with the first key, so older keys are a call without it; two
    # softmaxes join exactly through their normalisers.
    parts = [
        _flash(q, k[:, :, :older], v[:, :, :older], 0.0, False, attn_mask=None, scale=scale),
        _flash(q, k[:, :, older:], v[:, :, older:], 0.0, True, attn_mask=None, scale=scale),
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o.float() * (part - lse).exp()[..., None] for o, part in parts)
    return out[..., :width].to(q.dtype), lse


def _long_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by torch's flash backward."""
    widths = k.shape[3], v.shape[3]
    if widths[0] != widths[1]:
        wide = max(widths)
        q, k, v, out, grad = (F.pad(x, (0, wide - x.shape[3])) for x in (q, k, v, out, grad))
    older = k.shape[2] - q.shape[2]

    def part(columns: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        return _flash_backward(
            grad, q, k[:, :, columns], v[:, :, columns], out, lse, 0.0, causal, scale=scale
        )

    if q.shape[2] == 1 or older == 0:
        dq, dk, dv = part(slice(None), older == 0)
    else:
        # With the joint normaliser and output, each part's gradients are those of the whole.
        first, last = part(slice(older), False), part(slice(older, None), True)
        dq = (first[0].float() + last[0].float()).to(q.dtype)
        dk, dv = (torch.cat((first[i], last[i]), dim=2) for i in (1, 2))
    return dq[..., : widths[0]], dk[..., : widths[0]], dv[..., : widths[1]]


def _blockwise_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by five batched products per block of query rows, with probabilities recomputed.

    A bfloat16 product is rounded when it leaves its float32 accumulator. Subtracting the
    normaliser (and, in the gradient of the probabilities, the row's mean) afterwards would keep the
    rounding of a large score; so they are subtracted inside, as extra columns times one.
    """
    batch, heads, rows, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    value_width = v.shape[3]
    share = heads // kv_heads
    older = keys - rows
    mean = (out.float() * grad.float()).sum(-1)
    q_shifted = torch.cat((q, _exact_columns(lse / -scale, q.dtype)), dim=-1)
    grad_shifted = torch.cat((grad, _exact_columns(-mean, q.dtype)), dim=-1)
    ones = k.new_ones(batch, kv_heads, keys, q_shifted.shape[3] - width)
    k_ones = torch.cat((k, ones), dim=-1).flatten(0, 1)
    v_ones = torch.cat((v, ones), dim=-1).flatten(0, 1)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros(batch * kv_heads, keys, width)
    dv = torch.zeros(batch * kv_heads, keys, value_width)
    for begin in range(0, rows, _BLOCK):
        end = min(begin + _BLOCK, rows)
        seen = older + end
        # The query heads of one key head stand below each other.
        folded = (batch * kv_heads, share * (end - begin), -1)
        q_block = q_shifted[:, :, begin:end].reshape(folded)
        grad_block = grad_shifted[:, :, begin:end].reshape(folded)
        p = torch.bmm(q_block, k_ones[:, :seen].mT).mul_(scale).exp_()
        p.view(batch * heads, end - begin, seen).tril_(older + begin)
        ds = torch.bmm(grad_block, v_ones[:, :seen].mT).mul_(p)
        dv[:, :seen] += torch.bmm(p.mT, grad_block[..., :value_width])
        dk[:, :seen] += torch.bmm(ds.mT, q_block[..., :width])
        block = torch.bmm(ds, k_ones[:, :seen, :width])
        dq[:, :, begin:end] = block.view(batch, heads, end - begin, width)
    return dq.mul_(scale), dk.mul_(scale).view(k.shape), dv.view(v.shape)


def _exact_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of `dtype` [..., 3] that sum to float32 `x` [...] almost exactly."""
    columns, rest = [], x
    for _ in range(3):
        columns.append(rest.to(dtype))
        rest = rest - columns[-1].float()
    return torch.stack(columns, dim=-1)


# -- which sequences share a call --------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """`count` sequences of equal size, as one batch.

    Attributes:
        query_start, key_start: where they begin when they lie one after the other, in which case
            `query_rows` is None.
        query_length, key_length: rows of each, padding included.
        query_rows, key_rows: otherwise the row of each place of the batch, int64 [count * length];
            places of padding repeat some row.
        query_real, key_real: the places without padding, int64; None when all are.
    """

    count: int
    query_start: int
    query_length: int
    key_start: int
    key_length: int
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None
    query_real: Tensor | None = None
    key_real: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """[S, H, w] -> [count, H, query_length, w]."""
        return self._take(x, self.query_start, self.query_length, self.query_rows)

    def keys(self, x: Tensor) -> Tensor:
        """[T, Hkv, w] -> [count, Hkv, key_length, w]."""
        return self._take(x, self.key_start, self.key_length, self.key_rows)

    def gradients(self, grad: Tensor) -> Tensor:
        """As `queries`, but zero in the padding, which thus has no influence on anything."""
        taken = self.queries(grad)
        if self.query_real is None:
            return taken
        mask = torch.zeros(self.count * self.query_length, dtype=grad.dtype)
        mask[self.query_real] = 1
        return taken * mask.view(self.count, 1, self.query_length, 1)

    def put_queries(self, target: Tensor, x: Tensor) -> None:
        """Inverse of `queries`: writes to `target` what is not padding."""
        x = x.transpose(1, 2)
        if self.query_rows is None:
            rows = slice(self.query_start, self.query_start + self.count * self.query_length)
            target[rows].view(x.shape).copy_(x)
            return
        x, rows = x.flatten(0, 1), self.query_rows
        if self.query_real is not None:
            x, rows = x[self.query_real], rows[self.query_real]
        target[rows] = x

    def add_keys(self, target: Tensor, x: Tensor) -> None:
        """Adds [count, Hkv, key_length, w] to rows of `target` [T, Hkv, w] float32."""
        x = x.transpose(1, 2)
        if self.key_rows is None:
            rows = slice(self.key_start, self.key_start + self.count * self.key_length)
            target[rows].view(x.shape).add_(x)
            return
        x, rows = x.flatten(0, 1), self.key_rows
        if self.key_real is not None:
            x, rows = x[self.key_real], rows[self.key_real]
        target.index_add_(0, rows, x.float())

    def _take(self, x: Tensor, start: int, length: int, rows: Tensor | None) -> Tensor:
        if rows is None:
            x = x[start : start + self.count * length]
        else:
            x = x.index_select(0, rows)
        return x.unflatten(0, (self.count, length)).transpose(1, 2)


@dataclass(frozen=True)
class _Sequence:
    query_start: int
    query_length: int
    key_start: int
    key_length: int

    def follows(self, other: "_Sequence") -> bool:
        """Whether it lies right behind an equally long one, in queries and keys."""
        return (
            (self.query_length, self.key_length) == (other.query_length, other.key_length)
            and self.query_start == other.query_start + other.query_length
            and self.key_start == other.key_start + other.key_length
        )


@lru_cache(maxsize=32)
def _groups(layout: Layout) -> tuple[_Group, ...]:
    """A partition of the sequences that have queries. The same for every layer of a forward."""
    fields = (layout.query_start, layout.query_length, layout.key_start, layout.key_length)
    runs: list[list[_Sequence]] = []
    for numbers in zip(*fields, strict=True):
        sequence = _Sequence(*numbers)
        if not sequence.query_length:
            continue
        if runs and sequence.follows(runs[-1][-1]):
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
    groups, short = [], []
    for run in runs:
        first = run[0]
        whole = first.query_length == first.key_length
        if len(runs) > 1 and whole and first.key_length <= _SHORT:
            short += run
        else:
            groups.append(_Group(len(run), *_numbers(first)))
    groups += [_padded(batch) for batch in _batches(short)]
    return tuple(groups)


def _batches(sequences: list[_Sequence]) -> Iterator[list[_Sequence]]:
    """Sequences of similar length together, so that padding stays within `_WASTE`."""
    batch: list[_Sequence] = []
    tokens = 0
    for sequence in sorted(sequences, key=lambda s: -s.key_length):
        if batch:
            padded = (len(batch) + 1) * batch[0].key_length
            if padded > _WASTE * (tokens + sequence.key_length):
                yield batch
                batch, tokens = [], 0
        batch.append(sequence)
        tokens += sequence.key_length
    if batch:
        yield batch


def _padded(batch: list[_Sequence]) -> _Group:
    """Whole sequences (as many queries as keys) as one batch, padded on the right.

    What is right of a token is invisible to it, so padding needs no mask.
    """
    if all(right.follows(left) for left, right in zip(batch, batch[1:], strict=False)):
        return _Group(len(batch), *_numbers(batch[0]))
    longest = batch[0].key_length
    place = torch.arange(longest)
    lengths = torch.tensor([s.key_length for s in batch])
    inside = torch.minimum(place, lengths[:, None] - 1)
    query_rows = (torch.tensor([s.query_start for s in batch])[:, None] + inside).flatten()
    key_rows = (torch.tensor([s.key_start for s in batch])[:, None] + inside).flatten()
    real = None
    if batch[-1].key_length < longest:
        real = (place < lengths[:, None]).flatten().nonzero()[:, 0]
    return _Group(len(batch), 0, longest, 0, longest, query_rows, key_rows, real, real)


def _numbers(sequence: _Sequence) -> tuple[int, int, int, int]:
    return (
        sequence.query_start,
        sequence.query_length,
        sequence.key_start,
        sequence.key_length,
    )


def _unit_stride(x: Tensor) -> Tensor:
    """`x` with a last dimension that is dense in memory, as the kernel reads it."""
    return x if x.stride(-1) == 1 else x.contiguous()


register("dense_attention", "cpu", dense_attention)
