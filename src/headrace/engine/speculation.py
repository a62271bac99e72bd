"""Which drafted tokens may stand, so that the output is distributed as if nothing had been drafted.

A draft model guesses k tokens, the target model computes its distributions at all k + 1 positions
in one pass, and `accept_drafts` decides. Random numbers are pure functions of (seed, output index),
each index and purpose with its own, so nothing here has state.

There are two kinds of drafts:

    Predictions: the likeliest id of the draft model, an n-gram seen before, or a draw of the draft
    model by the very number the target will be drawn with (lane TOKEN). The target's token is drawn
    as always, and the draft stands while it equals it. Tokens are those of plain decoding, one by
    one, whatever and however many were drafted. For a draft fixed beforehand this is rejection
    sampling with a one-hot proposal. Sharing the number lets both draws fall into the same part of
    two similar distributions, which agrees often where few ids hold most of the mass and seldom
    where many do (common random numbers; Daliri, Musco and Suresh, arXiv 2408.07978, study such
    couplings and better ones).
    Proposals, drawn from known probabilities q with numbers of their own (lane DRAFT). Draft d is
    accepted with probability min(1, p(d) / q(d)), and the first one refused is replaced by a draw
    from the residual (p - q)+ (Leviathan et al., arXiv 2211.17192, theorem 1; Chen et al.,
    arXiv 2302.01318, algorithm 2). No rule accepts more often, and the output has the target's
    distribution, but which tokens it consists of depends on the drafts.

An engine that verifies predictions needs no probabilities: `SamplingBatch.sample` over k + 1 rows
draws the target's tokens, and `matching_prefix` counts the drafts that stand.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.sampling import SEED_MASK, Lane, invert_cdf, log_probability, uniform


class Acceptance(NamedTuple):
    """What became of k drafts.

    Attributes:
        accepted: how many of the first drafts stand, 0 to k.
        next_id: the token after them: a replacement, or one more when all stand.
        logprobs: of the accepted drafts and of next_id under the target, accepted + 1 numbers.
    """

    accepted: int
    next_id: int
    logprobs: tuple[float, ...]


def matching_prefix(ids: Sequence[int], drafts: Sequence[int]) -> int:
    """How many first drafts equal what the target drew at their positions."""
    for count, (token, draft) in enumerate(zip(ids, drafts, strict=False)):
        if token != draft:
            return count
    return min(len(ids), len(drafts))


def accept_drafts(
    target_probabilities: Tensor,
    draft_ids: Sequence[int],
    draft_probabilities: Tensor | None,
    seed: int,
    drawn: int,
    *,
    greedy: bool = False,
) -> Acceptance:
    """Accept a prefix of the drafts and draw the token after it.

    Args:
        target_probabilities: [k + 1, V] floating point, rows that sum to 1: the target's
            distribution after the prompt, the output, and the first 0 .. k drafts, with all
            sampling parameters applied (`SamplingBatch.distribution`).
        draft_ids: k drafts; k may be 0.
        draft_probabilities: [k, V], the distributions the drafts were drawn from by numbers other
            than lanes TOKEN, ACCEPT and RESIDUAL; None for predictions. The filters of
            the target need not have been applied.
        seed: of the request.
        drawn: tokens the request has drawn, not counting drafts.
        greedy: the target takes its likeliest id (the lowest of equals) instead of drawing; drafts
            stand while they equal it, whatever they were drawn from.

    Raises:
        ValueError: shapes disagree, or a draft has probability 0 under what it was drawn from.
    """
    k = len(draft_ids)
    if target_probabilities.dim() != 2 or target_probabilities.shape[0] != k + 1:
        raise ValueError(
            f"{k} drafts need target probabilities [{k + 1}, V], not "
            f"{list(target_probabilities.shape)}"
        )
    if draft_probabilities is not None and (
        draft_probabilities.shape != target_probabilities[:k].shape
    ):
        raise ValueError(
            f"draft probabilities are {list(draft_probabilities.shape)}, not "
            f"{list(target_probabilities[:k].shape)}"
        )
    if greedy:
        ids = target_probabilities.max(-1).indices.tolist()
        return _matched(target_probabilities, ids, draft_ids)
    if draft_probabilities is None:
        draws = _uniform(seed, drawn, k + 1, Lane.TOKEN)[:, None]
        ids = invert_cdf(target_probabilities, draws)[:, 0].tolist()
        return _matched(target_probabilities, ids, draft_ids)
    return _rejected(target_probabilities, draft_ids, draft_probabilities, seed, drawn)


def _matched(target: Tensor, ids: Sequence[int], drafts: Sequence[int]) -> Acceptance:
    accepted = matching_prefix(ids, drafts)
    return _acceptance(target, drafts[:accepted], ids[accepted])


def _rejected(
    target: Tensor, drafts: Sequence[int], proposals: Tensor, seed: int, drawn: int
) -> Acceptance:
    """Rejection sampling of stochastic drafts."""
    tests = _uniform(seed, drawn, len(drafts), Lane.ACCEPT).tolist()
    for i, draft in enumerate(drafts):
        p, q = float(target[i, draft]), float(proposals[i, draft])
        if not q > 0:
            raise ValueError(f"draft {i} is id {draft}, which has probability {q} in its proposal")
        if tests[i] * q < p:
            continue
        residual = (target[i].double() - proposals[i].double()).clamp_(min=0.0)
        if not bool(residual.sum() > 0):
            # Equal distributions up to rounding, which should have accepted: nothing is left over.
            residual = target[i].double()
        return _acceptance(target, drafts[:i], _draw(residual, seed, drawn + i, Lane.RESIDUAL))
    last = len(drafts)
    return _acceptance(target, drafts, _draw(target[last], seed, drawn + last, Lane.TOKEN))


def _draw(weights: Tensor, seed: int, counter: int, lane: Lane) -> int:
    draws = _uniform(seed, counter, 1, lane)[:, None]
    return int(invert_cdf(weights[None], draws))


def _acceptance(target: Tensor, accepted: Sequence[int], next_id: int) -> Acceptance:
    ids = [*accepted, next_id]
    chosen = target[torch.arange(len(ids)), torch.tensor(ids)].tolist()
    return Acceptance(len(accepted), next_id, tuple(log_probability(p) for p in chosen))


def _uniform(seed: int, first: int, count: int, lane: Lane) -> np.ndarray:
    seeds = np.full(count, seed & SEED_MASK, dtype=np.uint64)
    return uniform(seeds, np.arange(first, first + count, dtype=np.uint64), lane)
