"""Draws the next token for a whole batch of requests at once, each with its own parameters.

A draw is a pure function of (request seed, how many tokens the request has drawn): a hashed counter
becomes a uniform number, and inverse CDF turns it into a token. Neighbours in the batch therefore
never influence what a request draws, and a resubmitted request draws the same numbers again.

The same holds for every number computed on the way, to the bit. The ops `draw_tokens` and
`token_logprobs` promise it; for rows with filters, whose probabilities have to be sorted, it rules
some torch operations out: a reduction over [n, V] may split a single row among threads, and a
vectorised exp or log may treat the last few elements of a tensor differently. Used here are
softmax, max, topk, cumsum and sums of short blocks, which work on each row by itself; arithmetic
that IEEE 754 rounds exactly; and logarithms of single numbers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine.sampling.adjustments import Allowed, HeldStops, LogitBias, Penalties
from headrace.engine.sampling.seeds import SEED_MASK, Lane, numbers, streams
from headrace.engine.types import Alternatives, SamplingParams
from headrace.ops import draw_tokens, token_logprobs

_NUCLEUS_GUESS = 256
"""Most nuclei fit in this many tokens; sorting only these saves sorting a whole vocabulary."""
_WIDER = 16
"""How many times more are sorted when they do not fit."""
_BLOCK = 128
_ONE_LEVEL = 1024
"""Up to this width cumulative sums are taken of single probabilities, above it of blocks."""


class Draw(NamedTuple):
    """One token for each of n rows.

    Attributes:
        ids: [n] int64.
        logprobs: [n] float32, of the distribution drawn from; greedy rows: of the temperature-1
            distribution. NaN where the row's logits are not finite.
        raw_logprobs: [n] float32, of softmax(logits) whatever the parameters.
        alternatives: for each row the ids it asked for, likeliest first, with raw logprobs; None
            if no row asked.
    """

    ids: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor
    alternatives: list[Alternatives] | None


class _Filter(NamedTuple):
    """Rows that are filtered in the same way, m of them; top_k 0 keeps all."""

    top_k: int
    rows: Tensor
    top_p: Tensor
    min_p: Tensor


class SamplingBatch:
    """Parameters of n requests laid out for vectorised sampling; rebuilt when the batch changes.

    Several rows may belong to one request at successive output positions: a draft of k tokens is
    verified by k + 1 rows with one seed, `drawn` counting up and the draft's tokens added to
    `outputs`. What these rows draw is what k + 1 steps would have drawn.

    Args:
        params: one per row. SamplingParams states what each does, and in which order.
        seeds: one per row, any int (its low 64 bits count).
        drawn: tokens each row has drawn so far.
        prompts: each row's prompt ids; read only for a repetition penalty.
        outputs: the `drawn` ids each row has sampled; read only for penalties.

    Raises:
        ValueError: a row has penalties, and the ids they need were not given.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        drawn: Sequence[int],
        prompts: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
    ) -> None:
        masked = np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64)
        self._streams = streams(masked, Lane.TOKEN)
        self._drawn = np.array(drawn, dtype=np.uint64)
        self._temperature = torch.tensor([float(p.temperature) for p in params])
        self._filters = _group_filters(params)
        self._bias = LogitBias.of(params)
        self._held = HeldStops.of(params)
        self._penalties = Penalties.of(params, drawn, prompts, outputs)
        self._alternatives = [p.logprobs for p in params]
        self._any_alternatives = any(self._alternatives)

    def sample(self, logits: Tensor, allowed: Allowed | None = None) -> Draw:
        """Draw one token per row, and `observe` it.

        Args:
            logits: [n, V], any float dtype; left as they are.
            allowed: what rows with a grammar may draw this time.
        """
        raw = logits.detach().float()
        scores = self._adjusted(raw, allowed)
        draws = numbers(self._streams, self._drawn)
        ids, logprobs, raw_logprobs = draw_tokens(
            scores, self._temperature, torch.from_numpy(draws)
        )
        for group in self._filters:
            for rows, order, kept in self._filtered(group, scores):
                choice = invert_cdf(kept, draws[rows.numpy()][:, None])
                ids[rows] = order.gather(-1, choice)[:, 0]
                chosen = kept.gather(-1, choice)[:, 0].tolist()
                logprobs[rows] = torch.tensor([log_probability(p) for p in chosen])
        if scores is not raw:
            raw_logprobs = token_logprobs(raw, ids[:, None])[:, 0]
        elif self._filters:
            rows = torch.cat([group.rows for group in self._filters])
            raw_logprobs[rows] = token_logprobs(raw[rows], ids[rows, None])[:, 0]
        alternatives = _likeliest(raw, self._alternatives) if self._any_alternatives else None
        self.observe(ids.tolist())
        return Draw(ids, logprobs, raw_logprobs, alternatives)

    def distribution(self, logits: Tensor) -> Tensor:
        """The probabilities `sample` would draw from: [n, V] logits -> [n, V] float32.

        Greedy rows: the temperature-1 distribution whose likeliest id they take. Draws nothing.
        """
        scores = self._adjusted(logits.detach().float())
        probabilities = _softmax(scores / self._divisor(slice(None)))
        for group in self._filters:
            for rows, order, kept in self._filtered(group, scores):
                probabilities[rows] = torch.zeros(len(rows), logits.shape[-1]).scatter_(
                    -1, order, kept
                )
        return probabilities

    def observe(self, ids: Sequence[int]) -> None:
        """Count one token per row as drawn. `sample` does so itself; this is for others' draws."""
        self._drawn += np.uint64(1)
        if self._penalties is not None:
            self._penalties.count(ids)

    def _adjusted(self, raw: Tensor, allowed: Allowed | None = None) -> Tensor:
        """Logits after bias, penalties, held stops and grammars; `raw` itself if nothing changes
        them."""
        changes = (self._bias, self._penalties, self._held, allowed)
        if all(change is None for change in changes):
            return raw
        scores = raw.clone()
        if self._bias is not None:
            self._bias.apply(scores)
        if self._penalties is not None:
            self._penalties.apply(scores)
        if self._held is not None:
            self._held.apply(scores, self._drawn)
        if allowed is not None:
            allowed.apply(scores)
        return scores

    def _divisor(self, rows: Tensor | slice) -> Tensor:
        """Temperatures of some rows as a column; 1 for greedy ones."""
        temperature = self._temperature[rows]
        return torch.where(temperature == 0, 1.0, temperature)[:, None]

    def _filtered(self, group: _Filter, scores: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """See `_filtered`; `scores` [n, V] are those of all rows, before temperature."""
        # Divided, as the trainer does it, not multiplied by a rounded inverse.
        return _filtered(group, scores[group.rows] / self._divisor(group.rows))


def score_tokens(
    logits: Tensor, ids: Sequence[int], alternatives: int = 0
) -> tuple[list[float], list[Alternatives]]:
    """Raw logprobs of given tokens, as `Draw.raw_logprobs` has them of sampled ones.

    Args:
        logits: [T, V], any float dtype; row t predicts ids[t].
        ids: T tokens.
        alternatives: how many of the likeliest ids to report for each position.

    Returns:
        T logprobs, and for each position its alternatives.
    """
    raw = logits.detach().float()
    logprobs = token_logprobs(raw, torch.tensor(list(ids), dtype=torch.int64)[:, None])
    return logprobs[:, 0].tolist(), _likeliest(raw, [alternatives] * len(raw))


# -- filters ------------------------------------------------------------------------------------


def _group_filters(params: Sequence[SamplingParams]) -> list[_Filter]:
    """Rows with one top_k form a group: how wide a row is sorted depends on its own top_k, because
    the width decides which of several equal logits come first."""
    groups: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        if p.temperature and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0):
            groups.setdefault(p.top_k, []).append(i)
    return [
        _Filter(
            top_k,
            torch.tensor(rows),
            # A total of 1 may round to just below it, so "keep all" must lie out of reach.
            torch.tensor([float(params[i].top_p) if params[i].top_p < 1 else 2.0 for i in rows])[
                :, None
            ],
            torch.tensor([float(params[i].min_p) for i in rows])[:, None],
        )
        for top_k, rows in groups.items()
    ]


