"""Random tokens for policy-gradient objectives, and the loss of each written from its formula.

The references know Python floats only: one token at a time, gradients by hand, no tensors.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from headrace.objectives.policy_tokens import PolicyResult

Reference = Callable[..., tuple[float, float]]
"""(new, old, rollout, advantage) -> (loss of the token, its derivative by `new`)."""

tokens = st.lists(
    st.tuples(
        st.floats(-8, -1e-3),
        st.floats(-1.5, 1.5),
        st.floats(-1.5, 1.5),
        st.floats(-2, 2),
        st.sampled_from([0.0, 0.125, 0.25, 0.5]),
    ),
    max_size=16,
)
"""(new logprob, old - new, rollout - old, advantage, weight) of each token."""


def vectors(drawn: list[tuple[float, ...]]) -> list[Tensor]:
    """float64 new (a leaf), old, rollout, advantages, weights."""
    columns = torch.tensor(drawn, dtype=torch.float64).reshape(-1, 5).unbind(1)
    new = columns[0].clone().requires_grad_()
    old = columns[0] + columns[1]
    return [new, old, old + columns[2], columns[3], columns[4]]


def check_reference(
    objective: Callable[..., PolicyResult], reference: Reference, drawn: Any
) -> None:
    """Loss and gradient equal the sums over tokens of the formula's."""
    new, old, rollout, advantages, weights = vectors(drawn)
    result = objective(new, old, rollout, advantages, weights)
    result.loss.backward()
    loss, gradient = 0.0, []
    for n, o, r, a, w in zip(
        *(v.tolist() for v in (new, old, rollout, advantages, weights)), strict=True
    ):
        value, slope = reference(n, o, r, a)
        loss += w * value
        gradient.append(w * slope)
    assert result.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-10)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-10)


def check_partition(objective: Callable[..., PolicyResult], drawn: Any) -> None:
    """The parts of a batch add up to the batch."""
    whole = objective(*vectors(drawn)).loss.item()
    parts = [objective(*vectors(drawn[i : i + 3])).loss.item() for i in range(0, len(drawn), 3)]
    assert math.fsum(parts) == pytest.approx(whole, rel=1e-9, abs=1e-10)


def check_extremes(objective: Callable[..., PolicyResult]) -> None:
    """Infinities in tokens that count as nothing, and huge ratios, leave everything finite."""
    inf, nan = math.inf, math.nan
    for dtype in (torch.float32, torch.float64):
        for advantage in (1.0, -1.0):
            new = torch.tensor([-1.0, -inf, nan, -900.0, -1e-9], dtype=dtype, requires_grad=True)
            old = torch.tensor([-1.0, -1.0, -1.0, -1e-9, -900.0], dtype=dtype)
            weights = torch.tensor([0.3, 0.0, 0.0, 0.3, 0.4], dtype=dtype)
            advantages = torch.full_like(old, advantage)
            result = objective(new, old, old.clone(), advantages, weights)
            result.loss.backward()
            assert new.grad is not None
            assert bool(torch.isfinite(result.loss))
            assert bool(torch.isfinite(new.grad).all())
            assert new.grad[1:3].tolist() == [0.0, 0.0]
    nothing = torch.zeros(0, requires_grad=True)
    result = objective(nothing, *(torch.zeros(0),) * 4)
    result.loss.backward()
    assert result.loss.item() == 0.0
    bad = torch.tensor([nan], requires_grad=True)
    ones = torch.ones(1)
    assert math.isnan(objective(bad, -ones, -ones, ones, ones).loss.item()), "a bug was hidden"


def one(
    objective: Callable[..., PolicyResult],
    *,
    new: float = 0.0,
    old: float = 0.0,
    rollout: float = 0.0,
    advantage: float = 1.0,
) -> tuple[PolicyResult, float]:
    """Result and gradient of a single token of weight 1, its log-probabilities less 3."""
    leaf = torch.tensor([new - 3.0], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([v], dtype=torch.float64) for v in (old - 3, rollout - 3, advantage, 1))
    result = objective(leaf, *others)
    result.loss.backward()
    assert leaf.grad is not None
    return result, leaf.grad.item()
