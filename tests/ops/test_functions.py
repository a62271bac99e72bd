"""The public ops: arguments are checked, autocast is honoured, float64 is exact."""

import pytest
import torch

from headrace import ops
from headrace.ops import Layout


def normal(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


INDICES = torch.tensor([[0, 2, -1]] * 4, dtype=torch.int32)
CAUSAL = Layout.causal(1, 4)

MISTAKES = {
    "k too narrow": (
        lambda: ops.select_topk(normal(4, 2, 8), normal(4, 2), normal(4, 6), CAUSAL, 2),
        r"k \[4, 6\]",
    ),
    "bf16 weights": (
        lambda: ops.select_topk(
            normal(4, 2, 8), normal(4, 2, dtype=torch.bfloat16), normal(4, 8), CAUSAL, 2
        ),
        "weights are torch.bfloat16",
    ),
    "topk 0": (
        lambda: ops.select_topk(normal(4, 2, 8), normal(4, 2), normal(4, 8), CAUSAL, 0),
        "topk 0",
    ),
    "layout beyond keys": (
        lambda: ops.select_topk(normal(4, 2, 8), normal(4, 2), normal(3, 8), CAUSAL, 2),
        "4 key rows, but the tensor has 3",
    ),
    "layout beyond queries": (
        lambda: ops.dense_attention(
            normal(3, 2, 8), normal(4, 2, 8), normal(4, 2, 8), CAUSAL, scale=1.0
        ),
        "4 query rows, but the tensor has 3",
    ),
    "heads": (
        lambda: ops.dense_attention(
            normal(4, 3, 8), normal(4, 2, 8), normal(4, 2, 8), CAUSAL, scale=1.0
        ),
        r"q \[4, 3, 8\]",
    ),
    "mixed dtypes": (
        lambda: ops.dense_attention(
            normal(4, 2, 8), normal(4, 2, 8, dtype=torch.bfloat16), normal(4, 2, 8), CAUSAL, scale=1
        ),
        "must be one dtype",
    ),
    "float16": (
        lambda: ops.grouped_matmul(normal(2, 4).half(), normal(1, 4, 4).half(), [2]),
        "float16",
    ),
    "index too large": (
        lambda: ops.indexer_scores(normal(4, 2, 8), normal(4, 2), normal(2, 8), INDICES),
        r"indices -1 \.\. 2 must lie in -1 \.\. 1",
    ),
    "int64 indices": (
        lambda: ops.sparse_latent_attention(
            normal(4, 2, 8), normal(4, 8), INDICES.long(), scale=1.0, value_dim=4
        ),
        "not int32",
    ),
    "value_dim": (
        lambda: ops.sparse_latent_attention(
            normal(4, 2, 8), normal(4, 8), INDICES, scale=1.0, value_dim=9
        ),
        "value_dim 9",
    ),
    "counts": (
        lambda: ops.grouped_matmul(normal(5, 4), normal(2, 3, 4), [2, 2]),
        r"counts \[2, 2\].*sum to 5",
    ),
    "target": (
        lambda: ops.linear_cross_entropy(normal(2, 4), normal(3, 4), torch.tensor([0, 3])),
        "targets 0 .. 3",
    ),
    "temperature": (
        lambda: ops.linear_cross_entropy(
            normal(2, 4), normal(3, 4), torch.tensor([0, 1]), temperature=0.0
        ),
        "temperature 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_value_errors_that_say_what(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_autocast_rounds_what_a_matmul_would_round(backend):
    x, weight = normal(6, 8).requires_grad_(), normal(2, 8, 8).requires_grad_()
    with ops.use(backend):
        with torch.autocast("cpu", torch.bfloat16):
            cast = ops.grouped_matmul(x, weight, [2, 4])
        plain = ops.grouped_matmul(x.bfloat16(), weight.bfloat16(), [2, 4])
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, plain)
    gradients = torch.autograd.grad(cast.float().sum(), (x, weight))
    assert {g.dtype for g in gradients} == {torch.float32}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_autocast_leaves_the_selection_alone(backend):
    q, weights, k = normal(30, 2, 16), normal(30, 2), normal(30, 16)
    with ops.use(backend):
        plain = ops.select_topk(q, weights, k, Layout.causal(1, 30), 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ops.select_topk(q, weights, k, Layout.causal(1, 30), 4), plain)


def test_float64_gradients_are_exact():
    def wide(*shape):
        return normal(*shape).double().requires_grad_()

    layout = Layout((0, 3), (2, 3), (0, 1), (4, 3))
    checks = {
        "dense": (
            lambda q, k, v: ops.dense_attention(q, k, v, layout, scale=0.5),
            (wide(6, 2, 3), wide(4, 1, 3), wide(4, 1, 2)),
        ),
        "sparse": (
            lambda q, kv: ops.sparse_latent_attention(q, kv, INDICES, scale=0.5, value_dim=2)[0],
            (wide(4, 2, 3), wide(3, 3)),
        ),
        "grouped": (lambda x, w: ops.grouped_matmul(x, w, [1, 0, 2]), (wide(3, 2), wide(3, 4, 2))),
        "cross-entropy": (
            lambda h, w: ops.linear_cross_entropy(h, w, torch.tensor([0, 4, 2]), temperature=0.5)[
                0
            ],
            (wide(3, 2), wide(5, 2)),
        ),
    }
    for name, (call, inputs) in checks.items():
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True), name


def test_counts_may_be_a_tensor_and_nothing_may_be_visible():
    x, weight = normal(5, 8), normal(2, 8, 8)
    by_list = ops.grouped_matmul(x, weight, [2, 3])
    assert torch.equal(ops.grouped_matmul(x, weight, torch.tensor([2, 3])), by_list)
    out = ops.dense_attention(
        normal(2, 2, 8), normal(0, 2, 8), normal(0, 2, 4), Layout.packed([]), scale=1.0
    )
    assert out.tolist() == torch.zeros(2, 2, 4).tolist()
