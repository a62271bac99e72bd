"""A request that several engines work on, one after the other: what is known of its output so far.

An engine that streams tells each token once, with its logprob, its weight version, its alternatives
where asked for, and the stop text that it completed. When it dies, the next one can go on behind
these: they stand at the end of its prompt, and it is told how many, so that draws, penalties and
stop texts count on. Where that would not be exact, they are dropped and counted, and the request
begins again. Pure bookkeeping, no waiting.
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.engine.types import GenerationRequest, GenerationResult, Progress
from headrace.rollout.types import FinishReason, Span

_T = TypeVar("_T")


class Received:
    """The output of one request over all engines.

    Args:
        request: as it arrived.
        on_progress: told of every token, or None.

    Attributes:
        counts: tokens resumed and dropped by reason, since the start.
    """

    def __init__(
        self, request: GenerationRequest, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self._request = request
        sampling = request.sampling
        if sampling.seed is None:
            # Drawn here, so that the next engine draws what this one would have drawn.
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        self._sampling = sampling
        self._on_progress = on_progress
        # Of engines that are gone: (engine id, what it told).
        self._kept: list[tuple[str, Progress]] = []
        self._told: list[tuple[str, Progress]] = []
        self.counts: Counter[str] = Counter()

    # -- one engine -----------------------------------------------------------------------------

    def rest(self, left_s: float) -> GenerationRequest:
        """What the next engine is asked for."""
        kept = self._ids(self._kept)
        sampling = msgspec.structs.replace(
            self._sampling, max_tokens=self._sampling.max_tokens - len(kept)
        )
        return msgspec.structs.replace(
            self._request,
            prompt_ids=(*self._request.prompt_ids, *kept),
            resumed=len(kept),
            sampling=sampling,
            timeout_s=left_s,
        )

    def listener(self, engine_id: str) -> Callable[[Progress], None]:
        """Takes down what that engine tells."""
        told: list[tuple[str, Progress]] = []
        self._told = told

        def listen(progress: Progress) -> None:
            if told is not self._told:
                return  # An engine that was given up is of no interest any more.
            if progress.restart:
                told.clear()
                self._tell(Progress(self._request.id, (), (), (), progress.weight_version, True))
                for _, earlier in self._kept:
                    self._tell(earlier)
            if progress.ids:
                told.append((engine_id, progress))
                self._tell(msgspec.structs.replace(progress, restart=False))

        return listen

    def _tell(self, progress: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    # -- between two engines --------------------------------------------------------------------

    def lose(self, newest: int) -> Counter[str]:
        """The engine is gone; decide what becomes of the tokens it told.

        Args:
            newest: weight version of the engine that will go on.

        Returns:
            Tokens by what became of them: "resumed_tokens" or "dropped_tokens.<reason>".
        """
        told, self._told = self._told, []
        count = len(self._ids(told))
        if not count:
            return Counter()
        reason = None
        if self._sampling.logprobs and any(
            len(progress.alternatives) != len(progress.ids) for _, progress in told
        ):
            # That engine tells them at the end only.
            reason = "alternatives_lost"
        elif told[-1][1].weight_version > newest:
            # Versions within one output only ever rise.
            reason = "older_weights"
        if reason is None:
            self._kept += told
            found = Counter({"resumed_tokens": count})
        else:
            found = Counter({f"dropped_tokens.{reason}": count + len(self._ids(self._kept))})
            self._kept = []
            self._tell(Progress(self._request.id, (), (), (), newest, True))
        self.counts += found
        return found

    def end(self, *, aborted: bool, expired: bool) -> FinishReason | None:
        """Why no further engine is needed, if none is."""
        kept = self._ids(self._kept)
        if kept and (kept[-1] in self._sampling.stop_ids or self._stop is not None):
            return FinishReason.STOP
        if len(kept) >= self._sampling.max_tokens:
            return FinishReason.LENGTH
        if aborted:
            return FinishReason.ABORTED
        return FinishReason.DEADLINE if expired else None

    @property
    def _stop(self) -> str | None:
        """The stop text that what is kept ends with."""
        return self._kept[-1][1].stop if self._kept else None

    # -- the result -----------------------------------------------------------------------------

    def without_engine(self, reason: FinishReason, elapsed_s: float) -> GenerationResult:
        """The result when nobody goes on."""
        ended = GenerationResult(self._request.id, (), reason, stop=self._stop)
        return self.complete(ended, elapsed_s)

    def complete(self, result: GenerationResult, elapsed_s: float) -> GenerationResult:
        """The last engine's result with what the earlier ones sampled before it."""
        told = [progress for _, progress in self._kept]
        raw = [x for progress in told for x in progress.raw_logprobs]
        others = [x for progress in told for x in progress.alternatives]
        prompt = len(self._request.prompt_ids)
        return msgspec.structs.replace(
            result,
            id=self._request.id,
            spans=(*_spans(self._kept), *result.spans),
            # All or none: an engine may not report them.
            raw_logprobs=self._joined(raw, result.raw_logprobs, result),
            alternatives=self._joined(others, result.alternatives, result),
            prompt_logprobs=result.prompt_logprobs[:prompt],
            prompt_alternatives=result.prompt_alternatives[:prompt],
            queue_s=max(0.0, elapsed_s - (result.total_s - result.queue_s)),
            total_s=elapsed_s,
        )

    def _joined(
        self, kept: list[_T], rest: tuple[_T, ...], result: GenerationResult
    ) -> tuple[_T, ...]:
        sampled = sum(len(span.ids) for span in result.spans)
        whole = len(kept) == len(self._ids(self._kept)) and len(rest) == sampled
        return (*kept, *rest) if whole else ()

    @staticmethod
    def _ids(pieces: list[tuple[str, Progress]]) -> list[int]:
        return [token for _, progress in pieces for token in progress.ids]


def _spans(pieces: list[tuple[str, Progress]]) -> list[Span]:
    """Neighbouring pieces of one engine and version as one span each."""
    spans = []
    for (engine_id, version), group in itertools.groupby(
        pieces, key=lambda piece: (piece[0], piece[1].weight_version)
    ):
        told = [progress for _, progress in group]
        ids = tuple(token for progress in told for token in progress.ids)
        logprobs = tuple(x for progress in told for x in progress.logprobs)
        spans.append(Span(ids, logprobs, version, engine_id))
    return spans
