"""What a model thinks of tokens that somebody else wrote: a teacher's logprobs.

An engine scores a prompt when asked to, and samples one token more, which nobody wants.
"""

import secrets
from collections.abc import Sequence

import msgspec

from headrace.engine.types import (
    Alternatives,
    EngineClient,
    EngineError,
    GenerationRequest,
    SamplingParams,
)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A model's opinion of T ids.

    Attributes:
        logprobs: length T - 1, natural logarithms: of ids[t + 1] after ids[: t + 1], under the
            model's own distribution, whatever anybody sampled with.
        alternatives: length T - 1 where asked for: the likeliest ids there with their logprobs.
    """

    logprobs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...] = ()


async def score_tokens(
    engine: EngineClient,
    ids: Sequence[int],
    *,
    alternatives: int = 0,
    timeout_s: float = 60.0,
    session: str = "",
) -> TokenLogprobs:
    """Logprobs of a sequence under the engine's model, e.g. of a trajectory under a teacher.

    Args:
        engine: of the model; a further model's is `System.models[NAME].engine`.
        ids: T >= 2 ids, at most the engine's context less one.
        alternatives: likeliest ids to report at each position, 0 to 20.
        timeout_s: longest wait.
        session: requests of one session share what is fair for it.

    Raises:
        EngineError: INVALID (too few ids, or alternatives out of range), TOO_LONG, OVERLOADED,
            CLOSED; FAILED when it took too long or the engine reports no logprobs of prompts.
    """
    if len(ids) < 2:
        raise EngineError(
            EngineError.INVALID, f"{len(ids)} ids: nothing is predicted; give at least 2"
        )
    request = GenerationRequest(
        f"score-{secrets.token_hex(8)}",
        tuple(ids),
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=alternatives),
        timeout_s=timeout_s,
        session=session,
    )
    result = await engine.generate(request)
    if len(result.prompt_logprobs) != len(ids):
        raise EngineError(
            EngineError.FAILED,
            f"{len(result.prompt_logprobs)} of {len(ids)} logprobs of a prompt came within "
            f"{timeout_s:g} s ({result.finish_reason})",
        )
    return TokenLogprobs(
        result.prompt_logprobs[1:], result.prompt_alternatives[1:] if alternatives else ()
    )
