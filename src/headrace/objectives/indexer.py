"""Teaching the lightning indexer: its scores should rank keys as attention weighs them.

The target of a query is its attention distribution, probabilities summed over heads and normalised
to 1; the loss is KL(target || softmax(index scores)). The target carries no gradient, so these
losses move the indexer (and whatever feeds it) only. Both functions return sums over query rows;
the caller divides by the whole batch's rows (law L14).

Source: DeepSeek-V3.2-Exp report, equations 3 (warm-up, all keys) and 4 (adaptation, selected keys).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.layout import Layout

CHUNK_ELEMENTS = 1 << 23
"""Most attention probabilities (heads times queries times keys) alive at once."""


def sparse_index_loss(scores: Tensor, mass: Tensor, indices: Tensor) -> Tensor:
    """Sum over rows of KL(mass / sum(mass) || softmax(scores)) over the selected keys.

    Args:
        scores: [S, K] index scores of the selected keys, with gradient; ignored where index is -1.
        mass: [S, K] >= 0, attention probabilities summed over heads; no gradient flows into it.
        indices: int [S, K], selected key rows, -1 where nothing is selected.

    Returns:
        Scalar of the scores' dtype. Rows without a selected key, or without mass, count as 0.
    """
    if not scores.shape == mass.shape == indices.shape:
        raise ValueError(
            f"sparse_index_loss: scores {tuple(scores.shape)}, mass {tuple(mass.shape)}, "
            f"indices {tuple(indices.shape)}; one shape needed"
        )
    valid = indices >= 0
    mass = torch.where(valid, mass.detach().to(scores.dtype), 0.0)
    total = mass.sum(-1, keepdim=True)
    # A row of nothing would make softmax divide 0 by 0: it gets one harmless score instead.
    empty = total == 0
    target = mass / torch.where(empty, 1.0, total)
    # -inf entries (outside the selection) would turn 0 * log 0 into nan, also in the gradient.
    logits = torch.where(valid, scores, torch.finfo(scores.dtype).min)
    log_model = torch.log_softmax(logits, dim=-1)
    divergence = torch.special.xlogy(target, target) - target * log_model
    return torch.where(valid, divergence, 0.0).sum()


def dense_index_loss(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    q: Tensor,
    k: Tensor,
    layout: Layout,
    *,
    scale: float,
) -> Tensor:
    """Sum over query rows of KL(head-summed attention || softmax(index scores)), all visible keys.

    score(s, j) = sum_h index_weights[s, h] * relu(index_q[s, h] . index_k[j]). Computed in query
    chunks, gradient included, so memory is O(heads * chunk * keys) whatever the length; softmaxes
    are in float32 (float64 for float64 input). Equals `sparse_index_loss` over a selection that
    holds every visible key, so it also serves adaptation where sequences are no longer than top-k.

    Args:
        index_q: [S, HI, di]; index_weights: [S, HI], all scales folded in; index_k: [T, di]. These
            three get gradients.
        q: [S, H, d] attention queries; k: [T, Hkv, d] attention keys (Hkv divides H; 1 for absorbed
            latent attention). No gradient flows into them.
        layout: which query sees which keys.
        scale: of the attention logits.

    Returns:
        Scalar float32 (float64 for float64 input). Padding rows count as 0.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, keys = q.shape[0], k.shape[0]
    if (
        index_q.shape[0] != rows
        or index_weights.shape != index_q.shape[:2]
        or index_k.shape != (keys, index_q.shape[2])
        or k.shape[2] != q.shape[2]
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"dense_index_loss: index_q {tuple(index_q.shape)}, index_weights "
            f"{tuple(index_weights.shape)}, index_k {tuple(index_k.shape)}, q {tuple(q.shape)}, "
            f"k {tuple(k.shape)} do not fit each other"
        )
    result = _DenseIndexLoss.apply(
        index_q, index_weights, index_k, q.detach(), k.detach(), layout, scale
    )
    assert isinstance(result, Tensor)
    return result


