"""The ops as the rest of headrace calls them: arguments checked, then handed to a backend.

Shapes: S query rows, T key rows, H heads, K selected keys. A `Layout` says which rows belong to
which sequence. Inputs are float32 or bfloat16; float64 is computed by the reference. Under
autocast, what a matmul would cast is cast here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.ops.layout import Layout
from headrace.ops.registry import REFERENCE, REGISTRY
from headrace.ops.rows import is_row_independent

CHUNK_ELEMENTS = 1 << 25
"""Most logits (rows times vocabulary) alive at once: 128 MiB in float32."""

_SMALL = 1 << 13
"""Elements up to which the way into native code costs more than it saves (measured)."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def select_topk(q: Tensor, weights: Tensor, k: Tensor, layout: Layout, topk: int) -> Tensor:
    """The keys each query attends to: the best by indexer score, exactly.

    The score of query s and key j is sum_h weights[s, h] * relu(q[s, h] . k[j]) in float32. It
    depends on these two rows only, bit for bit, so a selection does not change with padding,
    chunking or batching. Equal scores go to the lower index; NaN ranks last. No gradient.
    Source: DeepSeek-V3.2 report, eq. 1 (lightning indexer).

    Args:
        q: [S, HI, di].
        weights: [S, HI] float32, with every scale factor folded in; may be negative.
        k: [T, di], same dtype as q.
        layout: which keys a query may see.
        topk: how many to choose, >= 1.

    Returns:
        int32 [S, topk]: key rows in ascending order, then -1 where fewer are visible.

    Raises:
        ValueError: shapes, dtypes or layout do not fit.
    """
    if q.dim() != 3 or k.dim() != 2 or q.shape[2] != k.shape[1] or weights.shape != q.shape[:2]:
        raise _misfit(q=q, weights=weights, k=k)
    if topk < 1:
        raise ValueError(f"topk {topk} must be at least 1")
    _check_dtypes(q=q, k=k)
    _check_weights(weights, q)
    _check_layout(layout, q, k)
    with torch.no_grad(), _without_autocast(q):
        return _resolve("select_topk", q)(q.detach(), weights.detach(), k.detach(), layout, topk)


def indexer_scores(q: Tensor, weights: Tensor, k: Tensor, indices: Tensor) -> Tensor:
    """Indexer scores of selected keys, differentiable in q, weights and k.

    Args:
        q: [S, HI, di].
        weights: [S, HI] float32, scale factors folded in.
        k: [T, di], same dtype as q.
        indices: int32 [S, K], key rows or -1.

    Returns:
        float32 [S, K]; -inf where the index is -1.

    Raises:
        ValueError: shapes or dtypes do not fit, or an index is out of range.
    """
    if q.dim() != 3 or k.dim() != 2 or q.shape[2] != k.shape[1] or weights.shape != q.shape[:2]:
        raise _misfit(q=q, weights=weights, k=k)
    _check_dtypes(q=q, k=k)
    _check_weights(weights, q)
    _check_indices(indices, q, k)
    with _without_autocast(q):
        return _resolve("indexer_scores", q)(q, weights, k, indices)


