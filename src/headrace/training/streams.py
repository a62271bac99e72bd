"""Supervised data in a fixed shuffled order, whose position is a few numbers.

The order of an epoch depends on seed and epoch only, so a stream goes on exactly where a checkpoint
left it. Every rank walks the same global batches and keeps its share (law L14).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from headrace.data.stream import TokenStream
from headrace.training.batch import Sample


class BatchStream(Protocol):
    """Endless global batches."""

    def next_batch(self) -> list[Sample]:
        """The next global batch; the same on every rank."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able data."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken."""
        ...


class SampleStream:
    """Samples held in memory, about `batch_tokens` tokens at a time.

    Args:
        samples: at least one.
        batch_tokens: a batch ends as soon as it has this many.
        seed: of the order.
    """

    def __init__(self, samples: Sequence[Sample], batch_tokens: int, seed: int) -> None:
        if not samples:
            raise ValueError("SampleStream: no samples")
        self._samples = samples
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def next_batch(self) -> list[Sample]:
        """See `BatchStream.next_batch`."""
        batch: list[Sample] = []
        tokens = 0
        while tokens < self._batch_tokens:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
            batch.append(self._samples[self._order[self._position]])
            self._position += 1
            tokens += len(batch[-1])
        return batch

    def state(self) -> dict[str, Any]:
        """See `BatchStream.state`."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """See `BatchStream.restore`."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        rng = np.random.default_rng((self._seed, self._epoch))
        return rng.permutation(len(self._samples))


class TextStream:
    """Packed rows of text, one sample per document of a row."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def next_batch(self) -> list[Sample]:
        """See `BatchStream.next_batch`."""
        return [
            Sample(ids.astype("<i4").tobytes(), weights.astype("<f4").tobytes())
            for row in self._stream.next_batch()
            for ids, weights in row
            # One token alone has nothing to predict and nothing to be predicted from.
            if len(ids) > 1
        ]

    def state(self) -> dict[str, Any]:
        """See `BatchStream.state`."""
        return self._stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        """See `BatchStream.restore`."""
        self._stream.restore(state)
