"""Tokens drawn from rows of logits, and log-probabilities of given tokens.

Both work through a row of logits without keeping its softmax: a vocabulary is wide, and a decoding
step would otherwise read and write every probability several times to use one of them. A row's
results depend on that row alone, bit for bit: not on its neighbours or on threads. They know
nothing of filters and penalties, which `headrace.engine.sampling.batch` applies before or instead.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.ops.native import build
from headrace.ops.registry import ANY_DEVICE, REFERENCE, REGISTRY, register

_LEAST = -87.0
"""Below this, relative to the likeliest one, a token has no weight in float32 and is not drawn."""


class Drawn(NamedTuple):
    """One token for each of n rows.

    Attributes:
        ids: int64 [n].
        logprobs: float32 [n], of softmax(logits / temperature); of softmax(logits) at 0. NaN where
            a row's logits are not finite (-inf may stand in it, but not alone).
        raw_logprobs: float32 [n], of softmax(logits).
    """

    ids: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor


def draw_tokens(logits: Tensor, temperature: Tensor, draws: Tensor) -> Drawn:
    """Inverse CDF of softmax(logits / temperature), row by row; the largest logit at temperature 0.

    The first id is taken whose cumulative probability exceeds the draw; of equally large logits the
    lowest id. Logits are divided by the temperature in float32, sums are exact to float32.

    Args:
        logits: [n, V] float32 or bfloat16.
        temperature: float32 [n], >= 0.
        draws: float64 [n] in [0, 1).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits {list(logits.shape)} must be [rows, vocabulary], not empty")
    for name, x, dtype in (
        ("temperature", temperature, torch.float32),
        ("draws", draws, torch.float64),
    ):
        if x.shape != logits.shape[:1] or x.dtype != dtype:
            raise ValueError(
                f"{name} {list(x.shape)} {x.dtype} must be [{len(logits)}] {dtype} for these logits"
            )
    _check_dtype(logits)
    logits = logits.detach().float()
    return REGISTRY.resolve("draw_tokens", logits.device.type)(logits, temperature, draws)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax(logits) at some ids of each row, without gradient.

    Args:
        logits: [n, V] float32 or bfloat16.
        ids: int64 [n, m].

    Returns:
        float32 [n, m]; NaN where a row's logits are not finite.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: an id lies outside the vocabulary.
    """
    if logits.dim() != 2 or ids.dim() != 2 or len(ids) != len(logits) or ids.dtype != torch.int64:
        raise ValueError(
            f"logits {list(logits.shape)} and ids {list(ids.shape)} {ids.dtype} must be [rows, "
            "vocabulary] and int64 [rows, any]"
        )
    _check_dtype(logits)
    logits = logits.detach().float()
    return REGISTRY.resolve("token_logprobs", logits.device.type)(logits, ids)


def _check_dtype(logits: Tensor) -> None:
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits are {logits.dtype}, must be float32 or bfloat16")


def _draw_reference(logits: Tensor, temperature: Tensor, draws: Tensor) -> Drawn:
    """In float64, whose own rounding, which may depend on neighbours, is lost in float32."""
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    scores = (logits / divisor).double()
    scores -= scores.amax(1, keepdim=True)
    weights = scores.exp().masked_fill_(scores < _LEAST, 0.0)
    cumulative = weights.cumsum(1)
    target = draws[:, None] * cumulative[:, -1:]
    passed = ((cumulative <= target) | (weights == 0)) & (cumulative < cumulative[:, -1:])
    # Where nothing is left to pass: the last id that has weight, and 0 in a row of NaN.
    ids = torch.where(cumulative[:, -1].isnan(), 0, passed.long().argmin(1))
    lowest = (logits == logits.amax(1, keepdim=True)).long().argmax(1)
    ids = torch.where(greedy, lowest, ids)[:, None]
    logprobs = (scores.gather(1, ids) - cumulative[:, -1:].log())[:, 0].float()
    raw = _score_reference(logits, ids)[:, 0]
    return Drawn(ids[:, 0], logprobs, torch.where(divisor[:, 0] == 1, logprobs, raw))


def _draw_native(logits: Tensor, temperature: Tensor, draws: Tensor) -> Drawn:
    n, vocab = logits.shape
    ids = torch.empty(n, dtype=torch.int64)
    logprobs, raw = torch.empty(n), torch.empty(n)
    build.call(
        "draw_tokens",
        torch.get_num_threads(),
        False,
        *(logits.contiguous(), temperature.contiguous(), draws.contiguous()),
        *(n, vocab, ids, logprobs, raw),
    )
    return Drawn(ids, logprobs, raw)


def _score_reference(logits: Tensor, ids: Tensor) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[1]:
        raise IndexError(f"token_logprobs: an id lies outside the vocabulary of {logits.shape[1]}")
    wide = logits.double()
    wide -= wide.amax(1, keepdim=True)
    total = wide.exp().masked_fill_(wide < _LEAST, 0.0).sum(1, keepdim=True)
    return (wide.gather(1, ids) - total.log()).float()


def _score_native(logits: Tensor, ids: Tensor) -> Tensor:
    out = torch.empty(ids.shape)
    build.call(
        "token_logprobs",
        torch.get_num_threads(),
        False,
        *(logits.contiguous(), ids.contiguous(), len(ids), logits.shape[1], ids.shape[1], out),
    )
    return out


for _op, _plain, _fast in (
    ("draw_tokens", _draw_reference, _draw_native),
    ("token_logprobs", _score_reference, _score_native),
):
    register(_op, REFERENCE, _plain, devices=(ANY_DEVICE,))
    register(_op, "cpu", _fast, available=build.unavailable_reason)
