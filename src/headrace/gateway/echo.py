"""A prompt told back with its logprobs, as OpenAI's completions do with `echo`: how a teacher's
opinion of given tokens is asked for over HTTP. In process, `engine.scoring` is shorter."""

import time

from headrace.engine.types import GenerationResult
from headrace.gateway.reading import prompt_logprobs
from headrace.gateway.request import ClientRequest, Prompt
from headrace.gateway.turn import Answer, ApiError, Echo, Usage, unsupported
from headrace.rollout.types import FinishReason


def require_scores(request: ClientRequest, prompt: Prompt, result: GenerationResult) -> None:
    """Refuse to tell a prompt back without the logprobs that were asked for.

    Raises:
        ApiError: 504, there was no time for them; 400, the engine has none.
    """
    wish = request.turn.wish
    if not wish.echo or wish.logprobs is None or prompt_logprobs(prompt, result):
        return
    if result.finish_reason in (FinishReason.DEADLINE, FinishReason.ABORTED):
        raise ApiError(
            504, "engine_timeout", "the prompt's logprobs were not computed in time; retry"
        )
    raise unsupported(
        "echo", True, "this engine reports no logprobs of prompts: leave out echo or logprobs"
    )


def scored_answer(request: ClientRequest, prompt: Prompt, echo: Echo | None) -> Answer:
    """The answer to a request that wants its prompt alone."""
    return Answer(
        response_id=request.response_id,
        index=0,
        content="",
        reasoning=None,
        tool_calls=(),
        finish="length",
        stop=None,
        scores=None if request.turn.wish.logprobs is None else (),
        prompt_ids=prompt.ids,
        echo=echo,
        usage=Usage(len(prompt.ids), 0),
        record={},
        created=int(time.time()),
    )
