"""Dense causal attention on CPUs: torch's flash kernel forward, and a backward that suits length.

Sequences are batched where that saves calls: equal neighbours as they lie, short ones of similar
length padded together. torch's bfloat16 backward repacks every tile and is up to ten times slower
than plain matrix products on short sequences; those get a blockwise backward of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.layout import Layout
from headrace.ops.registry import register

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_SHORT = {torch.bfloat16: 256, torch.float32: 32}
"""Sequences up to this many tokens may be padded to share a call; a longer one fills it alone.
Copying them together costs less than it saves only where the calls are small (measured)."""

_WASTE = 1.25
"""Most tokens of a padded batch per real token."""

_LONGEST_BLOCKWISE = 1024
"""Keys up to which the blockwise bfloat16 backward is the faster one (measured)."""

_BLOCK = 128
"""Query rows whose probabilities the blockwise backward holds at once."""

_WHOLE = 1 << 21
"""Probabilities up to which it takes all rows as one block."""

_HIDDEN = 1e20
"""Log-sum-exp of a padding row in the backward: makes its probabilities zero."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """See `headrace.ops.dense_attention`."""
    return _DenseAttention.apply(*(_unit_stride(x) for x in (q, k, v)), layout, scale)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        plan = _plan(layout, _SHORT[q.dtype])
        out = _new_rows(q.shape[0], plan.queries, (q.shape[1], v.shape[2]), q.dtype)
        lses = []
        for group in plan.groups:
            part, lse = _attend(group.queries(q), group.keys(k), group.keys(v), scale)
            group.put_queries(out, part)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        grad = _unit_stride(grads[0])
        plan: _Plan = ctx.plan
        dq = _new_rows(q.shape[0], plan.queries, q.shape[1:], q.dtype)
        # Key ranges may overlap (a shared prefix); their sum must not be rounded at every step.
        dtype = torch.float32 if plan.overlapping else k.dtype
        dk, dv = (_new_rows(k.shape[0], plan.keys, x.shape[1:], dtype) for x in (k, v))
        for group, lse in zip(plan.groups, lses, strict=True):
            inputs = (group.queries(q), group.keys(k), group.keys(v))
            small = q.dtype == torch.bfloat16 and group.key_length <= _LONGEST_BLOCKWISE
            gradients = (_blockwise_backward if small else _long_backward)(
                *inputs, group.queries(out), group.hide_padding(lse), group.queries(grad), ctx.scale
            )
            group.put_queries(dq, gradients[0])
            group.put_keys(dk, gradients[1], plan.overlapping)
            group.put_keys(dv, gradients[2], plan.overlapping)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _new_rows(rows: int, covered: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[rows, *shape], zero unless each of the rows is going to be written."""
    new = torch.empty if covered == rows else torch.zeros
    return new(rows, *shape, dtype=dtype)


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
    first, last = (o.float() * (part - lse).exp()[..., None] for o, part in parts)
    out = first + last
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
    block = _BLOCK if batch * heads * rows * keys > _WHOLE else rows
    dk, dv = (
        torch.zeros(batch * kv_heads, keys, w if block < rows else 0) for w in (width, value_width)
    )
    for begin in range(0, rows, block):
        end = min(begin + block, rows)
        seen = older + end
        # The query heads of one key head stand below each other.
        folded = (batch * kv_heads, share * (end - begin), -1)
        q_block = q_shifted[:, :, begin:end].reshape(folded)
        grad_block = grad_shifted[:, :, begin:end].reshape(folded)
        p = torch.bmm(q_block, k_ones[:, :seen].mT).mul_(scale).exp_()
        p.view(batch * heads, end - begin, seen).tril_(older + begin)
        ds = torch.bmm(grad_block, v_ones[:, :seen].mT).mul_(p)
        dv_block = torch.bmm(p.mT, grad_block[..., :value_width])
        dk_block = torch.bmm(ds.mT, q_block[..., :width])
        dq_block = torch.bmm(ds, k_ones[:, :seen, :width])
        dq[:, :, begin:end] = dq_block.view(batch, heads, end - begin, width)
        if block == rows:
            dk, dv = dk_block, dv_block
        else:
            dk[:, :seen] += dk_block
            dv[:, :seen] += dv_block
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
        query_rows, key_rows: otherwise the rows without padding, int64.
        real: their places in the batch, int64; None when there is no padding.
        query_gather, key_gather: the row of every place, int64 [count * length]; places of padding
            repeat some row.
    """

    count: int
    query_start: int
    query_length: int
    key_start: int
    key_length: int
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None
    real: Tensor | None = None
    query_gather: Tensor | None = None
    key_gather: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """[S, H, w] -> [count, H, query_length, w]."""
        return self._take(x, self.query_start, self.query_length, self.query_gather)

    def keys(self, x: Tensor) -> Tensor:
        """[T, Hkv, w] -> [count, Hkv, key_length, w]."""
        return self._take(x, self.key_start, self.key_length, self.key_gather)

    def hide_padding(self, lse: Tensor) -> Tensor:
        """Log-sum-exp [count, H, query_length] under which padding influences no gradient."""
        if self.real is None:
            return lse
        padding = torch.ones(self.count * self.query_length, dtype=torch.bool)
        padding[self.real] = False
        return lse.masked_fill(padding.view(self.count, 1, self.query_length), _HIDDEN)

    def put_queries(self, target: Tensor, x: Tensor) -> None:
        """Inverse of `queries`: writes to `target` what is not padding."""
        self._put(target, x, self.query_start, self.query_rows, add=False)

    def put_keys(self, target: Tensor, x: Tensor, add: bool) -> None:
        """Inverse of `keys`; adds to `target` instead of writing when `add`."""
        self._put(target, x, self.key_start, self.key_rows, add)

    def _put(self, target: Tensor, x: Tensor, start: int, rows: Tensor | None, add: bool) -> None:
        x = x.transpose(1, 2)
        if rows is None:
            view = target[start : start + x.shape[0] * x.shape[1]].view(x.shape)
            _ = view.add_(x) if add else view.copy_(x)
            return
        x = x.flatten(0, 1)
        if self.real is not None:
            x = x.index_select(0, self.real)
        x = x.to(target.dtype)
        _ = target.index_add_(0, rows, x) if add else target.index_copy_(0, rows, x)

    def _take(self, x: Tensor, start: int, length: int, rows: Tensor | None) -> Tensor:
        span = slice(start, start + self.count * length)
        x = x[span] if rows is None else x.index_select(0, rows)
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


@dataclass(frozen=True)
class _Plan:
    """How a layout is computed.

    Attributes:
        groups: a partition of the sequences that have queries.
        queries, keys: rows in them all together.
        overlapping: whether a key row belongs to several of them.
    """

    groups: tuple[_Group, ...]
    queries: int
    keys: int
    overlapping: bool


@lru_cache(maxsize=32)
def _plan(layout: Layout, short: int) -> _Plan:
    """The plan of a layout, kept because every layer of a forward needs the same one.

    Args:
        short: length up to which sequences are padded to share a call.
    """
    fields = (layout.query_start, layout.query_length, layout.key_start, layout.key_length)
    sequences = [_Sequence(*numbers) for numbers in zip(*fields, strict=True) if numbers[1]]
    by_key = sorted(sequences, key=lambda s: s.key_start)
    overlapping = any(a.key_start + a.key_length > b.key_start for a, b in pairwise(by_key))
    runs: list[list[_Sequence]] = []
    for sequence in sequences:
        if runs and sequence.follows(runs[-1][-1]):
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
    groups: list[_Group] = []
    joined: list[_Sequence] = []
    for run in runs:
        first = run[0]
        whole = first.query_length == first.key_length
        if len(runs) > 1 and whole and first.key_length <= short:
            joined += run
        else:
            groups.append(_Group(len(run), *_numbers(first)))
    groups += [_padded(batch) for batch in _batches(joined)]
    return _Plan(
        tuple(groups),
        sum(s.query_length for s in sequences),
        sum(s.key_length for s in sequences),
        overlapping,
    )


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
    if all(right.follows(left) for left, right in pairwise(batch)):
        return _Group(len(batch), *_numbers(batch[0]))
    longest = batch[0].key_length
    place = torch.arange(longest)
    lengths = torch.tensor([s.key_length for s in batch])
    inside = torch.minimum(place, lengths[:, None] - 1)
    queries = (torch.tensor([s.query_start for s in batch])[:, None] + inside).flatten()
    keys = (torch.tensor([s.key_start for s in batch])[:, None] + inside).flatten()
    size = (len(batch), 0, longest, 0, longest)
    if batch[-1].key_length == longest:
        return _Group(*size, queries, keys, None, queries, keys)
    real = (place < lengths[:, None]).flatten().nonzero()[:, 0]
    return _Group(*size, queries[real], keys[real], real, queries, keys)


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
