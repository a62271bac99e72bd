"""The plain policy gradient, without and with truncated importance sampling: for comparison.

Sources: REINFORCE (Williams 1992); truncated weights, V-trace's rho-bar in arXiv 1802.01561
equation 1, there over whole states' values, here over single tokens.
"""

from torch import Tensor

from headrace.objectives.policy_tokens import (
    PolicyResult,
    Reason,
    check_vectors,
    importance_ratio,
    mark,
    no_reasons,
    score_function_loss,
)


def policy_gradient(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, weights: Tensor
) -> PolicyResult:
    """L = -sum_t w_t A_t log pi_theta(a_t | s_t): as if pi_theta had sampled. No correction.

    Args:
        logprobs: [N] of the sampled tokens, with gradient.
        rollout_logprobs: [N], for the reported ratio only.
        advantages: [N].
        weights: [N] >= 0, normalised over the whole batch (law L14).

    Raises:
        ValueError: shapes differ.
    """
    check_vectors("policy_gradient", logprobs, rollout_logprobs, advantages, weights)
    live = weights > 0
    loss = score_function_loss(logprobs, weights * advantages, live)
    ratio = importance_ratio(logprobs, rollout_logprobs, live)
    return PolicyResult(loss, ratio, no_reasons(ratio))


def truncated_is(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    cap: float,
) -> PolicyResult:
    """L = -sum_t w_t min(r_t, cap) A_t log pi_theta(a_t | s_t).

    No gradient flows through the weight. Unlike double-sided masking a token beyond the cap keeps
    its gradient, at the cap's weight.

    Args:
        logprobs, rollout_logprobs, advantages, weights: as in `policy_gradient`.
        cap: largest importance weight, > 0.

    Raises:
        ValueError: shapes differ, or the cap is not above 0.
    """
    check_vectors("truncated_is", logprobs, rollout_logprobs, advantages, weights)
    if cap <= 0:
        raise ValueError(f"truncated_is: cap {cap} must be above 0")
    live = weights > 0
    ratio = importance_ratio(logprobs, rollout_logprobs, live)
    loss = score_function_loss(logprobs, weights * advantages * ratio.clamp(max=cap), live)
    reasons = no_reasons(ratio)
    mark(reasons, live & (ratio > cap), Reason.TRUNCATED)
    return PolicyResult(loss, ratio, reasons)
