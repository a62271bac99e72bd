"""One request on its way through the engine: what it asked for and what it has sampled so far."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from headrace.engine.sampling import score_tokens
from headrace.engine.sequence import Sequence
from headrace.engine.types import (
    Alternatives,
    EngineError,
    GenerationRequest,
    GenerationResult,
)
from headrace.rollout.types import FinishReason, Span

MAX_ALTERNATIVES = 20
"""Most alternatives reported for one token, as in the OpenAI API."""
MAX_BIAS = 100
"""Largest change of one logit, as in the OpenAI API."""


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
    """

    __slots__ = (
        "accepted",
        "alternatives",
        "depth",
        "drafted",
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
        "stop_ids",
    )

    def __init__(self, request: GenerationRequest, sequence: Sequence, *, seed: int) -> None:
        self.request = request
        self.sequence = sequence
        self.seed = seed
        self.stop_ids = frozenset(request.sampling.stop_ids)
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
            if row.id in self.stop_ids:
                reason = FinishReason.STOP
            elif len(self.ids) >= self.sequence.limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self.accepted += taken - 1
        if drafted:
            self.depth = len(drawn)
        return taken, reason

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
        )


def check(request: GenerationRequest, *, vocab: int, max_context: int) -> None:
    """Refuse what no engine of this vocabulary and context can run.

    Raises:
        EngineError: INVALID or TOO_LONG.
    """
    for problem in _problems(request, vocab):
        raise EngineError(EngineError.INVALID, problem)
    if len(request.prompt_ids) >= max_context:
        raise EngineError(
            EngineError.TOO_LONG,
            f"prompt of {len(request.prompt_ids)} tokens leaves no room in the context of "
            f"{max_context}",
        )


def _problems(request: GenerationRequest, vocab: int) -> Iterator[str]:
    """What is wrong with a request. Comparisons are written so that NaN fails them."""
    if not request.prompt_ids:
        yield "prompt_ids is empty"
    elif min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
        yield f"prompt_ids holds an id outside the vocabulary of {vocab}"
    if not request.timeout_s > 0:
        yield f"timeout_s is {request.timeout_s}; it must be positive"
    sampling = request.sampling
    if sampling.max_tokens < 1:
        yield f"max_tokens is {sampling.max_tokens}; it must be >= 1"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield (
            f"min_tokens is {sampling.min_tokens}; it must lie in 0 to max_tokens, which is "
            f"{sampling.max_tokens}"
        )
    if not 0 <= sampling.temperature <= 1e6:
        yield f"temperature is {sampling.temperature}; it must be 0 (greedy) or positive"
    if 0 < sampling.temperature < 1e-6:
        yield f"temperature is {sampling.temperature}; use 0 for greedy"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}; it must lie in (0, 1]"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; it must be >= 0 (0 keeps all)"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p is {sampling.min_p}; it must lie in [0, 1] (0 keeps all)"
    if not 0.01 <= sampling.repetition_penalty <= 100:
        yield (
            f"repetition_penalty is {sampling.repetition_penalty}; it must lie in [0.01, 100] "
            "(1 is off)"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (penalty := getattr(sampling, name)) <= 2:
            yield f"{name} is {penalty}; it must lie in [-2, 2] (0 is off)"
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab:
            yield f"logit_bias names id {token}, which is outside the vocabulary of {vocab}"
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield f"logit_bias of id {token} is {bias}; it must lie in [-{MAX_BIAS}, {MAX_BIAS}]"
    # Ids past the vocabulary are let through: a tokenizer may have more than the model.
    if min(sampling.stop_ids, default=0) < 0:
        yield f"stop_ids holds {min(sampling.stop_ids)}; ids are >= 0"
    if sampling.min_tokens > 0 and len({i for i in sampling.stop_ids if i < vocab}) == vocab:
        yield "min_tokens leaves nothing to sample: stop_ids holds the whole vocabulary"
    if not 0 <= sampling.logprobs <= MAX_ALTERNATIVES:
        yield f"logprobs is {sampling.logprobs}; it must lie in 0 to {MAX_ALTERNATIVES}"
    if not 0 <= (sampling.prompt_logprobs or 0) <= MAX_ALTERNATIVES:
        yield (
            f"prompt_logprobs is {sampling.prompt_logprobs}; it must be None or lie in 0 to "
            f"{MAX_ALTERNATIVES}"
        )
