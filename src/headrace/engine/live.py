"""One request on its way through the engine: what it asked for and what it has sampled so far."""

from typing import NamedTuple

from torch import Tensor

from headrace.engine.sampling.batch import score_tokens
from headrace.engine.sampling.constrained import GrammarState, Mask
from headrace.engine.sampling.stops import StopMatcher
from headrace.engine.sequence import Sequence
from headrace.engine.types import (
    Alternatives,
    GenerationRequest,
    GenerationResult,
    Progress,
)
from headrace.rollout.types import FinishReason, Span


class Row(NamedTuple):
    """One drawn token, see `sampling.Draw`."""

    id: int
    logprob: float
    raw_logprob: float
    alternatives: Alternatives


class Live:
    """One request between arrival and end.

    Args:
        request: checked.
        sequence: its tokens and blocks, as the scheduler knows them.
        seed: of its draws.
        stops: searches its output for its stop texts; None if it has none.
        grammar: says what may come next; None if anything may.
    """

    __slots__ = (
        "accepted",
        "alternatives",
        "depth",
        "drafted",
        "grammar",
        "ids",
        "logprobs",
        "marks",
        "prompt_alternatives",
        "prompt_logprobs",
        "raw_logprobs",
        "request",
        "seed",
        "sequence",
        "started",
        "stop",
        "stop_ids",
        "stops",
    )

    def __init__(
        self,
        request: GenerationRequest,
        sequence: Sequence,
        *,
        seed: int,
        stops: StopMatcher | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.seed = seed
        self.stop_ids = frozenset(request.sampling.stop_ids)
        self.stops = stops
        self.grammar = grammar
        # The text that ended the output.
        self.stop: str | None = None
        self.started: float | None = None
        self.drafted = self.accepted = 0
        # How many tokens to draft next; at first as many as allowed.
        self.depth: int | None = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.alternatives: list[Alternatives] = []
        self.prompt_logprobs: list[float] = []
        self.prompt_alternatives: list[Alternatives] = []
        # (index of the first token, version): where each span begins.
        self.marks: list[tuple[int, int]] = []
        self._prime()

    def _prime(self) -> None:
        """Let stop texts and the grammar begin in output that another engine sampled."""
        for token in self.resumed_ids:
            if self.stops is not None:
                self.stops.feed(token)
            if self.grammar is not None:
                self.grammar.feed(token)

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """Output of this request that another engine sampled; it stands at the prompt's end."""
        resumed = self.request.resumed
        return self.request.prompt_ids[-resumed:] if resumed else ()

    @property
    def drawn(self) -> int:
        """Tokens sampled so far, here and before."""
        return self.request.resumed + len(self.ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt without what is output already."""
        resumed = self.request.resumed
        return self.request.prompt_ids[:-resumed] if resumed else self.request.prompt_ids

    def output(self, drafts: list[int]) -> list[int]:
        """Everything sampled and some drafts; the list of own tokens itself where that is all."""
        if not drafts and not self.request.resumed:
            return self.ids
        return [*self.resumed_ids, *self.ids, *drafts]

    def masks(self) -> list[Mask] | None:
        """What may come next, and behind each of the sequence's drafts; None: anything."""
        return None if self.grammar is None else self.grammar.masks(self.sequence.drafts)

    def take(self, drawn: list[Row], drafted: int) -> tuple[int, FinishReason | None]:
        """Sampled tokens, of which all but the last were drafted; `drafted` counts all drafts.

        Returns:
            How many of them became output, and why the request ends with the last of those.
        """
        self.drafted += drafted
        taken, reason = 0, None
        for row in drawn:
            self.ids.append(row.id)
            self.logprobs.append(row.logprob)
            self.raw_logprobs.append(row.raw_logprob)
            if self.request.sampling.logprobs:
                self.alternatives.append(row.alternatives)
            taken += 1
            if self.stops is not None:
                completed = self.stops.feed(row.id)
                if self.drawn >= self.request.sampling.min_tokens:
                    self.stop = completed
            if self.grammar is not None:
                self.grammar.feed(row.id)
            if row.id in self.stop_ids or self.stop is not None or self._complete:
                reason = FinishReason.STOP
            elif len(self.ids) >= self.sequence.limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self.accepted += taken - 1
        if drafted:
            self.depth = len(drawn)
        return taken, reason

    def is_stuck(self, drawn: int | None = None) -> bool:
        """Whether the grammar left nothing to draw in one of the first `drawn` rows, or in any."""
        stuck = None if self.grammar is None else self.grammar.stuck
        return stuck is not None and (drawn is None or stuck < drawn)

    @property
    def _complete(self) -> bool:
        """Whether the grammar has come to its end and there is no stop id to say so."""
        return self.grammar is not None and not self.stop_ids and self.grammar.complete

    def progress(self, taken: int, version: int) -> Progress:
        """The last `taken` tokens, all of `version`, for who watches."""
        first = len(self.ids) - taken
        return Progress(
            self.request.id,
            tuple(self.ids[first:]),
            tuple(self.logprobs[first:]),
            tuple(self.raw_logprobs[first:]),
            version,
            alternatives=tuple(self.alternatives[first:]),
            stop=self.stop,
        )

    def draft_depth(self, most: int) -> int:
        """How many tokens to draft: one more than stood last time, and none that cannot be used."""
        wanted = most if self.depth is None else min(self.depth, most)
        return max(0, min(wanted, self.sequence.limit - len(self.ids) - 1))

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of prompt tokens are still owed."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.sequence.prompt_length

    def score_prompt(self, start: int, logits: Tensor) -> None:
        """Logprobs of the prompt tokens that follow the positions from `start` on.

        Args:
            logits: [count, V] of positions start .. start + count - 1.
        """
        if start + 1 < len(self.prompt_logprobs):
            # Computed a second time, after new weights: one prompt, one version.
            del self.prompt_logprobs[start + 1 :], self.prompt_alternatives[start + 1 :]
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(float("nan"))
            self.prompt_alternatives.append(())
        wanted = self.request.sampling.prompt_logprobs or 0
        ids = self.request.prompt_ids[start + 1 : start + 1 + len(logits)]
        scores, alternatives = score_tokens(logits[: len(ids)], ids, wanted)
        self.prompt_logprobs += scores
        self.prompt_alternatives += alternatives

    def restart(self) -> None:
        """Forget everything sampled and scored; the next token is the first one again."""
        for held in (self.ids, self.logprobs, self.raw_logprobs, self.alternatives):
            held.clear()
        for held in (self.prompt_logprobs, self.prompt_alternatives, self.marks):
            held.clear()
        self.drafted = self.accepted = 0
        if self.stops is not None:
            self.stops.restart()
        if self.grammar is not None:
            self.grammar.restart()
        self._prime()

    def stamp(self, version: int) -> None:
        """Tokens from here on come from `version`."""
        if self.marks and self.marks[-1][0] == len(self.ids):
            self.marks.pop()
        self.marks.append((len(self.ids), version))

    def spans(self, engine_id: str) -> tuple[Span, ...]:
        """What was sampled, cut where the version changed."""
        # A request that never left the queue has no marks, hence one end too many.
        ends = [start for start, _ in self.marks[1:]] + [len(self.ids)]
        return tuple(
            Span(tuple(self.ids[start:end]), tuple(self.logprobs[start:end]), version, engine_id)
            for (start, version), end in zip(self.marks, ends, strict=False)
            if end > start
        )

    def result(self, engine_id: str, reason: FinishReason, now: float) -> GenerationResult:
        """What the request came to, ended at `now` on the engine's clock."""
        arrived = self.sequence.arrived
        return GenerationResult(
            self.request.id,
            self.spans(engine_id),
            reason,
            queue_s=(now if self.started is None else self.started) - arrived,
            total_s=now - arrived,
            raw_logprobs=tuple(self.raw_logprobs),
            alternatives=tuple(self.alternatives),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_alternatives=tuple(self.prompt_alternatives)
            if self.request.sampling.prompt_logprobs
            else (),
            reused_tokens=self.sequence.reused,
            preemptions=self.sequence.preemptions,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            stop=self.stop,
        )
