"""From what a client wishes and what its session may still do to an engine's parameters."""

import msgspec

from headrace.engine.sampling.seeds import derive_seed
from headrace.engine.types import SamplingParams
from headrace.gateway.constraints import grammar_of
from headrace.gateway.request import ClientRequest, Prompt
from headrace.gateway.turn import invalid


def sampling_of(
    request: ClientRequest,
    prompt: Prompt,
    *,
    context: int,
    default_max_tokens: int,
    stop_ids: tuple[int, ...],
) -> SamplingParams:
    """Parameters of the first call of a request's first answer.

    Args:
        context: most tokens of prompt + output that the engine takes.
        default_max_tokens: for requests that do not say.
        stop_ids: end an output.

    Raises:
        ApiError: 400, the prompt leaves no room.
    """
    session, wish = request.session, request.turn.wish
    if session.limits.context is not None:
        context = min(context, session.limits.context)
    room = context - len(prompt.ids)
    if room < 1:
        raise invalid(
            f"the conversation has {len(prompt.ids)} tokens and the context is {context}; "
            "shorten it",
            param="messages",
            code="context_length_exceeded",
        )
    left = session.tokens_left()
    if left is not None:
        room = min(room, max(1, left))
    seed = wish.seed
    if seed is None and session.seed is not None:
        seed = derive_seed(session.seed, request.ordinal)
    grammar, after = grammar_of(request, prompt.ids)
    return SamplingParams(
        max_tokens=min(wish.max_tokens or default_max_tokens, room),
        temperature=wish.temperature,
        top_p=wish.top_p,
        top_k=wish.top_k,
        min_p=wish.min_p,
        repetition_penalty=wish.repetition_penalty,
        presence_penalty=wish.presence_penalty,
        frequency_penalty=wish.frequency_penalty,
        logit_bias=wish.logit_bias,
        seed=seed,
        stop_ids=stop_ids,
        stop=wish.stop,
        logprobs=wish.logprobs or 0,
        prompt_logprobs=wish.logprobs if wish.echo else None,
        grammar=grammar,
        grammar_after=after,
    )


def next_seed(seed: int | None) -> int | None:
    """The seed of a further call of one answer."""
    return None if seed is None else derive_seed(seed, 0)


def of_answer(sampling: SamplingParams, k: int) -> SamplingParams:
    """Parameters of answer k: another seed than the others', and the prompt is scored once."""
    if k == 0:
        return sampling
    seed = None if sampling.seed is None else derive_seed(sampling.seed, k)
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


def scoring(sampling: SamplingParams) -> SamplingParams:
    """Parameters that score the prompt; an engine samples one token more, which nobody wants."""
    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=sampling.prompt_logprobs)
