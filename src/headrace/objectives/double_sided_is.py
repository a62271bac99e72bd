"""Direct double-sided importance sampling: the objective of asynchronous agentic RL.

Source: arXiv 2602.15763 section 4.1, equations 3 to 5. The rollout's own log-probabilities are the
behaviour policy; no old policy is kept or recomputed.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DoubleSidedResult(NamedTuple):
    """Outcome of one micro-batch.

    Attributes:
        loss: scalar with gradient.
        ratio: [N] r_t of equation 4, without gradient.
        masked_low: [N] bool, r_t <= 1 - eps_low.
        masked_high: [N] bool, r_t >= 1 + eps_high.
    """

    loss: Tensor
    ratio: Tensor
    masked_low: Tensor
    masked_high: Tensor


def double_sided_is(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    normalizer: float,
) -> DoubleSidedResult:
    """L = -E_t[ f(r_t) A_t log pi_theta(a_t | s_t) ], to be minimised.

    r_t = exp(log pi_theta - log pi_rollout); f(x) = x if 1 - eps_low < x < 1 + eps_high, else 0.
    f(r_t) is a weight on the score function: no gradient flows through it.

    Args:
        logprobs: [N] log pi_theta of the sampled tokens, with gradient.
        rollout_logprobs: [N] log pi_rollout as stamped by the engine.
        advantages: [N] the trajectory's advantage at each of its tokens.
        weights: [N] >= 0, how often each token counts (group padding repeats trajectories).
        eps_low: in (0, 1).
        eps_high: > 0.
        normalizer: sum of weights over the whole batch, > 0 (law L14).

    Raises:
        ValueError: shapes differ, or a bound is outside its range.
    """
    shapes = {tuple(t.shape) for t in (logprobs, rollout_logprobs, advantages, weights)}
    if len(shapes) != 1 or logprobs.dim() != 1:
        raise ValueError(f"double_sided_is: four vectors of one length needed, got {shapes}")
    if not 0 < eps_low < 1 or eps_high <= 0 or normalizer <= 0:
        raise ValueError(
            f"double_sided_is: eps_low {eps_low}, eps_high {eps_high}, normalizer {normalizer}"
        )
    # The difference is clamped only against overflow in exp; e^20 is masked on either side anyway.
    ratio = (logprobs.detach() - rollout_logprobs).clamp(-20.0, 20.0).exp()
    masked_low = ratio <= 1.0 - eps_low
    masked_high = ratio >= 1.0 + eps_high
    calibrated = torch.where(masked_low | masked_high, torch.zeros_like(ratio), ratio)
    loss = -(calibrated * advantages * weights * logprobs).sum() / normalizer
    return DoubleSidedResult(loss, ratio, masked_low, masked_high)
