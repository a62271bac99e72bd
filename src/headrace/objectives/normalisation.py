"""What a batch's sum over tokens is divided by, as a weight for each token.

The weights add up to 1 over the whole batch, however it is cut up later (law L14): a sum of
weights times per-token terms over any partition is the batch's mean.
"""

from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["token_mean", "sequence_mean", "group_mean"]


def normalised_weights(
    weights: Tensor, trajectories: Tensor, groups: Tensor, normalisation: Normalisation
) -> Tensor:
    """float64 [N] >= 0, adding up to 1.

    "token_mean": every token of the batch counts the same (equation 3; DAPO), long trajectories
    more. "sequence_mean": the mean over trajectories of their means over tokens. "group_mean": the
    mean over groups of that, as equation 1 is written; it differs from "sequence_mean" when groups
    are of unequal size.

    Args:
        weights: [N] >= 0, how often each token counts, i.e. its trajectory's multiplicity; tokens
            of weight 0 count as nothing.
        trajectories: int64 [N] >= 0, to which trajectory a token belongs; one trajectory may be in
            several segments.
        groups: int64 [N] >= 0, likewise; a trajectory is in one group.
        normalisation: which.

    Raises:
        ValueError: shapes differ, no token counts, or the normalisation is unknown.
    """
    if not weights.shape == trajectories.shape == groups.shape or weights.dim() != 1:
        raise ValueError(
            f"normalised_weights: weights {tuple(weights.shape)}, trajectories "
            f"{tuple(trajectories.shape)}, groups {tuple(groups.shape)}; one length needed"
        )
    weights = weights.double()
    if not bool((weights > 0).any()):
        raise ValueError("no token of the batch has a loss weight")
    if normalisation == "token_mean":
        return weights / weights.sum()
    # A trajectory's tokens weigh alike, so dividing by their number leaves its multiplicity.
    result = weights / _totals((weights > 0).double(), trajectories)
    if normalisation == "group_mean":
        result = result / _totals(result, groups)
    elif normalisation != "sequence_mean":
        raise ValueError(
            f"normalisation {normalisation!r} is unknown; use token_mean, sequence_mean or "
            "group_mean"
        )
    return result / result.sum()


def _totals(values: Tensor, numbers: Tensor) -> Tensor:
    """At each token, the sum over those of the same number; 1 where that is 0."""
    sums = values.new_zeros(int(numbers.max()) + 1).index_add_(0, numbers, values)
    return torch.where(sums > 0, sums, 1.0)[numbers]
