"""The clipped surrogate of PPO and GRPO, with bounds of their own on either side (clip-higher).

Which policy is the old one is the caller's choice: the trainer's at the start of the update (GRPO),
or the engine's as it sampled (PPO on rollout log-probabilities).

Sources: PPO, arXiv 1707.06347 equation 7; GRPO, arXiv 2402.03300; clip-higher, arXiv 2503.14476.
"""

import torch
from torch import Tensor

from headrace.objectives.policy_tokens import (
    PolicyResult,
    Reason,
    bounded_exp,
    check_interval,
    check_vectors,
    importance_ratio,
    mark,
    no_reasons,
)


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> PolicyResult:
    """L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t).

    r_t = exp(log pi_theta - log pi_old). Where the clipped term is the smaller one the surrogate is
    flat: the ratio has left the interval in the direction that the advantage asks for.

    Args:
        logprobs: [N] log pi_theta of the sampled tokens, with gradient.
        old_logprobs: [N], no gradient flows into them.
        advantages: [N].
        weights: [N] >= 0, normalised over the whole batch (law L14).
        eps_low: in (0, 1).
        eps_high: > 0.

    Raises:
        ValueError: shapes differ, or a bound is outside its range.
    """
    check_vectors("clipped_surrogate", logprobs, old_logprobs, advantages, weights)
    check_interval("clipped_surrogate", eps_low, eps_high)
    live = weights > 0
    advantages = torch.where(live, advantages.detach(), 0.0)
    ratio = importance_ratio(logprobs, old_logprobs, live)
    reasons = no_reasons(ratio)
    mark(reasons, live & (advantages < 0) & (ratio < 1.0 - eps_low), Reason.CLIP_LOW)
    mark(reasons, live & (advantages > 0) & (ratio > 1.0 + eps_high), Reason.CLIP_HIGH)
    free = live & (reasons == Reason.NONE)
    bound = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    moving = bounded_exp(torch.where(free, logprobs - old_logprobs.detach(), 0.0))
    surrogate = torch.where(free, moving, bound) * advantages
    return PolicyResult(-(weights * surrogate).sum(), ratio, reasons)
