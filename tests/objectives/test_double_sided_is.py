"""Equations 3 to 5 against a float64 reference written from the paper's formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.objectives.double_sided_is import double_sided_is

LOW, HIGH = 0.2, 0.28


def reference(logp, rollout, advantage, weight, normalizer):
    """(loss, d loss / d logp) in plain Python floats."""
    loss, gradient = 0.0, []
    for lp, rp, a, w in zip(logp, rollout, advantage, weight, strict=True):
        r = math.exp(lp - rp)
        f = r if 1 - LOW < r < 1 + HIGH else 0.0
        loss -= f * a * lp * w / normalizer
        gradient.append(-f * a * w / normalizer)
    return loss, gradient


token = st.tuples(
    st.floats(-8, -1e-3),
    st.floats(-1.0, 1.0),
    st.floats(-1, 1),
    st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(token, min_size=1, max_size=20))
def test_loss_and_gradient_equal_the_float64_reference(tokens):
    logp = [t[0] for t in tokens]
    rollout = [t[0] + t[1] for t in tokens]
    advantage = [t[2] for t in tokens]
    weight = [float(t[3]) for t in tokens]
    normalizer = sum(weight) or 1.0
    leaf = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    result = double_sided_is(
        leaf,
        torch.tensor(rollout, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(weight, dtype=torch.float64),
        eps_low=LOW,
        eps_high=HIGH,
        normalizer=normalizer,
    )
    result.loss.backward()
    loss, gradient = reference(logp, rollout, advantage, weight, normalizer)
    assert result.loss.item() == pytest.approx(loss, abs=1e-10)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(gradient, abs=1e-10)


def one(logp: float, rollout: float, advantage: float = 1.0):
    leaf = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    result = double_sided_is(
        leaf,
        torch.tensor([rollout], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        eps_low=LOW,
        eps_high=HIGH,
        normalizer=1.0,
    )
    result.loss.backward()
    assert leaf.grad is not None
    return result, leaf.grad.item()


def test_on_policy_gradient_is_the_policy_gradient():
    _, gradient = one(-1.0, -1.0, advantage=0.5)
    assert gradient == -0.5


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.79, True, False), (1.29, False, True)])
def test_tokens_outside_the_interval_are_masked_on_their_side(ratio, low, high):
    result, gradient = one(math.log(ratio) - 1.0, -1.0)
    assert (bool(result.masked_low), bool(result.masked_high)) == (low, high)
    assert gradient == 0.0


def test_masking_is_double_sided_whatever_the_advantage_sign():
    """PPO's clip would let these through; equation 5 does not."""
    for ratio, advantage in [(0.5, 1.0), (2.0, -1.0)]:
        assert one(math.log(ratio) - 1.0, -1.0, advantage)[1] == 0.0


def test_no_gradient_flows_through_the_ratio():
    """With it, d(r log pi)/d log pi would be r (1 + log pi), not r."""
    _, gradient = one(-1.0, -1.1)
    assert gradient == pytest.approx(-math.exp(0.1))


def test_wrong_shapes_and_bounds_are_refused():
    v = torch.zeros(3)
    with pytest.raises(ValueError, match="one length"):
        double_sided_is(v, v, v[:2], v, eps_low=0.2, eps_high=0.2, normalizer=1)
    with pytest.raises(ValueError, match="eps_low"):
        double_sided_is(v, v, v, v, eps_low=1.2, eps_high=0.2, normalizer=1)
