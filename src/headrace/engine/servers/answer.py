"""What an inference server sampled for one request, whatever its make."""

import msgspec

from headrace.engine.types import Alternatives, EngineError, SamplingParams
from headrace.rollout.types import FinishReason, Span


class Answer(msgspec.Struct, frozen=True):
    """What a server sampled for one request.

    Attributes:
        ids, logprobs: of the output, one each.
        reason: ABORTED where the server ended it early, whoever asked for that.
        spans: of these ids, where the server says which version sampled what; None: it does not.

    All else is as in `GenerationResult`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason
    spans: tuple[Span, ...] | None = None
    raw_logprobs: tuple[float, ...] = ()
    alternatives: tuple[Alternatives, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_alternatives: tuple[Alternatives, ...] = ()
    stop: str | None = None
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    queue_s: float = 0.0


NOTHING = Answer((), (), FinishReason.ABORTED)


def samples_raw(sampling: SamplingParams) -> bool:
    """Whether both logprobs of `SamplingParams` are the same number: tokens are drawn from, or are
    the likeliest of, the model's own distribution."""
    plain = (
        sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and not any(sampling.logit_bias.values())
        and not (sampling.min_tokens and sampling.stop_ids)
    )
    if sampling.temperature == 0:
        return plain
    filters = sampling.top_p < 1 or sampling.top_k or sampling.min_p
    return plain and sampling.temperature == 1 and not filters


def finish_reason(said: str | None, server: str) -> FinishReason:
    """Why a request ended, in the word that `server` has for it.

    Raises:
        EngineError: FAILED: a word for something else.
    """
    match said:
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
        case "abort":
            return FinishReason.ABORTED
        case other:
            raise EngineError(EngineError.FAILED, f"{server} ended the request with {other!r}")


def version_of(label: str) -> int | None:
    """The version that a server's label spells; None if it is another's."""
    return int(label) if label.isascii() and label.isdigit() else None
