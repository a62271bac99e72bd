"""What policy-gradient objectives have in common: ratios, and reasons why a token counts not.

An objective takes vectors over N sampled tokens and weights that already hold the normalisation
(see `normalisation`), and gives a `PolicyResult`. A token of weight 0 counts as nothing, whatever
its other values are; numbers of tokens that an objective masks never reach the loss or a gradient,
so that an infinity there does not become a nan. A nan in a token that counts stays visible.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios are bounded to e^-20 .. e^20; every objective here treats those beyond alike anyway."""


class Reason(IntEnum):
    """Why a token has no gradient, or a bounded one; low: the ratio is too small, high: too large.

    TOKEN: outside the token's trust region. SAMPLE: its whole trajectory is outside its own.
    MISMATCH: trainer and engine disagree about the policy that sampled it. CLIP: the surrogate is
    flat there. TRUNCATED: its weight is bounded; the gradient stays.
    """

    NONE = 0
    TOKEN_LOW = 1
    TOKEN_HIGH = 2
    SAMPLE_LOW = 3
    SAMPLE_HIGH = 4
    MISMATCH_LOW = 5
    MISMATCH_HIGH = 6
    CLIP_LOW = 7
    CLIP_HIGH = 8
    TRUNCATED = 9


LOW_REASONS = (Reason.TOKEN_LOW, Reason.SAMPLE_LOW, Reason.MISMATCH_LOW, Reason.CLIP_LOW)
HIGH_REASONS = (Reason.TOKEN_HIGH, Reason.SAMPLE_HIGH, Reason.MISMATCH_HIGH, Reason.CLIP_HIGH)


class PolicyResult(NamedTuple):
    """What an objective makes of N tokens.

    Attributes:
        loss: scalar with gradient, to be minimised; the sum over tokens, weights included.
        ratio: [N] the ratio that the objective judges, without gradient; 1 for weight 0.
        reasons: uint8 [N] of `Reason`.
    """

    loss: Tensor
    ratio: Tensor
    reasons: Tensor


def check_vectors(name: str, *vectors: Tensor) -> None:
    """Refuse anything but vectors of one length.

    Raises:
        ValueError: naming the objective and the shapes.
    """
    shapes = {tuple(vector.shape) for vector in vectors}
    if len(shapes) != 1 or vectors[0].dim() != 1:
        raise ValueError(f"{name}: vectors of one length needed, got {sorted(shapes)}")


def check_interval(name: str, eps_low: float, eps_high: float) -> None:
    """Refuse intervals that 1 is not inside of.

    Raises:
        ValueError: a bound is outside its range.
    """
    if not (0 < eps_low < 1 and eps_high > 0):
        raise ValueError(
            f"{name}: eps_low {eps_low}, eps_high {eps_high}; eps_low must be in (0, 1) and "
            "eps_high above 0"
        )


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), bounded below at e^-20 and continued as a straight line above e^20."""
    inside = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return inside.exp() * (1.0 + (x - inside).clamp(min=0.0))


def importance_ratio(new: Tensor, old: Tensor, live: Tensor) -> Tensor:
    """exp(new - old), bounded, without gradient; 1 where `live` is False.

    Args:
        new, old: [N] log-probabilities.
        live: bool [N].
    """
    difference = torch.where(live, new.detach() - old.detach(), 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def mark(reasons: Tensor, where: Tensor, reason: Reason) -> None:
    """Give tokens a reason, in place; one they have already stays."""
    reasons.masked_fill_(where & (reasons == Reason.NONE), int(reason))


def no_reasons(like: Tensor) -> Tensor:
    """uint8 zeros, one per token."""
    return torch.zeros(like.shape, dtype=torch.uint8, device=like.device)


def score_function_loss(logprobs: Tensor, factors: Tensor, kept: Tensor) -> Tensor:
    """-sum of factors * logprobs over the kept tokens; no gradient flows into the factors."""
    factors = torch.where(kept, factors.detach(), 0.0)
    return -(factors * torch.where(kept, logprobs, 0.0)).sum()
