"""The draws of one pass: rows of logits in, tokens of requests out.

Keeps the sampler's batch from step to step while the same requests decode, and lays out one row
more for each draft that is to be verified.
"""

from collections.abc import Iterator

from torch import Tensor

from headrace.engine.live import Live, Row
from headrace.engine.sampling.adjustments import Allowed
from headrace.engine.sampling.batch import SamplingBatch
from headrace.engine.sampling.constrained import Mask


class Draws:
    """Samples for requests in continuous batching."""

    def __init__(self) -> None:
        self._lives: list[Live] = []
        self._batch = SamplingBatch([], [], [])

    def forget(self) -> None:
        """Requests began again: their draws are counted from the start."""
        self._lives = []

    def sample(self, lives: list[Live], logits: Tensor) -> Iterator[Row]:
        """Draw for every row: one of each request, and one for each of its drafts.

        Args:
            lives: requests that sample.
            logits: [sum of 1 + drafts, V].
        """
        if any(live.sequence.drafts for live in lives):
            batch = _batch_of(
                [
                    (live, live.sequence.drafts[:count])
                    for live in lives
                    for count in range(1 + len(live.sequence.drafts))
                ]
            )
            # The kept batch counts one token per request and step.
            self._lives = []
        else:
            if self._lives != lives:
                self._lives, self._batch = lives, _batch_of([(live, []) for live in lives])
            batch = self._batch
        draw = batch.sample(logits, _allowed(lives))
        alternatives = draw.alternatives or [()] * len(logits)
        rows = (draw.ids.tolist(), draw.logprobs.tolist(), draw.raw_logprobs.tolist(), alternatives)
        return map(Row._make, zip(*rows, strict=True))


def _allowed(lives: list[Live]) -> Allowed | None:
    """What rows of requests with a grammar may draw."""
    if all(live.grammar is None for live in lives):
        return None
    masks: list[Mask | None] = []
    for live in lives:
        masks += live.masks() or [None] * (1 + len(live.sequence.drafts))
    return Allowed.of(masks)


def _batch_of(rows: list[tuple[Live, list[int]]]) -> SamplingBatch:
    """A row draws what its request would draw if these drafts were its output."""
    return SamplingBatch(
        [live.request.sampling for live, _ in rows],
        [live.seed for live, _ in rows],
        [live.drawn + len(before) for live, before in rows],
        [live.prompt_ids for live, _ in rows],
        [live.output(before) for live, before in rows],
    )
