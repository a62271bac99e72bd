"""What the fast CPU ops promise beyond the conformance suite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops import Layout, dense, linear_cross_entropy, reference


def attend(backend, qkv, layout, scale):
    q, k, v = qkv
    return backend.dense_attention(q, k, v, layout, scale=scale)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=12),
    gap=st.integers(0, 2),
    bfloat16=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dense_attention_of_any_packing_equals_the_reference(lengths, gap, bfloat16, seed):
    """Whatever shares a padded batch; queries apart from keys, which are in reversed order."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + gap * len(lengths)
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += length + gap
    key_starts = [rows - start - length for start, length in zip(starts, lengths, strict=True)]
    layout = Layout(tuple(starts), tuple(lengths), tuple(key_starts), tuple(lengths))
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    inputs = [torch.randn(rows, h, 8, generator=generator).to(dtype) for h in (4, 2, 2)]
    grad = torch.randn(rows, 4, 8, generator=generator)
    leaves = tuple(x.requires_grad_() for x in inputs)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    out, want = attend(dense, leaves, layout, 0.4), attend(reference, wide, layout, 0.4)
    tolerance = 2e-2 if bfloat16 else 1e-5
    if rows:
        assert float((out - want).detach().abs().max()) <= tolerance * 4
    got = torch.autograd.grad(out, leaves, grad.to(dtype))
    expected = torch.autograd.grad(want, wide, grad.to(dtype).double(), allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        b = torch.zeros_like(a) if b is None else b
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        assert not a.numel() or float((a - b).abs().max()) <= tolerance * scale


def test_similar_short_lengths_share_a_call_and_waste_little():
    lengths = (31, 7, 32, 30, 8, 300, 29, 7)
    plan = dense._plan(Layout.packed(lengths), 256)
    assert len(plan.groups) == 3
    assert sum(g.count for g in plan.groups) == len(lengths)
    padded = sum(g.count * g.key_length for g in plan.groups)
    assert padded <= 1.25 * sum(lengths)
    (one,) = dense._plan(Layout.causal(4, 16), 256).groups
    assert (one.count, one.query_gather) == (4, None)


def test_bf16_gradients_keep_accuracy_when_scores_are_large():
    """Scores of about 60: rounded to bfloat16 before the exponential they would be off by 20%."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, 2, 64, generator=generator).bfloat16() for _ in range(3)]
    inputs[0] *= 8
    grad = torch.randn(64, 2, 64, generator=generator).bfloat16()
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    wide = tuple(x.double().requires_grad_() for x in inputs)
    layout = Layout.causal(1, 64)
    got = torch.autograd.grad(attend(dense, leaves, layout, 1.0), leaves, grad)
    want = torch.autograd.grad(attend(reference, wide, layout, 1.0), wide, grad.double())
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    assert max(errors) < 0.02


def test_an_input_without_gradient_gets_none():
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    q.requires_grad_()
    dense.dense_attention(q, k, v, Layout.packed([2, 4]), scale=1.0).sum().backward()
    assert q.grad is not None
    assert k.grad is None


@pytest.mark.parametrize("chunk", [1 << 20, 40])
def test_tied_embedding_gets_both_gradients(chunk):
    """The output projection is the embedding itself: its gradient is the sum of both uses."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(11, 6, generator=generator).requires_grad_()
    ids, targets = torch.randint(0, 11, (2, 9), generator=generator)
    logprobs, _ = linear_cross_entropy(table[ids], table, targets, chunk_elements=chunk)
    (got,) = torch.autograd.grad(logprobs.sum(), table)
    logits = table[ids] @ table.T
    (want,) = torch.autograd.grad(
        -torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), table
    )
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("chunk", [1 << 20, 40])
def test_backward_twice_gives_the_same(chunk):
    """Probabilities that were kept must survive the first backward."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(7, 6, generator=generator).requires_grad_()
    weight = torch.randn(11, 6, generator=generator).requires_grad_()
    logprobs, _ = linear_cross_entropy(hidden, weight, torch.arange(7), chunk_elements=chunk)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_frozen_head_costs_no_weight_gradient():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    logprobs, entropies = linear_cross_entropy(hidden, weight, torch.arange(5))
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    assert not entropies.requires_grad


def test_impossible_targets_are_minus_infinity_free():
    """A target at probability zero in float32 still has a finite logprob and gradient."""
    hidden = torch.tensor([[200.0, 0.0]], requires_grad=True)
    weight = torch.eye(2)
    logprobs, entropies = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(-200.0)
    assert entropies.item() == pytest.approx(0.0, abs=1e-6)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[-1.0, 1.0]]
