"""Indexer losses against float64 loops, and the two against each other."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.objectives import indexer
from headrace.objectives.indexer import dense_index_loss, sparse_index_loss
from headrace.ops.layout import Layout

SCALE = 0.37


def tensors(rows: int, keys: int, *, kv_heads: int = 2, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(rows * 31 + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        normal(rows, 3, 5),
        normal(rows, 3),
        normal(keys, 5),
        normal(rows, 4, 6),
        normal(keys, kv_heads, 6),
    )


def reference(index_q, index_weights, index_k, q, k, layout: Layout) -> Tensor:
    """One query, one head, one key at a time; differentiable through the scores only."""
    lower, upper = layout.bounds(q.shape[0])
    loss = index_q.new_zeros(())
    shared = q.shape[1] // k.shape[1]
    for s in range(q.shape[0]):
        seen = range(int(lower[s]), int(upper[s]))
        if not seen:
            continue
        target = [0.0] * len(seen)
        for h in range(q.shape[1]):
            logits = [SCALE * float(q[s, h] @ k[j, h // shared]) for j in seen]
            top = max(logits)
            total = sum(math.exp(x - top) for x in logits)
            for i, x in enumerate(logits):
                target[i] += math.exp(x - top) / total
        norm = sum(target)
        scores = torch.stack(
            [
                torch.stack(
                    [
                        index_weights[s, h] * torch.relu(index_q[s, h] @ index_k[j])
                        for h in range(index_q.shape[1])
                    ]
                ).sum()
                for j in seen
            ]
        )
        logp = scores - torch.logsumexp(scores, 0)
        for i, p in enumerate(target):
            loss = loss + p / norm * (math.log(p / norm) - logp[i])
    return loss


LAYOUTS = {
    "packed": (Layout.packed([4, 1, 6]), 11, 11),
    "chunk of a prefill": (Layout((0,), (3,), (0,), (9,)), 3, 9),
    "padding and a cache": (Layout((1, 6), (4, 2), (10, 0), (6, 2)), 9, 17),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk", [1 << 20, 8])
def test_dense_loss_and_gradient_equal_the_reference(monkeypatch, name, chunk):
    monkeypatch.setattr(indexer, "CHUNK_ELEMENTS", chunk)
    layout, rows, keys = LAYOUTS[name]
    inputs: Any = tensors(rows, keys)
    results = []
    for function in (lambda *a: dense_index_loss(*a, scale=SCALE), reference):
        leaves: Any = [t.clone().requires_grad_() for t in inputs[:3]]
        loss = function(*leaves, *inputs[3:], layout)  # pyright: ignore[reportCallIssue]
        (3.0 * loss).backward()
        results.append((loss.detach(), *(t.grad for t in leaves)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_dense_gradient_passes_gradcheck():
    layout, rows, keys = LAYOUTS["packed"]
    inputs: Any = tensors(rows, keys, kv_heads=1)
    leaves: Any = [t.requires_grad_() for t in inputs[:3]]
    assert torch.autograd.gradcheck(
        lambda iq, w, ik: dense_index_loss(iq, w, ik, inputs[3], inputs[4], layout, scale=SCALE),
        leaves,
    )


def test_sparse_over_every_visible_key_equals_dense():
    layout, rows, keys = LAYOUTS["packed"]
    index_q, index_weights, index_k, q, k = tensors(rows, keys)
    lower, upper = layout.bounds(rows)
    width = 8
    indices = lower[:, None] + torch.arange(width, dtype=torch.int32)
    indices = torch.where(indices < upper[:, None], indices, -1)
    gathered = index_k[indices.clamp(min=0).long()]
    scores = torch.einsum(
        "sh,shk->sk", index_weights, torch.relu(torch.einsum("shd,skd->shk", index_q, gathered))
    ).masked_fill(indices < 0, -math.inf)
    scores.requires_grad_()
    keys_of = k.repeat_interleave(2, dim=1)[indices.clamp(min=0).long()]
    logits = SCALE * torch.einsum("shd,skhd->shk", q, keys_of)
    logits = logits.masked_fill((indices < 0)[:, None], -math.inf)
    mass = torch.softmax(logits, -1).sum(1)
    loss = sparse_index_loss(scores, mass, indices)
    expected = dense_index_loss(index_q, index_weights, index_k, q, k, layout, scale=SCALE)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-9, atol=1e-10)
    loss.backward()
    assert scores.grad is not None
    target = mass / mass.sum(-1, keepdim=True)
    torch.testing.assert_close(scores.grad, torch.softmax(scores.detach(), -1) - target)


def test_sparse_rows_without_keys_count_as_nothing():
    scores = torch.tensor([[-math.inf, -math.inf], [0.3, -math.inf]], requires_grad=True)
    loss = sparse_index_loss(
        scores, torch.tensor([[0.0, 0.0], [4.0, 9.0]]), torch.tensor([[-1, -1], [5, -1]])
    )
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(2, 2))


def test_perfect_scores_have_no_loss_and_no_gradient_reaches_attention():
    mass = torch.tensor([[1.0, 3.0]], requires_grad=True)
    scores = torch.tensor([[0.25, 0.75]]).log().requires_grad_()
    loss = sparse_index_loss(scores, mass, torch.tensor([[0, 4]]))
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert mass.grad is None
    index_q, index_weights, index_k, q, k = (t.requires_grad_() for t in tensors(4, 4))
    dense_index_loss(
        index_q, index_weights, index_k, q, k, Layout.packed([4]), scale=SCALE
    ).backward()
    assert q.grad is None
    assert k.grad is None
    assert index_q.grad is not None


def test_bfloat16_inputs_get_bfloat16_gradients_close_to_float64():
    layout, rows, keys = LAYOUTS["packed"]
    inputs: Any = tensors(rows, keys)
    half: Any = [t.bfloat16() for t in inputs]
    leaves: Any = [t.requires_grad_() for t in half[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        loss = dense_index_loss(*leaves, *half[3:], layout, scale=SCALE)  # pyright: ignore[reportCallIssue]
    loss.backward()
    assert loss.dtype == torch.float32
    assert leaves[0].grad is not None
    assert leaves[0].grad.dtype == torch.bfloat16
    whole: Any = [t.detach().double() for t in half]
    exact = dense_index_loss(*whole, layout, scale=SCALE)  # pyright: ignore[reportCallIssue]
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    index_q, index_weights, index_k, q, k = tensors(4, 4)
    with pytest.raises(ValueError, match="do not fit"):
        dense_index_loss(index_q, index_weights, index_k[:3], q, k, Layout.packed([4]), scale=1.0)
    with pytest.raises(ValueError, match="one shape"):
        sparse_index_loss(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3))
