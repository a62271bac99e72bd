"""Training sequences on the wire, and how a batch is cut into micro-batches.

No torch here: the process that builds batches stays small.
"""

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
    """

    ids: bytes
    weights: bytes
    logprobs: bytes = b""
    versions: bytes = b""
    advantage: float = 0.0

    def __len__(self) -> int:
        return len(self.ids) // 4


def supervised_sample(ids: Sequence[int], weights: Sequence[float]) -> Sample:
    """A demonstration. The first token's weight is ignored: nothing predicts it."""
    if len(ids) != len(weights):
        raise ValueError(f"supervised_sample: {len(ids)} ids but {len(weights)} weights")
    return Sample(
        np.asarray(ids, dtype="<i4").tobytes(), np.asarray(weights, dtype="<f4").tobytes()
    )


def rollout_sample(segment: Segment, advantage: float, multiplicity: int = 1) -> Sample:
    """A rollout's segment; `multiplicity` is how often group padding repeats it."""
    return Sample(
        np.asarray(segment.ids, dtype="<i4").tobytes(),
        (np.asarray(segment.train_mask, dtype="<f4") * multiplicity).astype("<f4").tobytes(),
        np.asarray(segment.logprobs, dtype="<f4").tobytes(),
        np.asarray(segment.versions, dtype="<i4").tobytes(),
        advantage,
    )


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequence indices into micro-batches of similar length.

    Rows times the longest row stays within max_tokens; a longer single sequence goes alone. Sorted
    by length, so that padding is rare; ties keep their order, so the split is deterministic.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        # Ascending order makes the newcomer the longest of its batch.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
