"""KL estimators: exact in expectation, with the gradients that their names promise."""

import math

import pytest
import torch

from headrace.objectives.kl import kl_penalty, kl_terms


def policies():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.randn(9, dtype=torch.float64, generator=generator).log_softmax(0)
    return logits, logits.log_softmax(0), reference


@pytest.mark.parametrize(("name", "biased"), [("k1", False), ("k2", True), ("k3", False)])
def test_expectation_over_the_vocabulary_is_the_kl(name, biased):
    _, policy, reference = policies()
    exact = (policy.exp() * (policy - reference)).sum().item()
    found = (policy.exp() * kl_terms(policy, reference, name)).sum().item()
    assert (abs(found - exact) > 1e-3) == biased
    same = kl_terms(policy, policy.detach(), name)
    assert same.abs().max().item() < 1e-12


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_in_expectation(name):
    """k1's is nothing, k2's is the KL's, k3's is the reversed KL's."""
    logits, policy, reference = policies()
    (found,) = torch.autograd.grad(
        kl_penalty(policy, reference, policy.detach().exp(), name), logits, retain_graph=True
    )
    kl = {
        "k1": policy.sum() * 0.0,
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }[name]
    (wanted,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradcheck_and_extremes(name):
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_terms(x, reference, name), (new,))
    wild = torch.tensor([-900.0, -1e-9, -math.inf], requires_grad=True)
    weights = torch.tensor([0.5, 0.5, 0.0])
    loss = kl_penalty(wild, torch.tensor([-1e-9, -900.0, -1.0]), weights, name)
    loss.backward()
    assert wild.grad is not None
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(wild.grad).all())
    if name != "k1":
        assert wild.grad[0] < 0 < wild.grad[1], "the penalty pulls the wrong way"


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="use k1, k2 or k3"):
        kl_terms(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type] # on purpose
