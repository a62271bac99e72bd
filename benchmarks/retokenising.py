"""What becomes of sampled tokens on a detour through text, and what a trainer then thinks of them.

The detour is the one of pipelines that keep messages and not tokens: a completion is decoded and
read as an assistant message, the conversation is rendered through the chat template and encoded.
It is taken here as kindly as it can be: every piece of the template is encoded on its own, so text
never merges with the template around it, and a turn that was cut gets no stop token to train on.
"""

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from conversations import Answer, Conversation
from headrace.model.decoder import Decoder
from headrace.tokens.messages import Message
from headrace.tokens.parsed import ParsedMessage
from headrace.tokens.renderer import ChatRenderer


class Rollout(NamedTuple):
    """One conversation as the engine had it and as a client of the API saw it.

    Attributes:
        held: its tokens.
        answers: what was sampled in each turn, in order.
        messages: normalised; those that were not sampled are marked with `train` False.
        tools: OpenAI tool specifications.
    """

    held: Conversation
    answers: list[Answer]
    messages: list[Message]
    tools: list[dict[str, Any]]


class Trained(NamedTuple):
    """A training sequence of T tokens.

    Attributes:
        ids: all of them.
        turns: positions of the trained tokens of each turn.
    """

    ids: list[int]
    turns: list[list[int]]


class Turn(NamedTuple):
    """What happened to one turn.

    Attributes:
        differs: its tokens are others after the detour.
        remerged: its text is encoded with other tokens than it was sampled with.
        bytes_lost: it holds bytes that are no UTF-8.
        specials_spelt: it holds special tokens where the format has none, which come back as the
            characters of their names: text of messages must not forge tokens of the template.
        reserialised: its text is another after reading and rendering.
        calls: it calls tools.
    """

    differs: bool
    remerged: bool
    bytes_lost: bool
    specials_spelt: bool
    reserialised: bool
    calls: bool


def assistant_message(parsed: ParsedMessage) -> Message:
    """What a client of the API keeps of a completion."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.tool_calls)
        ]
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    return message


def exact(rollout: Rollout) -> Trained:
    """The tokens that were sampled."""
    return Trained(rollout.held.ids, _runs(rollout.held.mask))


def from_text(rollout: Rollout, renderer: ChatRenderer) -> Trained:
    """The same conversation after the detour."""
    ids, mask = renderer.render_training(rollout.messages, rollout.tools)
    turns = _runs(mask)
    if len(turns) != len(rollout.answers):
        raise ValueError(f"{len(rollout.answers)} turns were sampled, {len(turns)} rendered")
    for turn, answer in zip(turns, rollout.answers, strict=True):
        if answer.ids[-1] not in renderer.stop_ids:
            del turn[-1]
    return Trained(ids, turns)


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """Positions of each unbroken run of True."""
    runs: list[list[int]] = []
    for position, trained in enumerate(mask):
        if trained and position and mask[position - 1]:
            runs[-1].append(position)
        elif trained:
            runs.append([position])
    return runs


def look_at(rollout: Rollout, text: Trained, renderer: ChatRenderer) -> list[Turn]:
    """What happened to each turn."""
    found = []
    special = set(renderer.tokenizer.special_ids.values()) - set(renderer.stop_ids)
    sampled = [message for message in rollout.messages if message.get("train", True)]
    said = [message for message in sampled if message["role"] == "assistant"]
    for answer, positions, message in zip(rollout.answers, text.turns, said, strict=True):
        after = [text.ids[p] for p in positions]
        written = renderer.decode(answer.ids)
        lost = "\ufffd" in written
        found.append(
            Turn(
                differs=after != answer.ids,
                remerged=not lost and encoded_again(answer.ids, renderer) != answer.ids,
                bytes_lost=lost,
                specials_spelt=sum(i in special for i in after)
                < sum(i in special for i in answer.ids),
                reserialised=not lost and renderer.decode(after) != written,
                calls=bool(message.get("tool_calls")),
            )
        )
    return found


def encoded_again(ids: Sequence[int], renderer: ChatRenderer) -> list[int]:
    """Ids of the text of `ids`, which is left as it is; special tokens stay what they are."""
    special = set(renderer.tokenizer.special_ids.values())
    result: list[int] = []
    piece: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in special:
            piece.append(token)
            continue
        result += renderer.tokenizer.encode_text(renderer.decode(piece)) if piece else []
        piece = []
        result += [] if token is None else [token]
    return result


class Errors(NamedTuple):
    """Of a trainer's logprobs over one sequence against the recorded ones, nats.

    Attributes:
        aligned: |error| of each token that has a recorded logprob of its own: it is in a longest
            common subsequence of its turn before and after the detour.
        by_position: |error| if recorded logprobs are laid over a turn's tokens one by one, as far
            as both go.
        trained: tokens that the sequence trains.
        whole: |difference| of the sums over the sequence's trained and all recorded tokens.
    """

    aligned: list[float]
    by_position: list[float]
    trained: int
    whole: float


@torch.no_grad()
def score(model: Decoder, sequence: Trained) -> list[list[float]]:
    """The model's logprob of every trained token, turn by turn. Position 0 is never trained."""
    ids = torch.tensor([sequence.ids])
    hidden = model(ids)
    wanted = torch.tensor([p for turn in sequence.turns for p in turn])
    logits = model.logits(hidden[:, wanted - 1])[0].float()
    found = logits.log_softmax(-1).gather(1, ids[0, wanted, None])[:, 0].tolist()
    numbers = iter(found)
    return [[next(numbers) for _ in turn] for turn in sequence.turns]


def errors(rollout: Rollout, sequence: Trained, scored: Sequence[Sequence[float]]) -> Errors:
    """Compare what a trainer thinks of `sequence` with what was recorded."""
    aligned: list[float] = []
    by_position: list[float] = []
    for answer, positions, own in zip(rollout.answers, sequence.turns, scored, strict=True):
        ids = [sequence.ids[p] for p in positions]
        for before, after in aligned_pairs(answer.ids, ids):
            aligned.append(abs(own[after] - answer.logprobs[before]))
        pairs = zip(own, answer.logprobs, strict=False)
        by_position += [abs(mine - recorded) for mine, recorded in pairs]
    recorded = sum(sum(answer.logprobs) for answer in rollout.answers)
    whole = abs(sum(map(sum, scored)) - recorded)
    return Errors(aligned, by_position, sum(map(len, sequence.turns)), whole)


def aligned_pairs(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Positions (before, after) of equal tokens in order, in as long runs as there are."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        (block.a + i, block.b + i)
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]