class _DenseIndexLoss(torch.autograd.Function):
    """The loss is a scalar, so its gradient is computed chunk by chunk in the forward pass.

    Recomputing attention in a backward pass would cost the expensive part twice.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # torch types ctx and arguments as Any
        ctx: Any,
        index_q: Tensor,
        index_weights: Tensor,
        index_k: Tensor,
        q: Tensor,
        k: Tensor,
        layout: Layout,
        scale: float,
    ) -> Tensor:
        dtype = torch.float64 if index_q.dtype == torch.float64 else torch.float32
        inputs = (index_q, index_weights, index_k)
        needs_gradient = any(ctx.needs_input_grad[:3])
        gradients = [torch.zeros_like(t, dtype=dtype) for t in inputs] if needs_gradient else []
        loss = torch.zeros((), dtype=dtype, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for rows, keys, first in _chunks(layout, q.shape[1]):
                target = _attention_target(q[rows], k[keys], first, scale, dtype)
                leaves = [
                    tensor[part].detach().to(dtype).requires_grad_(needs_gradient)
                    for tensor, part in zip(inputs, (rows, rows, keys), strict=True)
                ]
                with torch.set_grad_enabled(needs_gradient):
                    divergence = _divergence(*leaves, target, first)
                loss += divergence.detach()
                if needs_gradient:
                    pieces = torch.autograd.grad(divergence, leaves)
                    for whole, piece, part in zip(
                        gradients, pieces, (rows, rows, keys), strict=True
                    ):
                        whole[part] += piece
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [t.dtype for t in inputs]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]  # as above
        gradients = [
            (saved * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None)


def _chunks(layout: Layout, heads: int) -> list[tuple[slice, slice, int]]:
    """(query rows, key rows, keys that the first of these queries sees) of every chunk."""
    chunks = []
    for start, length, key_start, keys in zip(
        layout.query_start,
        layout.query_length,
        layout.key_start,
        layout.key_length,
        strict=True,
    ):
        size = max(1, CHUNK_ELEMENTS // (heads * max(keys, 1)))
        for begin in range(0, length, size):
            end = min(begin + size, length)
            visible = keys - length
            chunks.append(
                (
                    slice(start + begin, start + end),
                    slice(key_start, key_start + visible + end),
                    visible + begin + 1,
                )
            )
    return chunks


def _visible(rows: int, keys: int, first: int, device: torch.device) -> Tensor:
    """bool [rows, keys]: row i of the chunk sees its first `first + i` keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril_(first - 1)


def _attention_target(q: Tensor, k: Tensor, first: int, scale: float, dtype: torch.dtype) -> Tensor:
    """[S, T] attention probabilities summed over heads, each row normalised to 1."""
    rows, heads, size = q.shape
    keys, groups = k.shape[0], k.shape[1]
    grouped = q.to(dtype).view(rows, groups, heads // groups, size).permute(1, 2, 0, 3)
    logits = torch.matmul(grouped.reshape(groups, -1, size), k.to(dtype).permute(1, 2, 0)).view(
        heads, rows, keys
    )
    logits.mul_(scale).masked_fill_(~_visible(rows, keys, first, q.device), -torch.inf)
    # Every head's row sums to 1, so the mean over heads is the normalised sum.
    return torch.softmax(logits, dim=-1).mean(0)


def _divergence(
    index_q: Tensor, index_weights: Tensor, index_k: Tensor, target: Tensor, first: int
) -> Tensor:
    """Sum over rows of KL(target || softmax(scores)) of one chunk."""
    rows, heads, size = index_q.shape
    products = (index_q.reshape(rows * heads, size) @ index_k.t()).view(rows, heads, -1)
    scores = torch.bmm(index_weights[:, None], torch.relu(products))[:, 0]
    visible = _visible(rows, scores.shape[1], first, scores.device)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    log_model = torch.log_softmax(scores, dim=-1)
    return (torch.special.xlogy(target, target) - target * log_model).sum()
