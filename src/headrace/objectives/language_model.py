"""The weighted next-token loss, from log-probabilities (`ops.linear_cross_entropy` gives them)."""

from torch import Tensor


def weighted_nll(logprobs: Tensor, weights: Tensor, normalizer: float) -> Tensor:
    """Sum of -logprob times weight over `normalizer`.

    The normalizer is the whole batch's weight sum, not this micro-batch's, so that the loss does
    not depend on how the batch was cut up (law L14).

    Args:
        logprobs: [N]; weights: [N] >= 0; normalizer: > 0.
    """
    return -(logprobs * weights).sum() / normalizer
