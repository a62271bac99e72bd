"""Draws the next token for a whole batch of requests at once, each with its own parameters.

A draw is a pure function of (request seed, how many tokens the request has drawn): a hashed counter
becomes a uniform number, and inverse CDF turns it into a token. Neighbours in the batch therefore
never influence what a request draws, and a resubmitted request draws the same numbers again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine.types import SamplingParams

SEED_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_NUCLEUS_GUESS = 256
"""Most nuclei fit in this many tokens; sorting only these saves sorting a whole vocabulary."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit moves every output."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, counter) pair; both [n].

    Only 52 bits are used, so that `u * total` stays strictly below `total` after rounding.
    """
    bits = _mix(_mix(seeds + _GAMMA) + counters * _GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


class SamplingBatch:
    """Parameters of n requests laid out for vectorised sampling; rebuilt when the batch changes.

    Args:
        params: one per row.
        seeds: one per row, any int (its low 64 bits count).
        drawn: tokens each row has drawn so far.
    """

    def __init__(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], drawn: Sequence[int]
    ) -> None:
        self._seeds = np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64)
        self._drawn = np.array(drawn, dtype=np.uint64)
        temperatures = [p.temperature or 1.0 for p in params]
        self._inverse_temperature = (
            None
            if all(t == 1.0 for t in temperatures)
            else torch.tensor([1.0 / t for t in temperatures])[:, None]
        )
        greedy = [p.temperature == 0 for p in params]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy) if any(greedy) else None
        filtered = [
            i for i, p in enumerate(params) if p.temperature and (p.top_k > 0 or p.top_p < 1)
        ]
        self._filtered = torch.tensor(filtered) if filtered else None
        self._top_k = [params[i].top_k for i in filtered]
        # A total of 1 may round to just below it, so "keep all" must lie out of reach.
        self._top_p = torch.tensor(
            [params[i].top_p if params[i].top_p < 1 else 2.0 for i in filtered]
        )[:, None]

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token per row and advance the counters.

        Args:
            logits: [n, V], any float dtype.

        Returns:
            ids [n] int64 and logprobs [n] float32, the latter of the distribution drawn from
            (greedy rows: of the temperature-1 distribution). A row whose logits are not finite
            gets a NaN logprob.
        """
        scores = logits.float()
        if self._inverse_temperature is not None:
            scores = scores * self._inverse_temperature
        probabilities = torch.softmax(scores, -1)
        if self._all_greedy:
            best, ids = probabilities.max(-1)
            self._drawn += np.uint64(1)
            return ids, best.log()
        draws = torch.from_numpy(uniform(self._seeds, self._drawn))[:, None]
        self._drawn += np.uint64(1)
        ids = _invert_cdf(probabilities, draws)
        if self._greedy is not None:
            ids = torch.where(self._greedy[:, None], probabilities.argmax(-1, keepdim=True), ids)
        logprobs = probabilities.gather(-1, ids).log()
        if self._filtered is not None:
            rows = self._filtered
            ids[rows], logprobs[rows] = self._sample_filtered(scores[rows], draws[rows])
        return ids[:, 0], logprobs[:, 0]

    def _sample_filtered(self, scores: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k, then top-p of what is left, then draw. scores [m, V], draws [m, 1]."""
        vocab = scores.shape[-1]
        top_k = torch.tensor([min(k, vocab) or vocab for k in self._top_k])[:, None]
        everything = torch.logsumexp(scores, -1, keepdim=True)
        open_rows = top_k == vocab
        width = int(top_k.masked_fill(open_rows, 1).max())
        if bool(open_rows.any()):
            width = min(vocab, max(width, _NUCLEUS_GUESS))
        while True:
            values, order = scores.topk(width, -1)
            values = values.masked_fill(torch.arange(width) >= top_k, -torch.inf)
            total = torch.where(open_rows, everything, torch.logsumexp(values, -1, keepdim=True))
            mass = (values - total).exp()
            before = mass.cumsum(-1) - mass
            enough = before[:, -1:] + mass[:, -1:] >= self._top_p
            if width == vocab or not bool((open_rows & ~enough).any()):
                break
            width = vocab
        outside = before >= self._top_p
        outside[:, 0] = False
        kept = torch.softmax(values.masked_fill(outside, -torch.inf), -1)
        choice = _invert_cdf(kept, draws)
        return order.gather(-1, choice), kept.gather(-1, choice).log()


def _invert_cdf(probabilities: Tensor, draws: Tensor) -> Tensor:
    """First index whose cumulative probability exceeds the draw: [n, V], [n, 1] -> [n, 1].

    float64 sums keep the tail of a large vocabulary unbiased; `right=True` never picks an id of
    probability zero.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return ids.clamp_(max=probabilities.shape[-1] - 1)
