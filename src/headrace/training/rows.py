"""Micro-batches as tensors: samples packed one after the other into a single row.

Packing needs no padding, and no token of one sample sees another: the layout says where documents
begin, and positions restart with each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.objectives.mtp import mtp_weight_sums
from headrace.ops import Layout
from headrace.training.batch import Sample, supervised_sample


class Rows(NamedTuple):
    """One packed micro-batch of N tokens, M of them trained.

    Attributes:
        ids: int64 [1, N]; positions: int64 [1, N], from 0 in every document.
        layout: the documents.
        token_weights: float32 [N], loss weight of each token as a target; 0 for first tokens.
        where: int64 [M], rows that predict a trained token; targets: int64 [M].
        weights, rollout_logprobs, advantages: float32 [M]; versions: int64 [M].
        counts: False for a filler that only keeps ranks in step; its loss must not count.
    """

    ids: Tensor
    positions: Tensor
    layout: Layout
    token_weights: Tensor
    where: Tensor
    targets: Tensor
    weights: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    advantages: Tensor
    counts: bool = True

    @property
    def tokens(self) -> int:
        """N."""
        return self.ids.shape[1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return self.layout.query_length

    def to(self, device: torch.device) -> "Rows":
        """The same on another device."""
        if device.type == "cpu":
            return self
        return self._replace(
            **{
                name: value.to(device)
                for name, value in self._asdict().items()
                if isinstance(value, Tensor)
            }
        )


class Totals(NamedTuple):
    """What a whole batch's losses are divided by.

    Attributes:
        weight: loss weight of all trained tokens.
        mtp: that of each multi-token prediction step.
        tokens: all tokens.
    """

    weight: float
    mtp: tuple[float, ...]
    tokens: int


def pack(samples: Sequence[Sample]) -> Rows:
    """One micro-batch of all of `samples`; of none, a filler of one token that does not count."""
    counts = bool(samples)
    samples = samples or [supervised_sample([0], [0.0])]
    lengths = [len(s) for s in samples]
    ids = np.concatenate([np.frombuffer(s.ids, "<i4") for s in samples]).astype(np.int64)
    token_weights = np.concatenate([_weights(s) for s in samples])
    logprobs = np.concatenate([_or_fill(s.logprobs, "<f4", len(s), 0.0) for s in samples])
    versions = np.concatenate([_or_fill(s.versions, "<i4", len(s), -1) for s in samples])
    advantages = np.repeat(np.asarray([s.advantage for s in samples], np.float32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    (trained,) = np.nonzero(token_weights)
    return Rows(
        ids=torch.from_numpy(ids)[None],
        positions=torch.from_numpy(positions)[None],
        layout=Layout.packed(lengths),
        token_weights=torch.from_numpy(token_weights),
        where=torch.from_numpy(trained - 1),
        targets=torch.from_numpy(ids[trained]),
        weights=torch.from_numpy(token_weights[trained]),
        rollout_logprobs=torch.from_numpy(logprobs[trained].astype(np.float32)),
        versions=torch.from_numpy(versions[trained].astype(np.int64)),
        advantages=torch.from_numpy(advantages[trained]),
        counts=counts,
    )


def trained_weights(sample: Sample) -> np.ndarray:
    """float32 [M] > 0: weights of the tokens that `pack` finds to be trained, in their order."""
    weights = _weights(sample)
    return weights[weights != 0]


def batch_totals(samples: Sequence[Sample], mtp_depth: int) -> Totals:
    """Normalisers of a whole batch; `mtp_depth` is 0 without multi-token prediction."""
    weight, tokens = 0.0, 0
    mtp = torch.zeros(mtp_depth, dtype=torch.float64)
    for sample in samples:
        weights = _weights(sample)
        weight += float(weights.sum(dtype=np.float64))
        tokens += len(sample)
        if mtp_depth:
            mtp += mtp_weight_sums(torch.from_numpy(weights), [len(sample)], mtp_depth)
    return Totals(weight, tuple(mtp.tolist()), tokens)


def _weights(sample: Sample) -> np.ndarray:
    """Loss weights of a sample's tokens; nothing predicts the first one."""
    weights = np.frombuffer(sample.weights, "<f4").astype(np.float32)
    weights[:1] = 0.0
    return weights


def _or_fill(data: bytes, dtype: str, count: int, fill: float) -> np.ndarray:
    return np.frombuffer(data, dtype) if data else np.full(count, fill, dtype)
