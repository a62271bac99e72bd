"""Equation 1 against its formula, and with teachers' advantages (equation 2)."""

import math

import pytest
import torch
from hypothesis import given, settings
from policy_cases import check_extremes, check_partition, check_reference, one, tokens, vectors

from headrace.objectives.icepop import icepop
from headrace.objectives.policy_tokens import Reason

BETA, LOW, HIGH = 2.0, 0.2, 0.28


def objective(new, old, rollout, advantages, weights):
    return icepop(new, old, rollout, advantages, weights, beta=BETA, eps_low=LOW, eps_high=HIGH)


def reference(new, old, rollout, advantage):
    rho = math.exp(old - rollout)
    pop = rho if 1 / BETA <= rho <= BETA else 0.0
    r = math.exp(new - old)
    clipped = min(max(r, 1 - LOW), 1 + HIGH)
    if r * advantage <= clipped * advantage:
        return -pop * r * advantage, -pop * r * advantage
    return -pop * clipped * advantage, 0.0


@settings(max_examples=80, deadline=None)
@given(tokens)
def test_loss_and_gradient_equal_the_reference(drawn):
    check_reference(objective, reference, drawn)
    check_partition(objective, drawn)


def test_gradcheck_with_no_gradient_through_the_mismatch():
    drawn = [(-1.0, d, m, a, 0.25) for d in (-0.4, 0.1) for m in (0.3, 0.9) for a in (-1.0, 1.0)]
    new, *rest = vectors(drawn)
    assert torch.autograd.gradcheck(lambda x: objective(x, *rest).loss, (new,))


def test_on_policy_the_gradient_is_rho_times_the_policy_gradient():
    """As the trainer calls it with one step per batch: old is the policy itself."""
    leaf = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old, rollout = leaf.detach(), torch.tensor([-1.25], dtype=torch.float64)
    advantage, weight = torch.tensor([0.5]).double(), torch.ones(1).double()
    objective(leaf, old, rollout, advantage, weight).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(-math.exp(0.25) * 0.5)


@pytest.mark.parametrize(
    ("rho", "reason"),
    [(0.49, Reason.MISMATCH_LOW), (0.51, Reason.NONE), (1.99, Reason.NONE), (2.01, "high")],
)
def test_tokens_that_trainer_and_engine_disagree_about_are_popped(rho, reason):
    result, gradient = one(objective, rollout=-math.log(rho))
    expected = Reason.MISMATCH_HIGH if reason == "high" else reason
    assert result.reasons.item() == expected
    assert gradient == pytest.approx(0.0 if expected else -rho)


def test_nothing_becomes_nan_through_popped_tokens():
    check_extremes(objective)
    with pytest.raises(ValueError, match="beta 1"):
        icepop(*(torch.zeros(1),) * 5, beta=1.0, eps_low=0.2, eps_high=0.2)
