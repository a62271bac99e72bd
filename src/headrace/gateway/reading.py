"""What an engine sampled, as the message and the numbers its client gets."""

import math
from collections.abc import Sequence

import msgspec

from headrace.engine.types import Alternatives, GenerationResult
from headrace.gateway.plain import PlainReader
from headrace.gateway.request import Attempt, ClientRequest, Prompt, output_ids
from headrace.gateway.turn import Echo, TokenScore
from headrace.rollout.types import ParseState
from headrace.tokens.detokenise import TokenBytes
from headrace.tokens.parsed import ParsedMessage
from headrace.tokens.renderer import ChatRenderer


class OutputReader:
    """Reads completions of one checkpoint.

    Args:
        renderer: of the checkpoint.

    Attributes:
        token_bytes: of its tokenizer.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.token_bytes = TokenBytes(renderer.tokenizer)

    def parse(
        self, request: ClientRequest, attempt: Attempt, result: GenerationResult
    ) -> ParsedMessage:
        """The output as a message. A stop text ends a turn as a stop token would, and is cut off
        with what follows it, as its API says."""
        renderer = request.renderer
        completion = [*attempt.lead, *output_ids(result)]
        if request.turn.prompt is not None:
            reader = PlainReader(self.token_bytes, renderer.stop_ids)
            reader.feed(completion)
            parsed = reader.finish()[1]
            if result.stop is not None:
                parsed = msgspec.structs.replace(parsed, state=ParseState.OK)
        else:
            if result.stop is not None:
                completion.append(renderer.stop_ids[0])
            parsed = renderer.parse(attempt.base, completion, request.turn.tools)
        if result.stop is not None:
            for field in ("content", "reasoning"):
                before, found, _ = (getattr(parsed, field) or "").partition(result.stop)
                if found:
                    return msgspec.structs.replace(parsed, **{field: before})
        return parsed

    def reasoning_tokens(self, parsed: ParsedMessage, completion: list[int], sampled: int) -> int:
        if parsed.reasoning is None:
            return 0
        end = self._renderer.think_end_id
        return min(sampled, completion.index(end) + 1 if end in completion else sampled)

    def scores(
        self, request: ClientRequest, results: Sequence[GenerationResult]
    ) -> tuple[TokenScore, ...] | None:
        """Token by token, the model's own logprobs where the engine reports them."""
        if request.turn.wish.logprobs is None:
            return None

        scores = []
        for result in results:
            output = output_ids(result)
            logprobs = result.raw_logprobs or [p for span in result.spans for p in span.logprobs]
            others = result.alternatives or ((),) * len(output)
            scores += map(self._score, output, logprobs, others)
        return tuple(scores)

    def echo(self, request: ClientRequest, prompt: Prompt, result: GenerationResult) -> Echo | None:
        """The prompt for a client that wants it back; without scores if the engine gave none."""
        turn = request.turn
        if not turn.wish.echo:
            return None
        text = turn.prompt
        if not isinstance(text, str):
            text = b"".join(map(self.token_bytes.of, prompt.ids)).decode(errors="replace")
        scores = None
        logprobs = prompt_logprobs(prompt, result)
        if turn.wish.logprobs is not None and logprobs is not None:
            others = result.prompt_alternatives or ((),) * len(prompt.ids)
            scores = tuple(map(self._score, prompt.ids, logprobs, others))
        return Echo(text, prompt.ids, scores)

    def _score(self, token: int, logprob: float, others: Alternatives) -> TokenScore:
        alternatives = tuple(self._score(other, its, ()) for other, its in others)
        data = self.token_bytes.of(token)
        # JSON has no infinity; OpenAI sends this number for what is all but impossible.
        shown = None if math.isnan(logprob) else max(logprob, -9999.0)
        return TokenScore(data.decode(errors="replace"), data, shown, alternatives, token)


def prompt_logprobs(prompt: Prompt, result: GenerationResult) -> tuple[float, ...] | None:
    """One for each id of the prompt, the first NaN; None if the engine gave none."""
    if len(prompt.ids) == 1:
        return (math.nan,)  # nothing is predicted, so engines have nothing to say
    whole = len(result.prompt_logprobs) == len(prompt.ids)
    return result.prompt_logprobs if whole else None
