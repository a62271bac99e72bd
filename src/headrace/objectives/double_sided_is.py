"""Direct double-sided importance sampling: the objective of asynchronous agentic RL.

The rollout's own log-probabilities are the behaviour policy; no old policy is kept or recomputed.
Weights are controlled at two levels, each of which can be switched off: a token outside its
interval is masked, and so is a whole trajectory whose geometric-mean ratio is outside of another.

Source: arXiv 2602.15763 section 4.1, equations 3 to 5.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.objectives.policy_tokens import (
    LOG_RATIO_BOUND,
    PolicyResult,
    Reason,
    check_interval,
    check_vectors,
    importance_ratio,
    mark,
    no_reasons,
    score_function_loss,
)


class Interval(NamedTuple):
    """Ratios x with 1 - eps_low < x < 1 + eps_high count; eps_low in (0, 1), eps_high > 0."""

    eps_low: float
    eps_high: float


def double_sided_is(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    token: Interval | None,
    sample: Interval | None = None,
    trajectory_log_ratios: Tensor | None = None,
) -> PolicyResult:
    """L = -E_t[ f(r_t) A_t log pi_theta(a_t | s_t) ], to be minimised.

    r_t = exp(log pi_theta - log pi_rollout); f(x) = x if 1 - eps_low < x < 1 + eps_high, else 0.
    f(r_t) is a weight on the score function: no gradient flows through it. Without a token interval
    f(x) = x. With a sample interval, all tokens of a trajectory are masked whose geometric-mean
    ratio, exp of the mean of log r_t over all its trained tokens, is not inside.

    Args:
        logprobs: [N] log pi_theta of the sampled tokens, with gradient.
        rollout_logprobs: [N] log pi_rollout as stamped by the engine.
        advantages: [N] the trajectory's advantage at each of its tokens.
        weights: [N] >= 0, normalised over the whole batch (law L14).
        token: interval of each token's ratio; None masks none.
        sample: interval of each trajectory's ratio; None masks none.
        trajectory_log_ratios: [N] mean log ratio of the trajectory that the token belongs to, over
            the whole trajectory, wherever its other tokens are (see `log_ratio_sums`). Needed with
            `sample`.

    Raises:
        ValueError: shapes differ, a bound is outside its range, or the trajectories' ratios are
            missing.
    """
    check_vectors("double_sided_is", logprobs, rollout_logprobs, advantages, weights)
    live = weights > 0
    ratio = importance_ratio(logprobs, rollout_logprobs, live)
    reasons = no_reasons(ratio)
    if sample is not None:
        if trajectory_log_ratios is None:
            raise ValueError("double_sided_is: a sample interval needs trajectory_log_ratios")
        check_interval("double_sided_is, sample", *sample)
        check_vectors("double_sided_is", logprobs, trajectory_log_ratios)
        whole = trajectory_log_ratios.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        mark(reasons, live & (whole <= 1.0 - sample.eps_low), Reason.SAMPLE_LOW)
        mark(reasons, live & (whole >= 1.0 + sample.eps_high), Reason.SAMPLE_HIGH)
    if token is not None:
        check_interval("double_sided_is", *token)
        mark(reasons, live & (ratio <= 1.0 - token.eps_low), Reason.TOKEN_LOW)
        mark(reasons, live & (ratio >= 1.0 + token.eps_high), Reason.TOKEN_HIGH)
    kept = live & (reasons == Reason.NONE)
    loss = score_function_loss(logprobs, weights * advantages * ratio, kept)
    return PolicyResult(loss, ratio, reasons)


def log_ratio_sums(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    weights: Tensor,
    trajectories: Tensor,
    count: int,
) -> Tensor:
    """[2, count] float64: sum of log r_t, and number, of each trajectory's tokens of weight > 0.

    Sums over parts of a batch (micro-batches, ranks) add up to the batch's; their quotient is the
    mean log ratio of equation 4 over a trajectory. Tokens are not weighted: group padding repeats a
    trajectory whole, which leaves its mean as it is.

    Args:
        logprobs, rollout_logprobs, weights: [N].
        trajectories: int64 [N], in [0, count).
        count: trajectories of the whole batch.
    """
    check_vectors("log_ratio_sums", logprobs, rollout_logprobs, weights, trajectories)
    live = weights > 0
    ratios = torch.where(live, logprobs.detach().double() - rollout_logprobs.double(), 0.0)
    sums = torch.zeros(2, count, dtype=torch.float64, device=logprobs.device)
    return sums.index_add_(1, trajectories, torch.stack((ratios, live.double())))
