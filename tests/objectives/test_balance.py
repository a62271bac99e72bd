"""The balance loss against equations 17 to 20 written as loops, and the bias rule."""

import pytest
import torch

from headrace.objectives.balance import balance_loss, updated_router_bias
from headrace.ops.layout import Layout


def reference(scores, k: int, documents: list[list[int]]) -> float:
    """Equations 17 to 20 for each document, weighted by its tokens; plain Python."""
    total = 0.0
    experts = len(scores[0])
    for rows in documents:
        count, share, n = [0] * experts, [0.0] * experts, len(rows)
        for t in rows:
            order = sorted(range(experts), key=lambda i, t=t: -scores[t][i])
            for i in order[:k]:
                count[i] += 1
            for i in range(experts):
                share[i] += scores[t][i] / sum(scores[t])
        f = [experts / (k * n) * c for c in count]
        p = [s / n for s in share]
        total += n * sum(a * b for a, b in zip(f, p, strict=True))
    return total


def test_loss_equals_the_paper_and_gradcheck_passes():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(10, 6, generator=generator, dtype=torch.float64).requires_grad_()
    layout = Layout.packed([4, 1, 5])
    documents = [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]
    loss = balance_loss(scores, 2, layout)
    assert loss.item() == pytest.approx(reference(scores.tolist(), 2, documents), rel=1e-12)
    assert torch.autograd.gradcheck(lambda s: balance_loss(s, 2, layout), scores)


def test_packing_and_padding_do_not_matter():
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(9, 4, generator=generator, dtype=torch.float64)
    together = balance_loss(scores, 1, Layout.packed([4, 5]))
    apart = balance_loss(scores[:4], 1, Layout.packed([4])) + balance_loss(
        scores[4:], 1, Layout.packed([5])
    )
    padded = torch.cat((scores[:4], torch.ones(2, 4, dtype=torch.float64), scores[4:]))
    with_padding = balance_loss(padded, 1, Layout((0, 6), (4, 5), (0, 6), (4, 5)))
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together, with_padding)


def test_even_routing_costs_one_per_token_and_collapse_costs_more():
    even = torch.eye(4) + 1.0
    assert balance_loss(even, 1, Layout.packed([4])).item() == pytest.approx(4.0)
    collapsed = torch.tensor([[9.0, 0.1, 0.1, 0.1]] * 4)
    assert balance_loss(collapsed, 1, Layout.packed([4])).item() > 12.0


def test_bias_falls_for_busy_experts_and_rises_for_idle_ones():
    bias = updated_router_bias(torch.zeros(4), torch.tensor([10, 2, 6, 6]), 0.01)
    torch.testing.assert_close(bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]))


def test_more_experts_per_token_than_experts_is_refused():
    with pytest.raises(ValueError, match="5 experts"):
        balance_loss(torch.ones(2, 4), 5, Layout.packed([2]))