def sparse_latent_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    value_dim: int,
    want_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every head to selected rows of one shared latent, differentiable in q and kv.

    out[s, h] = softmax_k(scale * q[s, h] . kv[i]) @ kv[i][:value_dim] with i = indices[s], softmax
    in float32. This is absorbed multi-latent attention: the row is latent and rotary key in one.
    Within `row_independent` a row of `out` has the same bits whatever other rows there are, where
    its keys lie and how many -1 are among its indices; of compiled code that always holds.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Args:
        q: [S, H, C].
        kv: [T, C], same dtype as q.
        indices: int32 [S, K], key rows or -1, which is ignored.
        scale: factor on the scores.
        value_dim: leading part of a row that is its value, 1 <= value_dim <= C.
        want_mass: also return how much each selected key was attended to.

    Returns:
        out [S, H, value_dim] in q's dtype, zero where a row has no index; and mass float32 [S, K],
        the probabilities summed over heads, without gradient (None unless wanted).

    Raises:
        ValueError: shapes or dtypes do not fit, or an index is out of range.
    """
    q, kv = _autocast(q, kv)
    if q.dim() != 3 or kv.dim() != 2 or q.shape[2] != kv.shape[1]:
        raise _misfit(q=q, kv=kv)
    if not 1 <= value_dim <= kv.shape[1]:
        raise ValueError(f"value_dim {value_dim} must be in 1 .. {kv.shape[1]}")
    _check_dtypes(q=q, kv=kv)
    _check_indices(indices, q, kv)
    with _without_autocast(q):
        return _resolve("sparse_latent_attention", q)(
            q, kv, indices, scale=scale, value_dim=value_dim, want_mass=want_mass
        )


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """Causal attention inside each sequence, differentiable in q, k and v.

    Args:
        q: [S, H, d].
        k: [T, Hkv, d]; H is a multiple of Hkv, neighbouring query heads share a key head.
        v: [T, Hkv, dv]; dv may differ from d.
        layout: which keys a query may see.
        scale: factor on the scores.

    Returns:
        [S, H, dv]; zero for query rows of no sequence.

    Raises:
        ValueError: shapes, dtypes or layout do not fit.
    """
    q, k, v = _autocast(q, k, v)
    if (
        not q.dim() == k.dim() == v.dim() == 3
        or q.shape[2] != k.shape[2]
        or k.shape[:2] != v.shape[:2]
        or k.shape[1] < 1
        or q.shape[1] % k.shape[1] != 0
    ):
        raise _misfit(q=q, k=k, v=v)
    _check_dtypes(q=q, k=k, v=v)
    _check_layout(layout, q, k)
    with _without_autocast(q):
        return _resolve("dense_attention", q)(q, k, v, layout, scale=scale)


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
    """Causal attention to keys and values that lie in blocks of a pool.

    Position p of sequence i lies in block tables[i, p // P], at place p % P. Query row t of it is
    at position starts[i] + t and sees the positions 0 .. starts[i] + t. Softmax is in float32. A
    row depends on its own past only, bit for bit: not on the other rows of the call, on how a
    prompt is cut into chunks, or on where the blocks lie. Nothing behind the last position of a
    sequence matters, whatever number it is; its own values must be finite. No gradient.
    Source: Kwon et al., PagedAttention, arXiv 2309.06180, section 4.1.

    Args:
        q: [S, H, d], the rows of sequence 0, then those of sequence 1, and so on.
        keys: [N, Hkv, P, d], same dtype as q; H is a multiple of Hkv, neighbouring query heads
            share a key head. The last two dimensions are contiguous.
        values: as keys.
        tables: int32 [n, B], block numbers; what lies behind a sequence's last position is not
            looked at (-1 by custom).
        starts: n numbers >= 0, the position of each sequence's first query row; a tensor is int64.
        counts: n numbers >= 1 that sum to S, its query rows.
        scale: factor on the scores.

    Returns:
        [S, H, d] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, numbers or a table do not fit.
    """
    if (
        q.dim() != 3
        or keys.dim() != 4
        or keys.shape != values.shape
        or q.shape[2] != keys.shape[3]
        or min(q.shape[1], *keys.shape[1:]) < 1
        or q.shape[1] % keys.shape[1] != 0
    ):
        raise _misfit(q=q, keys=keys, values=values)
    _check_dtypes(q=q, keys=keys, values=values)
    for name, pool in (("keys", keys), ("values", values)):
        if not pool[:1, :1].is_contiguous():
            raise ValueError(f"{name}: the last two dimensions must be contiguous")
    first, rows = _numbers(starts), _numbers(counts)
    if tables.dim() != 2 or tables.shape[0] != len(rows):
        raise ValueError(f"tables {list(tables.shape)} must have one row for each of counts {rows}")
    if tables.dtype != torch.int32:
        raise ValueError(f"tables are {tables.dtype}, not int32")
    if len(first) != len(rows) or min(first, default=0) < 0:
        raise ValueError(f"starts {first} must be {len(rows)} numbers >= 0")
    if sum(rows) != q.shape[0] or min(rows, default=1) < 1:
        raise ValueError(f"counts {rows} must be numbers >= 1 that sum to {q.shape[0]}")
    try:
        return _resolve("paged_attention", q)(q, keys, values, tables, starts, counts, scale=scale)
    except IndexError:
        # Backends look at a table as they read it; what is wrong with it is found out here.
        _check_tables(tables, first, rows, keys)
        raise


def grouped_matmul(x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Each expert's matrix applied to its own rows, differentiable in x and weight.

    Args:
        x: [N, D], rows sorted by expert.
        weight: [E, O, D], same dtype as x.
        counts: rows of each of the E experts, summing to N; zeros are allowed.

    Returns:
        [N, O] with rows x_e @ weight[e]^T.

    Raises:
        ValueError: shapes, dtypes or counts do not fit.
    """
    x, weight = _autocast(x, weight)
    rows: list[int] = counts.tolist() if isinstance(counts, Tensor) else [int(n) for n in counts]
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise _misfit(x=x, weight=weight)
    if len(rows) != weight.shape[0] or sum(rows) != x.shape[0] or min(rows, default=0) < 0:
        raise ValueError(
            f"counts {rows} must be {weight.shape[0]} numbers >= 0 that sum to {x.shape[0]}"
        )
    _check_dtypes(x=x, weight=weight)
    with _without_autocast(x):
        return _resolve("grouped_matmul", x)(x, weight, rows)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight^T / temperature).

    Done in chunks of rows: never more than about `chunk_elements` logits exist, forward or
    backward (one row's at the least).

    Args:
        hidden: [N, D].
        weight: [V, D], same dtype as hidden; may be the tied embedding.
        targets: int64 [N], each in [0, V).
        temperature: logits are divided by it; > 0.
        chunk_elements: most logits alive at once, >= 1.

    Returns:
        logprobs float32 [N], differentiable in hidden and weight; entropies of the distributions
        in nats, float32 [N], without gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, or an argument is out of range.
    """
    hidden, weight = _autocast(hidden, weight)
    check_cross_entropy(hidden, weight, targets, temperature, chunk_elements)
    with _without_autocast(hidden):
        return _resolve("linear_cross_entropy", hidden)(
            hidden, weight, targets, temperature=temperature, chunk_elements=chunk_elements
        )


def check_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_elements: int
) -> None:
    """Check what `linear_cross_entropy` is given.

    Raises:
        ValueError: see there.
    """
    if (
        not hidden.dim() == weight.dim() == 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise _misfit(hidden=hidden, weight=weight, targets=targets)
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive")
    if chunk_elements < 1:
        raise ValueError(f"chunk_elements {chunk_elements} must be at least 1")
    _check_dtypes(hidden=hidden, weight=weight)
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}, not int64")
    _check_range("targets", targets, 0, weight.shape[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row; differentiable in x and weight.

    Mean, root and products are in float32, rounded once.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467, eq. 4.

    Args:
        x: [..., D].
        weight: [D], in float32 or x's dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if weight.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight.shape[0]:
        raise _misfit(x=x, weight=weight)
    if weight.dtype != x.dtype and (x.dtype, weight.dtype) != (torch.bfloat16, torch.float32):
        raise ValueError(f"weight is {weight.dtype}, must be float32 or {x.dtype} as x is")
    _check_dtypes(x=x)
    return _resolve("rms_norm", x)(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of two halves in one tensor, differentiable.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, eq. 6.

    Args:
        gate_up: [..., 2 I], gates first.

    Returns:
        [..., I], same dtype.

    Raises:
        ValueError: an odd last dimension, or a dtype that does not fit.
    """
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        raise _misfit(gate_up=gate_up)
    _check_dtypes(gate_up=gate_up)
    return _resolve("swiglu", gate_up)(gate_up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x * cos + partner(x) * sin: rotary position embedding of heads, differentiable in x.

    Source: Su et al., RoFormer, arXiv 2104.09864, eq. 34.

    Args:
        x: [B, T, H, d], d even.
        cos: [B or 1, T, 1, d].
        sin: as cos, with the sign inside: opposite at the two elements of a pair.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + d / 2).

    Returns:
        [B, T, H, d] in the wider dtype of x and the tables.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    batch, tokens, _, width = x.shape if x.dim() == 4 else (0, 0, 0, 1)
    table = cos.shape
    if (
        width % 2
        or table != sin.shape
        or table[1:] != (tokens, 1, width)
        or table[0] not in (1, batch)
    ):
        raise _misfit(x=x, cos=cos, sin=sin)
    _check_dtypes(x=x)
    _check_dtypes(cos=cos, sin=sin)
    return _resolve("rotate", x)(x, cos, sin, interleaved=interleaved)


def is_small(x: Tensor) -> bool:
    """Whether x is a decoding step's handful of rows, where plain torch beats `rms_norm`,
    `swiglu` and `rotate`: without gradients, and the way into native code costs more than it saves.

    bfloat16 never is: plain operations would round it more often than training does.
    """
    return (
        not torch.is_grad_enabled()
        and x.numel() <= _SMALL
        and x.dtype == torch.float32
        and not is_row_independent()
    )


def _resolve(op: str, x: Tensor) -> Callable[..., Any]:
    if x.dtype == torch.float64:
        with REGISTRY.use(REFERENCE):
            return REGISTRY.resolve(op, x.device.type)
    return REGISTRY.resolve(op, x.device.type)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is enabled, as for a matmul; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _without_autocast(x: Tensor) -> torch.autocast:
    """Backends get exactly the dtypes they were promised, also in their matmuls."""
    return torch.autocast(x.device.type, enabled=False)


def _misfit(**tensors: Tensor) -> ValueError:
    """An error that shows shapes."""
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    return ValueError(f"shapes do not fit: {shapes}")


def _check_dtypes(**tensors: Tensor) -> None:
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        found = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise ValueError(f"{found}: must be one dtype, float32, bfloat16 or float64")


def _check_weights(weights: Tensor, q: Tensor) -> None:
    # bfloat16 weights would flip picks; the caller must keep them in float32.
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if weights.dtype != wanted:
        raise ValueError(f"weights are {weights.dtype}, must be {wanted} for {q.dtype} queries")


def _check_indices(indices: Tensor, q: Tensor, k: Tensor) -> None:
    if indices.dim() != 2 or indices.shape[0] != q.shape[0]:
        raise _misfit(q=q, indices=indices)
    if indices.dtype != torch.int32:
        raise ValueError(f"indices are {indices.dtype}, not int32")
    _check_range("indices", indices, -1, k.shape[0])


def _numbers(numbers: Sequence[int] | Tensor) -> Sequence[int]:
    return numbers.tolist() if isinstance(numbers, Tensor) else numbers


def _check_tables(
    tables: Tensor, starts: Sequence[int], counts: Sequence[int], keys: Tensor
) -> None:
    blocks, size = keys.shape[0], keys.shape[2]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        needed = -(-(start + count) // size)
        held = tables[row, :needed].tolist()
        if len(held) < needed:
            raise ValueError(
                f"tables {list(tables.shape)}: sequence {row} has {start + count} positions, "
                f"which take {needed} blocks of {size}"
            )
        for place, block in enumerate(held):
            if not 0 <= block < blocks:
                raise ValueError(
                    f"tables[{row}, {place}] is {block}, must be a block in 0 .. {blocks - 1}"
                )


def _check_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Compiled code trusts these. Elsewhere than on the CPU the look would wait for the device."""
    if x.device.type == "cpu" and x.numel():
        smallest, largest = (int(value) for value in x.aminmax())
        if smallest < low or largest >= high:
            raise ValueError(f"{name} {smallest} .. {largest} must lie in {low} .. {high - 1}")


def _check_layout(layout: Layout, q: Tensor, k: Tensor) -> None:
    layout.bounds(q.shape[0], q.device)
    end = max((s + n for s, n in zip(layout.key_start, layout.key_length, strict=True)), default=0)
    if end > k.shape[0]:
        raise ValueError(f"layout: {end} key rows, but the tensor has {k.shape[0]}")
