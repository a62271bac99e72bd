"""The uncorrected policy gradient and truncated importance sampling."""

import math

import pytest
import torch
from hypothesis import given, settings
from policy_cases import check_extremes, check_partition, check_reference, one, tokens

from headrace.objectives.policy_tokens import Reason
from headrace.objectives.score_function import policy_gradient, truncated_is

CAP = 1.5


def uncorrected(new, old, rollout, advantages, weights):
    return policy_gradient(new, rollout, advantages, weights)


def truncated(new, old, rollout, advantages, weights):
    return truncated_is(new, rollout, advantages, weights, cap=CAP)


def truncated_reference(new, old, rollout, advantage):
    weight = min(math.exp(new - rollout), CAP)
    return -weight * advantage * new, -weight * advantage


@settings(max_examples=60, deadline=None)
@given(tokens)
def test_losses_and_gradients_equal_the_references(drawn):
    check_reference(uncorrected, lambda n, o, r, a: (-a * n, -a), drawn)
    check_reference(truncated, truncated_reference, drawn)
    check_partition(truncated, drawn)


def test_extremes_stay_finite():
    check_extremes(uncorrected)
    check_extremes(truncated)


def test_a_truncated_token_keeps_its_gradient():
    result, gradient = one(truncated, new=2.0)
    assert gradient == -CAP
    assert result.reasons.item() == Reason.TRUNCATED
    with pytest.raises(ValueError, match="cap 0"):
        truncated_is(*(torch.zeros(1),) * 4, cap=0.0)
