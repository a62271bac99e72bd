"""Multi-token prediction: which token each step reads and predicts, and how steps add up.

Works on packed rows of documents. A step never looks beyond the document it started in: there the
weight is 0, and causal attention keeps the filler ids away from every position that counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.objectives.language_model import weighted_nll


class MtpTargets(NamedTuple):
    """Inputs and targets of one prediction step over N packed tokens.

    Attributes:
        next_ids: int64 [N], token t + step + 1 at position t; 0 beyond the document's end.
        where: int64 [M], the positions whose prediction has a weight, ascending.
        targets: int64 [M], token where + step + 2.
        weights: float32 [M], that token's loss weight.
    """

    next_ids: Tensor
    where: Tensor
    targets: Tensor
    weights: Tensor


def mtp_targets(ids: Tensor, weights: Tensor, lengths: Sequence[int], step: int) -> MtpTargets:
    """Targets of prediction step `step` (0-based; the main model would be step -1).

    Worked example, one document a b c d, all weights 1, step 0: next_ids = b c d 0; position 0
    predicts c and position 1 predicts d; positions 2 and 3 predict nothing.

    Args:
        ids: int64 [N], documents one after the other.
        weights: float32 [N], loss weight of each token as a target.
        lengths: tokens of each document; they sum to N.
        step: >= 0.

    Raises:
        ValueError: the lengths do not sum to N, or a negative step.
    """
    count = ids.shape[0]
    if sum(lengths) != count or weights.shape[0] != count or step < 0:
        raise ValueError(
            f"mtp_targets: {count} ids, {weights.shape[0]} weights, documents of "
            f"{sum(lengths)} tokens in all, step {step}"
        )
    # Documents are few and tokens many: one repeat gives every token the end of its document.
    sizes = torch.tensor(lengths, dtype=torch.int64, device=ids.device)
    left = sizes.cumsum(0).repeat_interleave(sizes) - torch.arange(count, device=ids.device)
    shift = step + 1
    next_ids = torch.where(left > shift, _shifted(ids, shift), 0)
    trained = torch.where(left > shift + 1, _shifted(weights, shift + 1), 0.0)
    where = trained.nonzero()[:, 0]
    return MtpTargets(next_ids, where, ids[where + shift + 1], trained[where])


def mtp_weight_sums(weights: Tensor, lengths: Sequence[int], depth: int) -> Tensor:
    """float64 [depth], the weight that each step trains; summed over a batch, its normaliser.

    Args:
        weights: float32 [N]; lengths: as in `mtp_targets`; depth: number of steps.
    """
    sums = torch.zeros(depth, dtype=torch.float64)
    for document in weights.split(list(lengths)):
        for step in range(depth):
            sums[step] += document[step + 2 :].double().sum()
    return sums


def mtp_loss(
    logprobs: Sequence[Tensor], weights: Sequence[Tensor], normalizers: Sequence[float]
) -> Tensor:
    """Mean over the D steps of each step's weighted negative log-likelihood.

    A step that trains nothing anywhere in the batch (normaliser 0) counts as 0. Source: DeepSeek-V3
    (arXiv 2412.19437) equations 24 and 25, without the factor lambda.

    Args:
        logprobs: D tensors [M_j]; weights: D tensors [M_j].
        normalizers: D weight sums over the whole batch, >= 0 (law L14).

    Raises:
        ValueError: not D of each, or D is 0.
    """
    if not logprobs or len({len(logprobs), len(weights), len(normalizers)}) != 1:
        raise ValueError(
            f"mtp_loss: {len(logprobs)} logprobs, {len(weights)} weights and "
            f"{len(normalizers)} normalizers; one of each per step needed"
        )
    terms = [
        weighted_nll(logprob, weight, normalizer or 1.0)
        for logprob, weight, normalizer in zip(logprobs, weights, normalizers, strict=True)
    ]
    return torch.stack(terms).mean()


def _shifted(values: Tensor, by: int) -> Tensor:
    """values[t + by], 0 past the end."""
    return torch.cat((values[by:], values.new_zeros(min(by, values.shape[0]))))
