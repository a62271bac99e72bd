"""Which requests no engine of a given vocabulary and context can run. Needs no torch."""

from collections.abc import Iterator
from typing import NamedTuple

from headrace.engine.sampling.stops import stop_problems
from headrace.engine.types import EngineError, GenerationRequest, SamplingParams

MAX_ALTERNATIVES = 20
"""Most alternatives reported for one token, as in the OpenAI API."""
MAX_BIAS = 100
"""Largest change of one logit, as in the OpenAI API."""
MAX_GRAMMAR_BYTES = 64 * 1024
"""Longest grammar of a request."""
LEAST_TEMPERATURE = 1e-6
"""The smallest that is not 0, which is greedy."""


class Range(NamedTuple):
    """What a number may be, and what turns it off."""

    low: float
    high: float
    off: str


RANGES = {
    "min_p": Range(0.0, 1.0, "0 keeps all"),
    "repetition_penalty": Range(0.01, 100.0, "1 is off"),
    "presence_penalty": Range(-2.0, 2.0, "0 is off"),
    "frequency_penalty": Range(-2.0, 2.0, "0 is off"),
}
"""Of parameters that have one for every engine and every API."""


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
    resumed = request.resumed
    if not 0 <= resumed < max(1, len(request.prompt_ids)):
        yield f"resumed is {resumed}; it must be >= 0 and less than the length of prompt_ids"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens + resumed:
        yield (
            f"min_tokens is {sampling.min_tokens}; it must lie in 0 to max_tokens, which is "
            f"{sampling.max_tokens}"
        )
    if not 0 <= sampling.temperature <= 1e6:
        yield f"temperature is {sampling.temperature}; it must be 0 (greedy) or positive"
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        yield f"temperature is {sampling.temperature}; use 0 for greedy"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}; it must lie in (0, 1]"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; it must be >= 0 (0 keeps all)"
    for name, (low, high, off) in RANGES.items():
        if not low <= (value := getattr(sampling, name)) <= high:
            yield f"{name} is {value}; it must lie in [{low:g}, {high:g}] ({off})"
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
    yield from stop_problems(sampling.stop)
    yield from _grammar_problems(sampling, vocab)
    if not 0 <= sampling.logprobs <= MAX_ALTERNATIVES:
        yield f"logprobs is {sampling.logprobs}; it must lie in 0 to {MAX_ALTERNATIVES}"
    if not 0 <= (sampling.prompt_logprobs or 0) <= MAX_ALTERNATIVES:
        yield (
            f"prompt_logprobs is {sampling.prompt_logprobs}; it must be None or lie in 0 to "
            f"{MAX_ALTERNATIVES}"
        )


def _grammar_problems(sampling: SamplingParams, vocab: int) -> Iterator[str]:
    try:
        size = len(sampling.grammar.encode())
    except UnicodeEncodeError:
        yield "grammar is no Unicode text (it holds a lone surrogate)"
        return
    if size > MAX_GRAMMAR_BYTES:
        yield f"grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
    if sampling.grammar and sampling.min_tokens:
        yield (
            f"min_tokens is {sampling.min_tokens}; it must be 0 with a grammar, which says when an "
            "output may end"
        )
    after = sampling.grammar_after
    if after is not None and not 0 <= after < vocab:
        yield f"grammar_after is {after}, which is outside the vocabulary of {vocab}"
