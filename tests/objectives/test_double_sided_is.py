"""Equations 3 to 5, token and sample level, against a reference written from the formulas."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import check_extremes, check_partition, check_reference, one, tokens

from headrace.objectives.double_sided_is import Interval, double_sided_is, log_ratio_sums
from headrace.objectives.policy_tokens import Reason

LOW, HIGH = 0.2, 0.28
TOKEN = Interval(LOW, HIGH)


def objective(new, old, rollout, advantages, weights, token: Interval | None = TOKEN):
    return double_sided_is(new, rollout, advantages, weights, token=token)


def reference(new, old, rollout, advantage, masks=True):
    r = math.exp(new - rollout)
    f = r if not masks or 1 - LOW < r < 1 + HIGH else 0.0
    return -f * advantage * new, -f * advantage


@settings(max_examples=60, deadline=None)
@given(tokens)
def test_loss_and_gradient_equal_the_reference(drawn):
    check_reference(objective, reference, drawn)
    check_reference(partial(objective, token=None), partial(reference, masks=False), drawn)
    check_partition(objective, drawn)


def test_nothing_becomes_nan_through_masked_tokens():
    check_extremes(objective)
    check_extremes(partial(objective, token=None))


def test_a_masked_token_may_be_impossible():
    """log pi = -inf: 0 * -inf would be nan."""
    new = torch.tensor([-math.inf, -1.0], requires_grad=True)
    result = objective(new, None, -torch.ones(2), torch.ones(2), torch.ones(2))
    result.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -1.0]
    assert result.reasons.tolist() == [Reason.TOKEN_LOW, Reason.NONE]


@pytest.mark.parametrize(
    ("ratio", "reason"), [(0.79, Reason.TOKEN_LOW), (1.29, Reason.TOKEN_HIGH), (1.2, Reason.NONE)]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_masking_is_double_sided_whatever_the_advantage_sign(ratio, reason, advantage):
    """PPO's clip would let half of these through; equation 5 does not."""
    result, gradient = one(objective, new=math.log(ratio), advantage=advantage)
    assert result.reasons.item() == reason
    assert (gradient == 0.0) == (reason is not Reason.NONE)


def test_no_gradient_flows_through_the_ratio():
    """With it, d(r log pi)/d log pi would be r (1 + log pi), not r."""
    _, gradient = one(objective, new=0.1)
    assert gradient == pytest.approx(-math.exp(0.1))


def sample_reference(new, rollout, numbers, token, sample):
    """Which tokens are kept, by brute force over trajectories."""
    kept = []
    for n, r, k in zip(new, rollout, numbers, strict=True):
        own = [a - b for a, b, j in zip(new, rollout, numbers, strict=True) if j == k]
        whole = math.exp(sum(own) / len(own))
        kept.append(
            (sample is None or 1 - sample[0] < whole < 1 + sample[1])
            and (token is None or 1 - token[0] < math.exp(n - r) < 1 + token[1])
        )
    return kept


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-5, -0.1), st.floats(-0.5, 0.5), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
    st.booleans(),
    st.integers(1, 7),
)
def test_both_levels_mask_independently_and_a_trajectory_may_be_spread(drawn, masks, whole, cut):
    token, sample = (TOKEN if masks else None), (Interval(0.05, 0.1) if whole else None)
    new = torch.tensor([t[0] for t in drawn], dtype=torch.float64, requires_grad=True)
    rollout = new.detach() + torch.tensor([t[1] for t in drawn], dtype=torch.float64)
    numbers = torch.tensor([t[2] for t in drawn])
    ones = torch.ones_like(rollout)
    parts = [slice(i, i + cut) for i in range(0, len(drawn), cut)]
    sums = [log_ratio_sums(new[p], rollout[p], ones[p], numbers[p], 4) for p in parts]
    total, count = torch.stack(sums).sum(0)
    means = (total / count.clamp(min=1))[numbers]
    kept = []
    for p in parts:
        result = double_sided_is(
            new[p],
            rollout[p],
            ones[p],
            ones[p],
            token=token,
            sample=sample,
            trajectory_log_ratios=means[p],
        )
        result.loss.backward()
        kept += (result.reasons == Reason.NONE).tolist()
    wanted = sample_reference(new.tolist(), rollout.tolist(), numbers.tolist(), token, sample)
    assert kept == wanted
    ratios = (new.detach() - rollout).exp()
    assert new.grad is not None
    torch.testing.assert_close(-new.grad, torch.where(torch.tensor(wanted), ratios, 0.0))


def test_a_masked_sample_says_on_which_side():
    new, weights = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([1.0, 1.0, 0.0])
    for shift, reason in ((-0.2, Reason.SAMPLE_LOW), (0.2, Reason.SAMPLE_HIGH)):
        result = double_sided_is(
            new,
            new.clone(),
            weights,
            weights,
            token=TOKEN,
            sample=Interval(0.1, 0.1),
            trajectory_log_ratios=torch.full((3,), shift),
        )
        assert result.reasons.tolist() == [reason, reason, Reason.NONE]


def test_wrong_shapes_and_bounds_are_refused():
    v = torch.zeros(3)
    with pytest.raises(ValueError, match="one length"):
        double_sided_is(v, v, v[:2], v, token=TOKEN)
    with pytest.raises(ValueError, match=r"eps_low 1\.2"):
        double_sided_is(v, v, v, v, token=Interval(1.2, 0.2))
    with pytest.raises(ValueError, match="trajectory_log_ratios"):
        double_sided_is(v, v, v, v, token=None, sample=TOKEN)
