"""Training sequences on the wire, and how a batch is cut into micro-batches.

No torch here: the process that builds batches stays small.
"""

import heapq
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.rollout.types import Segment


class Sample(msgspec.Struct, frozen=True):
    """One training sequence of T tokens, as flat little-endian arrays.

    Attributes:
        ids: int32 [T].
        weights: float32 [T], loss weight of each token; 0 where nothing is trained.
        logprobs: float32 [T] rollout logprobs, empty for supervised data.
        versions: int32 [T] weight versions (-1 where nothing was sampled), empty likewise.
        advantage: the trajectory's advantage; 0 for supervised data.
        trajectory: number in its batch; samples of one number are one trajectory's segments. -1: a
            trajectory of its own.
        group: number of the trajectory's group in its batch. -1: a group of its own.
        teacher: which of the trainer's teachers judges it, for distillation.
    """

    ids: bytes
    weights: bytes
    logprobs: bytes = b""
    versions: bytes = b""
    advantage: float = 0.0
    trajectory: int = -1
    group: int = -1
    teacher: int = 0

    def __len__(self) -> int:
        return len(self.ids) // 4


def supervised_sample(ids: Sequence[int], weights: Sequence[float]) -> Sample:
    """A demonstration. The first token's weight is ignored: nothing predicts it."""
    if len(ids) != len(weights):
        raise ValueError(f"supervised_sample: {len(ids)} ids but {len(weights)} weights")
    return Sample(
        np.asarray(ids, dtype="<i4").tobytes(), np.asarray(weights, dtype="<f4").tobytes()
    )


def rollout_sample(
    segment: Segment,
    advantage: float,
    multiplicity: int = 1,
    *,
    trajectory: int = -1,
    group: int = -1,
    teacher: int = 0,
) -> Sample:
    """A rollout's segment; `multiplicity` is how often group padding repeats it."""
    return Sample(
        np.asarray(segment.ids, dtype="<i4").tobytes(),
        (np.asarray(segment.train_mask, dtype="<f4") * multiplicity).astype("<f4").tobytes(),
        np.asarray(segment.logprobs, dtype="<f4").tobytes(),
        np.asarray(segment.versions, dtype="<i4").tobytes(),
        advantage,
        trajectory,
        group,
        teacher,
    )


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, ranks: int = 1
) -> list[list[list[int]]]:
    """Deal sequences out to micro-batches of about equal size, the same number for every rank.

    A micro-batch holds at most max_tokens tokens, a longer single sequence goes alone. As few
    micro-batches as such a greedy deal (longest first, to the emptiest) allows.

    Returns:
        Sequence indices as [rank][micro-batch]; some may be empty. A function of the arguments
        alone, so every rank finds the same plan by itself.
    """
    if ranks < 1 or max_tokens < 1:
        raise ValueError(f"plan_micro_batches: max_tokens {max_tokens}, ranks {ranks}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # One that is too long fills a micro-batch, and no second one.
    filled = sum(min(length, max_tokens) for length in lengths)
    rounds = max(1, -(-filled // (max_tokens * ranks)))
    while True:
        bins = _deal(lengths, order, rounds * ranks)
        if all(len(b) < 2 or sum(lengths[i] for i in b) <= max_tokens for b in bins):
            break
        rounds += 1
    bins = sorted((sorted(b) for b in bins), key=lambda b: (-sum(lengths[i] for i in b), b))
    return [bins[rank::ranks] for rank in range(ranks)]


def _deal(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """`count` bins; each sequence in turn goes to the bin with the fewest tokens, then items."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]
    for index in order:
        tokens, items, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (tokens + lengths[index], items + 1, number))
    return bins
