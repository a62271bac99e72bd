"""Thinking modes: what a model reads of its own thoughts, while sampling and in training.

`request_renderer` is the renderer of one request under a mode; a budget ends thinking by tokens
that are not sampled. In supervised sequences thinking is laid out as it is when the model samples:
a template decides what the model reads before each of its turns (GLM-5's drops the thinking of
earlier turns when a user speaks again, unless it is told to keep it), so every trained message is
laid out after the prompt of its own moment. Turns whose prompt continues the sequence so far join
it, the others begin a new one, and no turn is trained twice. Pure: ids in, ids and weights out.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import Message
from headrace.tokens.renderer import ChatRenderer


class ThinkingMode(StrEnum):
    """When the model thinks, and how long its thinking stays in the context."""

    INTERLEAVED = "interleaved"
    """Before every answer and tool call. A new user message removes earlier thinking."""
    PRESERVED = "preserved"
    """Before every answer and tool call. All thinking stays."""
    TURN = "turn"
    """Where a message has thinking; the others are sampled with thinking switched off. A new user
    message removes earlier thinking."""


class Thinking(msgspec.Struct, frozen=True):
    """How one request thinks.

    Attributes:
        mode: what stays of earlier thinking.
        enabled: whether this turn thinks at all.
        budget: most tokens of thinking, None for no limit. After these, `next_leg` ends it.
    """

    mode: ThinkingMode = ThinkingMode.INTERLEAVED
    enabled: bool = True
    budget: int | None = None


class TrainingSequence(msgspec.Struct, frozen=True):
    """One supervised sequence of T tokens.

    Attributes:
        ids: [T].
        weights: [T] loss weight of each token; above 0 only on what the model samples.

    Raises:
        ValueError: the lengths differ.
    """

    ids: list[int]
    weights: list[float]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.weights):
            raise ValueError(
                f"TrainingSequence: {len(self.ids)} ids but {len(self.weights)} weights"
            )


class SampledTurn(msgspec.Struct, frozen=True):
    """An assistant message at the moment it is sampled: what is read, and what is written."""

    prompt: list[int]
    completion: list[int]


def has_thinking(message: Message) -> bool:
    """Whether an assistant message thinks before it speaks."""
    return bool((message.get("reasoning_content") or "").strip())


def render_conversation(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    mode: ThinkingMode = ThinkingMode.TURN,
) -> list[TrainingSequence]:
    """A finished conversation for supervised training.

    Args:
        messages: normalised, and on assistant messages possibly `train` (bool or loss weight),
            `error` (True keeps the message in the context and out of the loss), `mask` and
            `reasoning_mask` (lists of [start, end) characters of content and thinking that are kept
            out of the loss). What follows the last trained message is left out.
        tools: OpenAI function tools.
        mode: see `ThinkingMode`.

    Returns:
        Sequences in conversation order. Every token of a trained message has its weight in exactly
        one of them. Empty when nothing is trained.

    Raises:
        ValueError: a message cannot be trained; the text names its place and the remedy.
    """
    sequences: list[TrainingSequence] = []
    ids: list[int] = []
    weights: list[float] = []

    def finish() -> None:
        if any(weights):
            sequences.append(TrainingSequence(ids, weights))

    for i, message in enumerate(messages):
        weight = message_weight(message, f"messages[{i}]")
        if not weight:
            continue
        turn = sampled_turn(renderer, messages[: i + 1], tools, mode)
        if turn.prompt[: len(ids)] != ids:
            finish()
            ids, weights = [], []
        weights = weights + [0.0] * (len(turn.prompt) - len(ids))
        weights += _token_weights(renderer, message, turn.completion, weight)
        ids = turn.prompt + turn.completion
    finish()
    return sequences


def sampled_turn(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    mode: ThinkingMode,
) -> SampledTurn:
    """The last of `messages` as it is sampled after the others.

    Raises:
        ValueError: the mode asks for thinking that is not there, or the format cannot hold it.
    """
    place = f"messages[{len(messages) - 1}]"
    message = messages[-1]
    if len(messages) == 1:
        raise ValueError(f"{place} has nothing before it; begin with a system or user message")
    thinking = has_thinking(message)
    if mode is not ThinkingMode.TURN and not thinking:
        raise ValueError(
            f"{place} has no reasoning_content, which thinking {str(mode)!r} asks of every trained "
            "message; add it, set train=false, or use 'turn'"
        )
    if thinking and not isinstance(renderer, LibraryRenderer):
        raise ValueError(
            f"{place} has reasoning_content, but renderer {renderer.id!r} has no thinking; "
            "remove it or name a renderer that has, such as glm-5"
        )
    as_sampled = sampling_renderer(renderer, mode, thinking=thinking)
    prompt = as_sampled.render(messages[:-1], tools)
    if isinstance(as_sampled, LibraryRenderer):
        completion = as_sampled.completion(messages, tools, prompt)
    else:
        whole, _ = as_sampled.render_training(messages, tools)
        completion = whole[len(prompt) :] if whole[: len(prompt)] == prompt else None
    if completion is None:
        raise ValueError(
            f"{place} cannot be what renderer {renderer.id!r} samples there with thinking "
            f"{'on' if thinking else 'off'}; change the message or the renderer"
        )
    return SampledTurn(prompt, completion)


def sampling_renderer(
    renderer: ChatRenderer, mode: ThinkingMode, *, thinking: bool
) -> ChatRenderer:
    """`renderer` with the options under which a message of this kind is sampled.

    Raises:
        ValueError: the format cannot keep thinking.
    """
    if not isinstance(renderer, LibraryRenderer):
        return renderer
    keep = mode is ThinkingMode.PRESERVED
    if keep and not renderer.can_keep_thinking:
        raise ValueError(
            f"renderer {renderer.id!r} cannot keep earlier thinking; use 'interleaved' or 'turn'"
        )
    return renderer.with_thinking(enabled=thinking, keep=keep)


# ---------------------------------------------------------------- rollouts


def supported_modes(renderer: ChatRenderer) -> frozenset[ThinkingMode]:
    """Modes that a format can do; none for formats without thinking."""
    if not isinstance(renderer, LibraryRenderer):
        # Its own formats keep what was thought, or have no thinking.
        keeps = renderer.think_end_id is not None
        return frozenset({ThinkingMode.PRESERVED} if keeps else ())
    if not renderer.has_thinking:
        return frozenset()
    modes = {ThinkingMode.INTERLEAVED}
    if renderer.can_keep_thinking:
        modes.add(ThinkingMode.PRESERVED)
    if renderer.can_switch_thinking:
        modes.add(ThinkingMode.TURN)
    return frozenset(modes)


def request_renderer(renderer: ChatRenderer, thinking: Thinking) -> ChatRenderer:
    """The renderer that renders and bridges the prompt of one request.

    Under it, `bridge` refuses exactly where the mode takes thinking out of the context, and the
    prompt is rendered afresh; switching thinking on or off between requests does not refuse.

    Raises:
        ValueError: the format cannot do it; the text says what it can.
    """
    modes = supported_modes(renderer)
    if thinking.mode not in modes:
        able = ", ".join(repr(str(mode)) for mode in ThinkingMode if mode in modes)
        remedy = f"use {able}" if able else "this format has no thinking, leave it out"
        raise ValueError(
            f"thinking {str(thinking.mode)!r} is not possible with renderer {renderer.id!r}; "
            f"{remedy}"
        )
    if thinking.budget is not None:
        if thinking.budget < 0:
            raise ValueError(
                f"thinking budget {thinking.budget} is negative; send 0 or more tokens"
            )
        if renderer.think_end_id is None:
            raise ValueError(
                f"a thinking budget is not possible with renderer {renderer.id!r}, which has no "
                "single token that ends thinking; leave it out"
            )
    can_switch = isinstance(renderer, LibraryRenderer) and renderer.can_switch_thinking
    if not thinking.enabled and not can_switch:
        raise ValueError(
            f"renderer {renderer.id!r} cannot switch thinking off; send a budget of 0 instead"
            if renderer.think_end_id is not None
            else f"renderer {renderer.id!r} cannot switch thinking off; leave it on"
        )
    return sampling_renderer(renderer, thinking.mode, thinking=thinking.enabled)


def thinking_stop_ids(renderer: ChatRenderer) -> tuple[int, ...]:
    """Stop ids of the first leg of a request with a budget: it also ends with thinking.

    Ask for `min(budget, max_tokens)` tokens with them, then see `next_leg`.
    """
    end = renderer.think_end_id
    return renderer.stop_ids if end is None else (*renderer.stop_ids, end)


def next_leg(
    renderer: ChatRenderer, prompt_ids: Sequence[int], sampled_ids: Sequence[int]
) -> list[int] | None:
    """Ids to put after the first leg, before the second is sampled with the usual stop ids.

    Returns:
        None when the turn ended already. [] when the model ended its thinking itself, or was not
        thinking when the first leg ended. Else what ends thinking: nobody sampled it, so it never
        trains (law L3), and the second leg is a call of its own that continues the first one with
        these ids as its prompt's delta.
    """
    if sampled_ids and sampled_ids[-1] in renderer.stop_ids:
        return None
    return renderer.close_thinking(prompt_ids, sampled_ids)


# ---------------------------------------------------------------- weights


def message_weight(message: Message, place: str = "message") -> float:
    """Loss weight of a whole message: 0 unless it is an assistant's, and not wrong or excluded.

    Raises:
        ValueError: a training key has a wrong value.
    """
    train = message.get("train", True)
    if not isinstance(train, bool | int | float) or not math.isfinite(train) or train < 0:
        raise ValueError(f"{place}.train is {train!r}; use true, false or a weight of at least 0")
    error = message.get("error", False)
    if not isinstance(error, bool):
        raise ValueError(f"{place}.error is {error!r}; use true or false")
    for key, field in (("mask", "content"), ("reasoning_mask", "reasoning_content")):
        _check_ranges(message.get(key), len(message.get(field) or ""), f"{place}.{key}")
    return float(train) if message["role"] == "assistant" and not error else 0.0


def _check_ranges(ranges: Any, length: int, place: str) -> None:
    if ranges is None:
        return
    if not isinstance(ranges, list | tuple):
        raise ValueError(f"{place} is {ranges!r}; use a list of [start, end] character ranges")
    for i, bounds in enumerate(ranges):
        pair = isinstance(bounds, list | tuple) and [type(bound) for bound in bounds] == [int, int]
        if not pair or not 0 <= bounds[0] < bounds[1] <= length:
            raise ValueError(
                f"{place}[{i}] is {bounds!r}; use [start, end] with 0 <= start < end <= {length}"
            )


def _token_weights(
    renderer: ChatRenderer, message: Message, completion: list[int], weight: float
) -> list[float]:
    """Weights of a completion. A token that shares a character with a masked range gets none.

    Where a masked text cannot be found in the completion again (a format that rewrites it), the
    whole message gets none.
    """
    weights = [weight] * len(completion)
    if not message.get("mask") and not message.get("reasoning_mask"):
        return weights
    at = 0
    texts = [("content", "mask")]
    if has_thinking(message):
        texts.insert(0, ("reasoning_content", "reasoning_mask"))
    for field, key in texts:
        if field == "content" and len(texts) == 2:
            at += 1  # </think>
        text = message.get(field) or ""
        found = _locate(renderer, text, completion, at)
        if found is None:
            return [0.0] * len(completion)
        for start, end in message.get(key) or ():
            for token, (first, last) in enumerate(found, start=at):
                if first < end and start < last:
                    weights[token] = 0.0
        at += len(found)
    return weights


def _locate(
    renderer: ChatRenderer, text: str, completion: list[int], at: int
) -> list[tuple[int, int]] | None:
    """Characters of `text` that each token of `completion` from `at` stands for.

    Formats write a text as it is or without the spaces around it.
    """
    for kept in (text, text.strip()):
        ids, ranges = renderer.tokenizer.encode_with_ranges(kept)
        if completion[at : at + len(ids)] == ids:
            shift = text.index(kept)
            return [(first + shift, last + shift) for first, last in ranges]
    return None
