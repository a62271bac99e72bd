"""What drawing and scoring of tokens have to pass: draws invert the cumulative distribution, log-
probabilities are those of float64, and a row has the same bits whatever stands beside it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.ops.draws import Drawn

Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Score = Callable[[Tensor, Tensor], Tensor]

_VOCABULARIES = (1, 5, 16, 127, 128, 129, 1000, 4099)
"""Around lanes and blocks."""


def _rows(
    rows: int, vocabulary: int, dtype: torch.dtype, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, some of them -inf, temperatures, some of them 0, and draws at both ends too."""
    logits = (torch.randn(rows, vocabulary, generator=g) * 4).to(dtype).float()
    logits[:, 1::3].masked_fill_(torch.rand(logits[:, 1::3].shape, generator=g) < 0.5, -torch.inf)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.8])[torch.arange(rows) % 4]
    draws = torch.rand(rows, generator=g, dtype=torch.float64)
    draws[:2] = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)[:rows]
    return logits, temperature, draws


def _inverts(draw: Draw, dtype: torch.dtype, g: torch.Generator) -> float:
    """How far a draw lies outside the share of the unit interval that its token has."""
    worst = 0.0
    for vocabulary in _VOCABULARIES:
        logits, temperature, draws = _rows(40, vocabulary, dtype, g)
        ids = Drawn(*draw(logits, temperature, draws)).ids[:, None]
        greedy = temperature == 0
        scores = logits.double() / torch.where(greedy, 1.0, temperature)[:, None]
        share = scores.softmax(-1)
        upper = share.cumsum(-1).gather(-1, ids)[:, 0]
        own = share.gather(-1, ids)[:, 0]
        off = torch.maximum(draws - upper, upper - own - draws)
        best = logits.gather(-1, ids)[:, 0] == logits.amax(-1)
        first = (logits == logits.amax(-1, keepdim=True)).long().argmax(-1) == ids[:, 0]
        off = torch.where(greedy, torch.where(best & first, 0.0, torch.inf), off)
        worst = max(worst, float(torch.where(own > 0, off, torch.inf).max()))
    return max(worst, 0.0)


def _logprobs(draw: Draw, dtype: torch.dtype, g: torch.Generator) -> float:
    """Largest difference from float64 of both logprobs."""
    worst = 0.0
    for vocabulary in _VOCABULARIES:
        logits, temperature, draws = _rows(40, vocabulary, dtype, g)
        drawn = Drawn(*draw(logits, temperature, draws))
        for divisor, got in ((temperature, drawn.logprobs), (None, drawn.raw_logprobs)):
            scores = logits
            if divisor is not None:
                scores = logits / torch.where(divisor == 0, 1.0, divisor)[:, None]
            want = scores.double().log_softmax(-1).gather(-1, drawn.ids[:, None])[:, 0]
            worst = max(worst, float((got.double() - want).abs().max()))
    return worst


def _alone(draw: Draw, dtype: torch.dtype, g: torch.Generator) -> float:
    """Numbers that change with the other rows of a call."""
    logits, temperature, draws = _rows(70, 9001, dtype, g)
    whole = draw(logits, temperature, draws)
    wrong = 0
    for rows in (1, 2, 7, 33):
        chosen = torch.randperm(70, generator=g)[:rows]
        part = draw(logits[chosen], temperature[chosen], draws[chosen])
        wrong += sum(int((a != b[chosen]).sum()) for a, b in zip(part, whole, strict=True))
    return float(wrong)


def _not_a_number(draw: Draw, dtype: torch.dtype, g: torch.Generator) -> float:
    """Rows that hide that their logits are not finite, or draw an id that does not exist."""
    wrong = 0
    for vocabulary in (3, 64, 300):
        for bad in (torch.nan, torch.inf, -torch.inf):
            logits, temperature, draws = _rows(8, vocabulary, dtype, g)
            logits[3:7] = bad
            drawn = Drawn(*draw(logits, temperature, draws))
            outside = (drawn.ids < 0) | (drawn.ids >= vocabulary)
            for found in (drawn.logprobs, drawn.raw_logprobs):
                wrong += int((~found[3:7].isnan()).sum() + found[[0, 1, 2, 7]].isnan().sum())
            wrong += int(outside.sum())
    return float(wrong)


def _scores(score: Score, dtype: torch.dtype, g: torch.Generator) -> float:
    """Largest difference from float64, far below what a float32 probability can hold, too."""
    worst = 0.0
    for vocabulary in _VOCABULARIES:
        logits = (torch.randn(9, vocabulary, generator=g) * 60).to(dtype).float()
        ids = torch.randint(0, vocabulary, (9, 5), generator=g)
        want = logits.double().log_softmax(-1).gather(-1, ids)
        error = (score(logits, ids).double() - want).abs() / want.abs().clamp(min=1.0)
        worst = max(worst, float(error.max()))
    return worst


def _outside(score: Score, dtype: torch.dtype, g: torch.Generator) -> float:
    """Ids outside the vocabulary that are not refused."""
    wrong = 0
    for bad in (-1, 7):
        try:
            score(torch.zeros(2, 7), torch.tensor([[0], [bad]]))
            wrong += 1
        except IndexError:
            pass
    return float(wrong)


def _nothing(score: Score, dtype: torch.dtype, g: torch.Generator) -> float:
    shapes = [score(torch.zeros(0, 7), torch.zeros(0, 3, dtype=torch.int64)).shape]
    shapes.append(score(torch.zeros(4, 7), torch.zeros(4, 0, dtype=torch.int64)).shape)
    return 0.0 if shapes == [(0, 3), (4, 0)] else math.inf


DRAW_CHECKS: dict[str, tuple[Callable[..., float], float | None]] = {
    "inverts the distribution": (_inverts, 1e-6),
    "logprobs are those of float64": (_logprobs, 2e-6),
    "rows do not depend on others": (_alone, 0.0),
    "what is not finite is seen": (_not_a_number, 0.0),
}
"""Checks of `draw_tokens`: the check and the largest passing error by name."""

SCORE_CHECKS: dict[str, tuple[Callable[..., float], float | None]] = {
    "logprobs are those of float64": (_scores, 2e-6),
    "ids outside the vocabulary are refused": (_outside, 0.0),
    "no rows, no ids": (_nothing, 0.0),
}
"""Checks of `token_logprobs`."""
