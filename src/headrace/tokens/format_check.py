"""How well a model keeps to the chat format: thinking when asked, calls that tools accept, an end.

One example is one assistant turn: the prompt at its moment, and what a finished conversation says
there. Form (`FormatScore.following`) and being right are separate. Pure functions; whoever has an
engine brings `generate` or the completions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.rollout.types import ParseState
from headrace.tokens.messages import Message, call_arguments
from headrace.tokens.renderer import ChatRenderer, ParsedMessage
from headrace.tokens.schema import accepts
from headrace.tokens.thinking import ThinkingMode, has_thinking, message_weight, sampled_turn

ASPECTS = ("parsed", "thinking", "call", "ended")
_SHOWN_EXAMPLES = 8


class ExpectedCall(msgspec.Struct, frozen=True):
    """A tool call that is right; `arguments` is an object."""

    name: str
    arguments: dict[str, Any]


class Expectation(msgspec.Struct, frozen=True):
    """What a turn should be.

    Attributes:
        thinking: whether the prompt asks for thinking.
        calls: the right calls, in any order; () expects an answer.
        answer: the right answer where there are no calls; None accepts any.
    """

    thinking: bool
    calls: tuple[ExpectedCall, ...] = ()
    answer: str | None = None


class FormatExample(msgspec.Struct, frozen=True):
    """A prompt, the tools it shows, and what should come."""

    prompt_ids: list[int]
    tools: list[dict[str, Any]]
    expectation: Expectation


class FormatScore(msgspec.Struct, frozen=True):
    """Aspects of one completion.

    Attributes:
        parsed: it can be read as a message, and no stray format token is left in its text.
        thinking: there is thinking exactly when the prompt asks for it.
        call: where calls are expected, there are some, all of declared tools with arguments that
            their schemas accept; elsewhere there is none, and there is an answer.
        ended: it ends with a stop token, the one that fits: after calls the tools speak, after an
            answer the user.
        correct: the calls or the answer are the expected ones. No matter of form.
    """

    parsed: bool
    thinking: bool
    call: bool
    ended: bool
    correct: bool

    @property
    def following(self) -> bool:
        """Whether every aspect of form is right."""
        return all(getattr(self, aspect) for aspect in ASPECTS)


class ScoredExample(msgspec.Struct, frozen=True):
    """One example for people: the end of the prompt, what was expected and what came."""

    prompt: str
    completion: str
    expected: Expectation
    score: FormatScore


class FormatReport(msgspec.Struct, frozen=True):
    """Rates over examples, each in [0, 1].

    Attributes:
        count: number of examples.
        following: share with every aspect of form right.
        rates: share per aspect, and "correct"; where it applies also "thinking_on",
            "thinking_off", "call_expected" and "answer_expected", shares of examples of that kind
            with every aspect of form right.
        examples: a few, those that fail first.
    """

    count: int
    following: float
    rates: dict[str, float]
    examples: list[ScoredExample]


def format_example(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    mode: ThinkingMode,
) -> FormatExample:
    """The last of `messages`, an assistant's, as an example.

    Raises:
        ValueError: it cannot be sampled there; see `sampled_turn`.
    """
    message = messages[-1]
    calls = tuple(
        ExpectedCall(call["function"]["name"], call_arguments(call["function"]["arguments"]) or {})
        for call in message.get("tool_calls", ())
    )
    expectation = Expectation(has_thinking(message), calls, None if calls else message["content"])
    prompt = sampled_turn(renderer, messages, tools, mode).prompt
    return FormatExample(prompt, list(tools), expectation)


def format_examples(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    mode: ThinkingMode,
) -> list[FormatExample]:
    """One example for every assistant message of a conversation that is not marked as wrong."""
    return [
        format_example(renderer, messages[: i + 1], tools, mode)
        for i, message in enumerate(messages)
        if message_weight(message, f"messages[{i}]")
    ]


# ---------------------------------------------------------------- one completion


def check_completion(
    renderer: ChatRenderer,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    tools: Sequence[dict[str, Any]],
    expectation: Expectation,
) -> FormatScore:
    """Judge one completion, stop token included; any ids have a score."""
    parsed = renderer.parse(prompt_ids, completion_ids, tools)
    whole = parsed.state is not ParseState.TRUNCATED
    if expectation.calls:
        calls_fit = bool(parsed.tool_calls) and all(
            _call_fits(call.name, call.arguments, tools) for call in parsed.tool_calls
        )
    else:
        calls_fit = not parsed.tool_calls and bool(parsed.content.strip())
    calls_fit = calls_fit and not parsed.unreadable
    end = renderer.tokenizer.special_ids.get("</think>")
    endless = expectation.thinking and end not in completion_ids
    clean = parsed.state is ParseState.OK and not _has_stray_tokens(
        renderer, parsed, prompt_ids, completion_ids
    )
    return FormatScore(
        parsed=clean,
        thinking=whole and bool(parsed.reasoning) is expectation.thinking and not endless,
        call=whole and calls_fit,
        ended=_ended(renderer, completion_ids, calls=bool(parsed.tool_calls)),
        correct=clean and _is_right(parsed, expectation),
    )


def _has_stray_tokens(
    renderer: ChatRenderer,
    parsed: ParsedMessage,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
) -> bool:
    """Format tokens that the parser left in a text, or took for an end of thinking once more."""
    special = renderer.tokenizer.special_ids
    texts = (parsed.content, parsed.reasoning or "")
    if any(literal in text for literal in special for text in texts):
        return True
    opened = bool(prompt_ids) and prompt_ids[-1] == special.get("<think>")
    return opened and list(completion_ids).count(special["</think>"]) != 1


def _call_fits(name: str, arguments: str, tools: Sequence[dict[str, Any]]) -> bool:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = function.get("parameters") or {}
            return accepts({"type": "object", **schema}, call_arguments(arguments))
    return False


def _ended(renderer: ChatRenderer, completion_ids: Sequence[int], *, calls: bool) -> bool:
    """Formats whose turns end with the next role's opener have one stop token for each role."""
    if not completion_ids or completion_ids[-1] not in renderer.stop_ids:
        return False
    special = renderer.tokenizer.special_ids
    fitting = special.get("<|observation|>" if calls else "<|user|>")
    if fitting not in renderer.stop_ids:
        return True
    return completion_ids[-1] == fitting


