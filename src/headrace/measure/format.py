"""Chat format: held-out conversations whose next turn the model writes, greedily.

Generation goes through the engine's own core, many prompts at a time; judging is
`tokens.format_check`'s.
"""

from collections.abc import Callable, Sequence

from headrace.data.assistant import held_out
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.model.decoder import Decoder
from headrace.tokens.format_check import (
    FormatExample,
    FormatReport,
    format_examples,
    score_completions,
)
from headrace.tokens.renderer import ChatRenderer

_RUNNING = 32
_TIMEOUT_S = 600.0


def chat_examples(renderer: ChatRenderer, count: int, seed: int = 0) -> list[FormatExample]:
    """`count` turns of held-out built-in conversations."""
    found: list[FormatExample] = []
    asked = count
    while len(found) < count:
        found = [
            example
            for c in held_out(seed, asked)
            for example in format_examples(renderer, c.messages, c.tools, c.mode)
        ]
        asked *= 2
    # One turn in so many, so that first turns and later ones are all there.
    step = len(found) // count
    return found[::step][:count]


def chat_format(
    model: Decoder,
    renderer: ChatRenderer,
    examples: Sequence[FormatExample],
    *,
    max_context: int,
    max_tokens: int,
    progress: Callable[[float], None] = lambda _: None,
) -> FormatReport:
    """Generate every example's turn and judge it. A prompt that is too long counts as wrong."""
    core = EngineCore(
        model,
        EngineConfig(
            max_running=_RUNNING,
            max_context=max_context,
            max_waiting=len(examples),
        ),
    )
    completions: list[tuple[int, ...]] = [()] * len(examples)
    finished = 0
    for index, example in enumerate(examples):
        if len(example.prompt_ids) >= max_context:
            finished += 1
            continue
        sampling = SamplingParams(max_tokens, 0.0, stop_ids=tuple(renderer.stop_ids))
        prompt = tuple(example.prompt_ids)
        core.add(GenerationRequest(str(index), prompt, sampling, timeout_s=_TIMEOUT_S))
    while core.has_work:
        for result in core.step():
            finished += 1
            if isinstance(result, GenerationResult):
                completions[int(result.id)] = tuple(i for span in result.spans for i in span.ids)
        progress(finished / len(examples))
    return score_completions(renderer, examples, completions)
