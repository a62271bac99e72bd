"""PPO's and GRPO's surrogate against min(r A, clip(r) A) written out, and against autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from policy_cases import check_extremes, check_partition, check_reference, one, tokens, vectors

from headrace.objectives.clipped import clipped_surrogate
from headrace.objectives.policy_tokens import Reason

LOW, HIGH = 0.2, 0.28


def objective(new, old, rollout, advantages, weights):
    return clipped_surrogate(new, old, advantages, weights, eps_low=LOW, eps_high=HIGH)


def reference(new, old, rollout, advantage):
    r = math.exp(new - old)
    clipped = min(max(r, 1 - LOW), 1 + HIGH)
    if r * advantage <= clipped * advantage:
        return -r * advantage, -r * advantage
    return -clipped * advantage, 0.0


@settings(max_examples=60, deadline=None)
@given(tokens)
def test_loss_and_gradient_equal_the_reference(drawn):
    check_reference(objective, reference, drawn)
    check_partition(objective, drawn)


@settings(max_examples=30, deadline=None)
@given(tokens)
def test_autograd_of_the_plain_formula_agrees(drawn):
    new, old, _, advantages, weights = vectors(drawn)
    r = (new - old).exp()
    plain = torch.minimum(r * advantages, r.clamp(1 - LOW, 1 + HIGH) * advantages)
    (wanted,) = torch.autograd.grad(-(weights * plain).sum(), new)
    (found,) = torch.autograd.grad(objective(new, old, None, advantages, weights).loss, new)
    torch.testing.assert_close(found, wanted)


def test_gradcheck():
    drawn = [(-1.0, d, 0.0, a, 0.25) for d in (-0.5, -0.1, 0.1, 0.5) for a in (-1.0, 1.0)]
    new, *rest = vectors(drawn)
    assert torch.autograd.gradcheck(lambda x: objective(x, *rest).loss, (new,))


def test_nothing_becomes_nan_through_clipped_tokens():
    check_extremes(objective)


@pytest.mark.parametrize(
    ("ratio", "advantage", "reason"),
    [
        (1.27, 1.0, Reason.NONE),  # clip-higher lets more through than 1 + eps_low would
        (1.29, 1.0, Reason.CLIP_HIGH),
        (1.29, -1.0, Reason.NONE),
        (0.79, -1.0, Reason.CLIP_LOW),
        (0.79, 1.0, Reason.NONE),
    ],
)
def test_only_moves_that_the_advantage_asks_for_are_clipped(ratio, advantage, reason):
    result, gradient = one(objective, new=math.log(ratio), advantage=advantage)
    assert result.reasons.item() == reason
    assert (gradient == 0.0) == (reason is not Reason.NONE)
