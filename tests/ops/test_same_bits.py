"""Backward passes that gather rows give the same bits every time, with two threads too (L12)."""

import pytest
import torch

from headrace import ops
from headrace.ops import Layout, indexer_scores, select_topk, sparse_latent_attention

ROUNDS = 6


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens, topk = 512, 64
    q = torch.randn(tokens, 4, 24, requires_grad=True)
    kv = torch.randn(tokens, 24, requires_grad=True)
    index_q = torch.randn(tokens, 2, 16, requires_grad=True)
    index_k = torch.randn(tokens, 16, requires_grad=True)
    weights = torch.randn(tokens, 2, requires_grad=True)
    chosen = select_topk(index_q, weights, index_k, Layout.causal(1, tokens), topk)
    out, _ = sparse_latent_attention(q, kv, chosen, scale=0.2, value_dim=16)
    scores = indexer_scores(index_q, weights, index_k, chosen)
    (out.square().sum() + scores.masked_fill(chosen < 0, 0.0).square().sum()).backward()
    return [t.grad for t in (q, kv, index_q, index_k, weights) if t.grad is not None]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradients_are_the_same_bits_every_time(two_threads, backend):
    with ops.use(backend):
        first = gradients()
        assert len(first) == 5
        for _ in range(ROUNDS):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
