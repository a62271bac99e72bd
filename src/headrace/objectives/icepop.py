"""IcePop: the clipped surrogate, calibrated by how well trainer and engine agree.

A token whose probability the two compute too differently at the same weights is popped: it would be
trained as if another policy had sampled it. Source: arXiv 2602.15763 section 3.2, equation 1.
"""

import torch
from torch import Tensor

from headrace.objectives.clipped import clipped_surrogate
from headrace.objectives.policy_tokens import (
    PolicyResult,
    Reason,
    check_vectors,
    importance_ratio,
    mark,
)


def icepop(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    beta: float,
    eps_low: float,
    eps_high: float,
) -> PolicyResult:
    """L = -sum_t w_t pop(rho_t, 1/beta, beta) min(r_t A_t, clip(r_t, 1-eps_low, 1+eps_high) A_t).

    rho_t = pi_train_old / pi_infer_old has no gradient; pop(rho) = rho where 1/beta <= rho <= beta,
    else 0. r_t = pi_train / pi_train_old.

    Args:
        logprobs: [N] log pi_train of the sampled tokens, with gradient.
        old_logprobs: [N] log pi_train_old, the trainer's at the start of the update.
        rollout_logprobs: [N] log pi_infer_old, as stamped by the engine.
        advantages: [N].
        weights: [N] >= 0, normalised over the whole batch (law L14).
        beta: > 1.
        eps_low: in (0, 1).
        eps_high: > 0.

    Raises:
        ValueError: shapes differ, or a bound is outside its range.
    """
    check_vectors("icepop", logprobs, old_logprobs, rollout_logprobs, advantages, weights)
    if beta <= 1:
        raise ValueError(f"icepop: beta {beta} must be above 1")
    live = weights > 0
    rho = importance_ratio(old_logprobs, rollout_logprobs, live)
    low, high = live & (rho < 1.0 / beta), live & (rho > beta)
    pop = torch.where(low | high, 0.0, rho)
    result = clipped_surrogate(
        logprobs, old_logprobs, advantages, weights * pop, eps_low=eps_low, eps_high=eps_high
    )
    mark(result.reasons, low, Reason.MISMATCH_LOW)
    mark(result.reasons, high, Reason.MISMATCH_HIGH)
    return result