def _is_right(parsed: ParsedMessage, expectation: Expectation) -> bool:
    if expectation.calls:
        made = [(call.name, call_arguments(call.arguments)) for call in parsed.tool_calls]
        wanted = [(call.name, call.arguments) for call in expectation.calls]
        return len(made) == len(wanted) and all(made.count(c) == wanted.count(c) for c in wanted)
    if parsed.tool_calls:
        return False
    return expectation.answer is None or _plain(parsed.content) == _plain(expectation.answer)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


# ---------------------------------------------------------------- many completions


def evaluate_format(
    renderer: ChatRenderer,
    examples: Sequence[FormatExample],
    generate: Callable[[Sequence[int]], Sequence[int]],
) -> FormatReport:
    """Generate after each prompt and judge what comes.

    Args:
        generate: prompt ids to completion ids, stop token included where one was sampled.
    """
    return score_completions(
        renderer, examples, [generate(example.prompt_ids) for example in examples]
    )


def score_completions(
    renderer: ChatRenderer,
    examples: Sequence[FormatExample],
    completions: Sequence[Sequence[int]],
) -> FormatReport:
    """Judge completions that were generated before, in the order of `examples`.

    Raises:
        ValueError: the numbers differ, or there are none.
    """
    if not examples or len(examples) != len(completions):
        raise ValueError(f"{len(examples)} examples but {len(completions)} completions")
    scores = [
        check_completion(renderer, e.prompt_ids, ids, e.tools, e.expectation)
        for e, ids in zip(examples, completions, strict=True)
    ]
    followed: dict[str, list[bool]] = {}
    for example, score in zip(examples, scores, strict=True):
        expected = example.expectation
        kinds = (
            "thinking_on" if expected.thinking else "thinking_off",
            "call_expected" if expected.calls else "answer_expected",
        )
        for kind in kinds:
            followed.setdefault(kind, []).append(score.following)
    rates = {
        aspect: sum(getattr(score, aspect) for score in scores) / len(scores)
        for aspect in (*ASPECTS, "correct")
    }
    rates |= {kind: sum(oks) / len(oks) for kind, oks in sorted(followed.items())}
    order = sorted(range(len(scores)), key=lambda i: (scores[i].following, scores[i].correct, i))
    return FormatReport(
        count=len(scores),
        following=sum(score.following for score in scores) / len(scores),
        rates=rates,
        examples=[
            ScoredExample(
                _last_turns(renderer, examples[i].prompt_ids),
                renderer.decode(completions[i]),
                examples[i].expectation,
                scores[i],
            )
            for i in order[:_SHOWN_EXAMPLES]
        ],
    )


def _last_turns(renderer: ChatRenderer, prompt_ids: Sequence[int]) -> str:
    """The prompt from the last user message on, or its end."""
    text = renderer.decode(prompt_ids)
    for opener in ("<|user|>", "<|im_start|>user"):
        if opener in text:
            return text[text.rindex(opener) :]
    return text[-500:]
