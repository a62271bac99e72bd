"""What an engine sampled, as the message and the numbers its client gets."""

from collections.abc import Sequence

import msgspec

from headrace.engine.types import GenerationResult
from headrace.gateway.plain import PlainReader
from headrace.gateway.request import Attempt, ClientRequest, output_ids
from headrace.gateway.turn import TokenScore
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

        def score(token: int, logprob: float) -> TokenScore:
            data = self.token_bytes.of(token)
            # JSON has no infinity; OpenAI sends this number for what is all but impossible.
            return TokenScore(data.decode(errors="replace"), data, max(logprob, -9999.0))

        scores = []
        for result in results:
            output = output_ids(result)
            logprobs = result.raw_logprobs or [p for span in result.spans for p in span.logprobs]
            others = result.alternatives or ((),) * len(output)
            for token, logprob, some in zip(output, logprobs, others, strict=True):
                alternatives = tuple(score(*one) for one in some)
                scores.append(score(token, logprob)._replace(alternatives=alternatives))
        return tuple(scores)
