"""Every op in plain torch: the meaning of its contract, and the fallback where nothing faster runs.

Written to be read and differentiated, not to be fast; what would be too large to hold is done in
chunks of rows. Inputs in float64 are computed in float64, which makes these the oracles that other
backends are measured against. The public functions in `functions` say what the arguments mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.ops.layout import Layout
from headrace.ops.registry import ANY_DEVICE, REFERENCE, register
from headrace.ops.rows import is_row_independent

_CHUNK_ELEMENTS = 1 << 24
"""Most elements of a gathered or scored intermediate alive at once."""


def select_topk(q: Tensor, weights: Tensor, k: Tensor, layout: Layout, topk: int) -> Tensor:
    """See `headrace.ops.select_topk`."""
    chosen = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    # In float64 the order of additions is lost in the rounding to float32 that follows: the score
    # of a pair is the same number whatever else the matmul computes.
    q64, k64, weights64 = q.double(), k.double(), weights.double()
    _, upper = layout.bounds(q.shape[0], q.device)
    for start, queries, first, keys in _sequences(layout):
        rows = max(1, _CHUNK_ELEMENTS // (q.shape[1] * keys))
        for begin in range(start, start + queries, rows):
            part = slice(begin, min(begin + rows, start + queries))
            visible = upper[part].long() - first
            products = torch.einsum("shd,td->sht", q64[part], k64[first : first + keys])
            scores = torch.einsum("sht,sh->st", products.relu(), weights64[part]).float()
            chosen[part] = _lowest_best(scores, visible, topk, first)
    return chosen


def _lowest_best(scores: Tensor, visible: Tensor, topk: int, first: int) -> Tensor:
    """Ascending int32 indices [S, topk] of the best of each row's first `visible` scores [S, T].

    Ties go to the lower index and NaN ranks with -inf. `first` is added to every index.
    """
    column = torch.arange(scores.shape[1], device=scores.device)
    # Adding zero makes -0.0 equal to 0.0 for a sort that looks at bits.
    scores = torch.where(scores.isnan(), float("-inf"), scores) + 0.0
    # What is invisible lies behind everything visible, so a stable sort keeps it behind.
    scores = scores.masked_fill(column >= visible[:, None], float("-inf"))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    rank = torch.arange(order.shape[1], device=scores.device)
    beyond = torch.iinfo(torch.int32).max
    order = (order + first).masked_fill(rank >= visible[:, None], beyond).sort(dim=-1).values
    order = order.masked_fill(order == beyond, -1)
    missing = topk - order.shape[1]
    return torch.nn.functional.pad(order, (0, missing), value=-1).int()


def indexer_scores(q: Tensor, weights: Tensor, k: Tensor, indices: Tensor) -> Tensor:
    """See `headrace.ops.indexer_scores`."""

    def score(q: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        keys = _rows_at(_wide(k), indices)
        products = torch.einsum("shd,skd->shk", _wide(q), keys).relu()
        scores = torch.einsum("shk,sh->sk", products, weights.to(products.dtype))
        return scores.masked_fill(indices < 0, float("-inf"))

    width = indices.shape[1] * (k.shape[1] + q.shape[1])
    parts = _by_rows(score, width, q, weights, indices)
    return torch.cat(parts)


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

    def attend(q: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        # What -1 stands for is any row, and rows nobody wrote may hold NaN.
        rows = _rows_at(_wide(kv), indices).masked_fill((indices < 0)[..., None], 0.0)
        scores = torch.einsum("shc,skc->shk", _wide(q), rows) * scale
        probabilities = _masked_softmax(scores, (indices >= 0)[:, None])
        out = torch.einsum("shk,skv->shv", probabilities, rows[..., :value_dim])
        return out.to(q.dtype), probabilities.detach().sum(1)

    width = indices.shape[1] * (kv.shape[1] + q.shape[1])
    parts = _by_rows(attend, width, q, indices)
    mass = torch.cat([part[1] for part in parts]) if want_mass else None
    return torch.cat([part[0] for part in parts]), mass


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """See `headrace.ops.dense_attention`."""
    share = q.shape[1] // k.shape[1]
    _, upper = layout.bounds(q.shape[0], q.device)
    # A piece without rows keeps the result a function of q when there is no sequence.
    pieces, end = [q[:0, :, :1].expand(-1, -1, v.shape[2])], 0
    for start, queries, first, keys in _sequences(layout):
        rows, columns = slice(start, start + queries), slice(first, first + keys)
        key = _wide(k[columns]).repeat_interleave(share, dim=1)
        value = _wide(v[columns]).repeat_interleave(share, dim=1)
        column = torch.arange(first, first + keys, device=q.device)
        scores = torch.einsum("shd,thd->hst", _wide(q[rows]), key) * scale
        probabilities = _masked_softmax(scores, column < upper[rows, None])
        out = torch.einsum("hst,thv->shv", probabilities, value).to(q.dtype)
        pieces += [q.new_zeros(start - end, q.shape[1], v.shape[2]), out]
        end = start + queries
    pieces.append(q.new_zeros(q.shape[0] - end, q.shape[1], v.shape[2]))
    return torch.cat(pieces)


@torch.no_grad()
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
    """See `headrace.ops.paged_attention`."""
    heads, (blocks, kv_heads, size, _) = q.shape[1], keys.shape
    pieces, row = [q[:0]], 0
    starts, counts = (torch.as_tensor(x, dtype=torch.int64).tolist() for x in (starts, counts))
    for table, start, count in zip(tables, starts, counts, strict=True):
        end = start + count
        needed = -(-end // size)
        numbers = table[:needed].long()
        if len(numbers) < needed or not ((numbers >= 0) & (numbers < blocks)).all():
            raise IndexError("a table holds no block for a position that is seen")
        # In float64, so that a row has the same bits whatever else the matmul computes.
        key, value = (
            pool[numbers].double().transpose(0, 1).flatten(1, 2)[:, :end] for pool in (keys, values)
        )
        position = torch.arange(end, device=q.device)
        rows = max(1, _CHUNK_ELEMENTS // (heads * end))
        for begin in range(0, count, rows):
            some = q[row + begin : row + min(begin + rows, count)].double()
            seen = position[start + begin : start + begin + some.shape[0], None]
            grouped = some.unflatten(1, (kv_heads, heads // kv_heads))
            scores = torch.einsum("tgsd,gjd->tgsj", grouped, key) * scale
            probabilities = _masked_softmax(scores, (position <= seen)[:, None, None])
            out = torch.einsum("tgsj,gjd->tgsd", probabilities, value)
            pieces.append(out.flatten(1, 2).to(q.dtype))
        row += count
    return torch.cat(pieces)


def grouped_matmul(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """See `headrace.ops.grouped_matmul`."""
    parts = [
        (_wide(rows) @ _wide(matrix).T).to(x.dtype)
        for rows, matrix in zip(x.split(counts), weight, strict=True)
    ]
    return torch.cat(parts)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = 1 << 25,
) -> tuple[Tensor, Tensor]:
    """See `headrace.ops.linear_cross_entropy`."""

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = _wide(hidden) @ _wide(weight).T / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        entropies = torch.special.entr(logprobs.detach().exp()).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropies

    parts = _by_rows(score, weight.shape[0], hidden, targets, limit=chunk_elements)
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `headrace.ops.rms_norm`."""
    wide = _wide(x)
    root = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * root * weight).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `headrace.ops.swiglu`."""
    if gate_up.dtype != torch.float64 and is_row_independent():
        return swiglu(gate_up.double()).to(gate_up.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """See `headrace.ops.rotate`."""
    if x.dtype != torch.float64 and is_row_independent():
        wide = rotate(x.double(), cos.double(), sin.double(), interleaved=interleaved)
        return wide.to(torch.promote_types(x.dtype, cos.dtype))
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, partner, sin)


def _rows_at(rows: Tensor, indices: Tensor) -> Tensor:
    """[S, K, C]: the rows [T, C] at `indices` [S, K]; any row where the index is -1.

    `rows[indices]` would say the same, but its backward adds up in an order that changes from run
    to run when there are several threads.
    """
    flat = rows.index_select(0, indices.clamp(min=0).flatten())
    return flat.unflatten(0, indices.shape)


def _wide(x: Tensor) -> Tensor:
    """In float32; in float64 if it is that already, or where rows must not depend on others."""
    return x.double() if x.dtype == torch.float64 or is_row_independent() else x.float()


def _masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the last dimension of what is allowed; zeros where nothing is."""
    scores = scores.masked_fill(~allowed, float("-inf"))
    # Only rows without any entry lack a finite maximum, and they must not become NaN.
    scores = scores.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.softmax(scores, dim=-1) * allowed


def _by_rows(function, width: int, *tensors: Tensor, limit: int = _CHUNK_ELEMENTS) -> list:
    """`function` over chunks of rows of `tensors`, each with at most `limit` // `width` rows.

    Several chunks are recomputed in the backward pass, which holds one of them at a time.
    """
    rows = max(1, limit // max(1, width))
    if tensors[0].shape[0] <= rows:
        return [function(*tensors)]
    chunks = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]


def _sequences(layout: Layout) -> list[tuple[int, int, int, int]]:
    """(first query row, queries, first key row, keys) of the sequences that have queries."""
    fields = (layout.query_start, layout.query_length, layout.key_start, layout.key_length)
    return [sequence for sequence in zip(*fields, strict=True) if sequence[1]]


for _function in (
    select_topk,
    indexer_scores,
    sparse_latent_attention,
    dense_attention,
    paged_attention,
    grouped_matmul,
    linear_cross_entropy,
    rms_norm,
    swiglu,
    rotate,
):
    register(_function.__name__, REFERENCE, _function, devices=(ANY_DEVICE,))
