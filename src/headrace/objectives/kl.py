"""KL divergence of the policy from a reference, estimated from sampled tokens: k1, k2 and k3.

All are functions of the log ratio d = log pi_theta - log pi_ref at tokens that pi_theta sampled.
Source: J. Schulman, "Approximating KL divergence" (2020); GRPO (arXiv 2402.03300) uses k3.
"""

from typing import Literal

import torch
from torch import Tensor

from headrace.objectives.policy_tokens import bounded_exp, check_vectors

Estimator = Literal["k1", "k2", "k3"]


def kl_terms(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """[N] estimates of KL(pi_theta || pi_ref), with gradient into `logprobs`.

    k1 = d: unbiased, may be negative; as a loss its expected gradient is zero, so it is of use as a
    number only. k2 = d^2 / 2: biased, its gradient on policy is the KL's. k3 = e^-d - 1 + d:
    unbiased, never negative, low variance.

    Args:
        logprobs: [N] of the sampled tokens.
        reference_logprobs: [N], no gradient flows into them.
        estimator: which.

    Raises:
        ValueError: shapes differ, or the estimator is unknown.
    """
    check_vectors("kl_terms", logprobs, reference_logprobs)
    difference = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return bounded_exp(-difference) - 1.0 + difference
    raise ValueError(f"kl_terms: estimator {estimator!r} is unknown; use k1, k2 or k3")


def kl_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor, estimator: Estimator
) -> Tensor:
    """Weighted sum of `kl_terms`; tokens of weight 0 count as nothing.

    Args:
        logprobs, reference_logprobs, estimator: as in `kl_terms`.
        weights: [N] >= 0, normalised over the whole batch (law L14).
    """
    check_vectors("kl_penalty", logprobs, weights)
    live = weights > 0
    terms = kl_terms(
        torch.where(live, logprobs, 0.0), torch.where(live, reference_logprobs, 0.0), estimator
    )
    return (weights * terms).sum()