def _filtered(group: _Filter, scores: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The group's distributions after top-k, then top-p, then min-p.

    Args:
        group: m rows.
        scores: [m, V], theirs, after temperature.

    Yields:
        For some of the rows [r], by their numbers in the batch: the ids kept, likeliest first
        [r, w], and their renormalised probabilities [r, w], 0 for ids behind the last one kept.
    """
    vocab = scores.shape[-1]
    rows, top_p, min_p = group.rows, group.top_p, group.min_p
    probabilities = scores if group.top_k else _softmax(scores)
    width = min(group.top_k or _NUCLEUS_GUESS, vocab)
    while True:
        values, order = scores.topk(width, -1)
        mass = torch.softmax(values, -1) if group.top_k else probabilities.gather(-1, order)
        before = mass.cumsum(-1, dtype=torch.float64) - mass
        outside = (before >= top_p) | (mass < min_p * mass[:, :1])
        outside[:, 0] = False
        kept = torch.softmax(values.masked_fill(outside, -torch.inf), -1)
        if group.top_k or width == vocab:
            yield rows, order, kept
            return
        # A row whose last sorted id is outside keeps none of the unsorted ones either.
        settled = outside[:, -1]
        if bool(settled.any()):
            yield rows[settled], order[settled], kept[settled]
        if bool(settled.all()):
            return
        rows, top_p, min_p, scores, probabilities = (
            x[~settled] for x in (rows, top_p, min_p, scores, probabilities)
        )
        width = min(_WIDER * width, vocab)


# -- inverse CDF --------------------------------------------------------------------------------


def invert_cdf(probabilities: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
    """First index whose cumulative probability exceeds the draw: [n, V], [n, 1] -> [n, 1].

    Probabilities need not sum to 1. float64 sums keep the tail of a large vocabulary unbiased. An
    index of probability zero is never returned. Wide rows are searched in two levels: first for the
    block of 128 the draw falls in, by sums of blocks, then within it.
    """
    width = probabilities.shape[-1]
    if width <= _ONE_LEVEL:
        return torch.from_numpy(_search(probabilities.numpy(), draws))
    # Below, numpy only because its calls cost less than torch's, and most rows come alone.
    sums = _block_sums(probabilities).numpy()
    cumulative = np.cumsum(sums, -1, dtype=np.float64)
    target = draws * cumulative[:, -1:]
    rows = np.arange(len(sums))[:, None]
    block = _count_passed(cumulative, target)
    within = 1 - (cumulative[rows, block] - target) / sums[rows, block]
    # Rounding must not push the draw out of the block at either end.
    within = np.clip(within, 0.0, 1 - 2.0**-52)
    columns = block * _BLOCK + np.arange(_BLOCK)
    inside = probabilities.numpy()[rows, np.minimum(columns, width - 1)]
    if width % _BLOCK:
        inside[columns >= width] = 0
    found = block * _BLOCK + _search(inside, within)
    return torch.from_numpy(np.minimum(found, width - 1))


def _search(
    probabilities: npt.NDArray[np.float32], draws: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    cumulative = np.cumsum(probabilities, -1, dtype=np.float64)
    return _count_passed(cumulative, draws * cumulative[:, -1:])


def _count_passed(
    cumulative: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """First index above the target; entries that add nothing are passed over. A row of NaN: 0."""
    passed = (cumulative <= target).sum(-1, keepdims=True)
    return np.minimum(passed, cumulative.shape[-1] - 1)


def _block_sums(probabilities: Tensor) -> Tensor:
    """[n, V] -> [n, ceil(V / 128)] sums of blocks."""
    width = probabilities.shape[-1]
    blocks = width // _BLOCK
    whole = probabilities[:, : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK)).sum(-1)
    if width % _BLOCK == 0:
        return whole
    rest = torch.nn.functional.pad(
        probabilities[:, blocks * _BLOCK :], (0, _BLOCK - width % _BLOCK)
    )
    return torch.cat([whole, rest.unflatten(-1, (1, _BLOCK)).sum(-1)], -1)


# -- probabilities and their logarithms ---------------------------------------------------------


def _softmax(logits: Tensor) -> Tensor:
    """[n, V] float32 -> [n, V].

    torch's adds up a wide row in float32, where the likely ids' weight swallows that of the many
    unlikely ones: with tens of thousands of ids its probabilities sum to 1.00001, and logprobs
    would be too high by that, beside the trainer's. So they are divided by their sum.
    """
    probabilities = torch.softmax(logits, -1)
    narrow = probabilities.shape[-1] <= _ONE_LEVEL
    parts = probabilities.numpy() if narrow else _block_sums(probabilities).numpy()
    totals = np.cumsum(parts, -1, dtype=np.float64)[:, -1:].astype(np.float32)
    return probabilities.div_(torch.from_numpy(totals))


def log_probability(probability: float) -> float:
    return math.log(probability) if probability != 0 else -math.inf


def _likeliest(logits: Tensor, counts: Sequence[int]) -> list[Alternatives]:
    """The counts[i] likeliest ids of each row of logits [n, V], with raw logprobs.

    Rows that ask for different numbers are sorted apart, as in `_group_filters`.
    """
    result: list[Alternatives] = [()] * len(counts)
    for count in set(counts) - {0}:
        rows = torch.tensor([i for i, c in enumerate(counts) if c == count])
        part = logits[rows]
        order = part.topk(min(count, part.shape[-1]), -1).indices
        logs = token_logprobs(part, order).tolist()
        for row, ids, values in zip(rows.tolist(), order.tolist(), logs, strict=True):
            result[row] = tuple(zip(ids, values, strict=True))
    return result
