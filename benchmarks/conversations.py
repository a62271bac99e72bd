"""Conversations of several turns, for an engine's logprobs to be compared with a trainer's.

What is said does not depend on who answers: questions and follow-ups rendered as the gateway does
it, or pieces of running text.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.errors import UserError
from headrace.rollout.types import Segment
from headrace.tokens.renderer import ChatRenderer
from headrace.training.batch import Sample, rollout_sample

OPENINGS = (
    "Explain to a child why the sky is blue, and why it turns red in the evening.",
    "Write a Python function that returns the n-th Fibonacci number, and say how fast it is.",
    "What are three good reasons to learn a foreign language as an adult?",
    "List the planets of the solar system from the smallest to the largest.",
    "My bread does not rise. What could be wrong, and what should I try first?",
    "Summarise the plot of Romeo and Juliet in four sentences.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Write a polite email that asks my landlord to repair the heating before winter.",
)
FOLLOW_UPS = (
    "Thank you. Now say the same again in simpler words, and add one example from daily life.",
    "I am not sure that this is right. Please check your answer step by step and correct it.",
    "Which part of this is the most important one, and what happens if somebody leaves it out?",
    "Imagine that I have only one minute. What would you tell me, and what would you leave out?",
    "Write a short list of questions that a teacher could ask a class about what you just said.",
    "That helps. What would an expert say about it that most people have never heard before?",
)
LATER = 24
"""New tokens of the pieces of text after the first."""
TIMEOUT_S = 3600.0

Speaker = Callable[[int, int, list[int], list[int]], list[int]]
"""(conversation, turn, ids before the last answer, last answer) -> ids to add before the next."""


class Model(NamedTuple):
    """A checkpoint and who talks to it.

    Attributes:
        context: most tokens of a conversation.
    """

    path: Path
    speak: Speaker
    stop_ids: tuple[int, ...]
    context: int


class Answer(NamedTuple):
    """What was sampled, and the logprobs that were reported."""

    ids: list[int]
    logprobs: list[float]


Generate = Callable[[list[list[int]], list[int]], list[Answer]]
"""(prompts, seeds) -> answers, all computed together."""


class Conversation:
    """What one session read and wrote, and what the engine reported."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.answer: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []

    @property
    def ids(self) -> list[int]:
        """Everything."""
        return self.before + self.answer

    def read(self, added: Sequence[int]) -> None:
        """The next prompt is everything so far and `added`."""
        self.before, self.answer = [*self.ids, *added], []
        self.mask += [False] * len(added)
        self.logprobs += [0.0] * len(added)

    def wrote(self, answer: Answer) -> None:
        """The answer to it."""
        self.answer = answer.ids
        self.mask += [True] * len(answer.ids)
        self.logprobs += answer.logprobs

    def sample(self) -> Sample:
        """As the trainer gets it."""
        versions = tuple(0 if sampled else -1 for sampled in self.mask)
        segment = Segment("", tuple(self.ids), tuple(self.mask), tuple(self.logprobs), versions)
        return rollout_sample(segment, advantage=1.0)


def chat(renderer: ChatRenderer) -> Speaker:
    """Questions and follow-ups, rendered as the gateway does it."""

    def speak(number: int, turn: int, before: list[int], answer: list[int]) -> list[int]:
        if turn == 0:
            text = OPENINGS[number % len(OPENINGS)]
            return renderer.render([{"role": "user", "content": text}], [])
        text = FOLLOW_UPS[(number + turn) % len(FOLLOW_UPS)]
        added = renderer.bridge(before, answer, [{"role": "user", "content": text}], [])
        if added is None:
            raise UserError("the model's chat template cannot be continued; choose another model")
        return added

    return speak


def reading(ids: np.ndarray, turns: int, first: int) -> Speaker:
    """Pieces of running text [n]: one of `first` tokens, then short ones that follow it."""
    length = first + (turns - 1) * LATER

    def speak(number: int, turn: int, before: list[int], answer: list[int]) -> list[int]:
        start = number * length % max(1, len(ids) - length)
        begin = start + (first + (turn - 1) * LATER if turn else 0)
        return ids[begin : begin + (LATER if turn else first)].tolist()

    return speak


class Embedded:
    """Answers of our engine.

    Attributes:
        prefilled: prompt tokens it computed after the first call.
    """

    def __init__(self, core: EngineCore, new: int, stop_ids: tuple[int, ...]) -> None:
        self.prefilled = 0
        self._core = core
        self._new = new
        self._stop_ids = stop_ids
        self._first: int | None = None

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[Answer]:
        core = self._core
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampling = SamplingParams(self._new, seed=seed, stop_ids=self._stop_ids)
            core.add(
                GenerationRequest(str(number), tuple(prompt), sampling, TIMEOUT_S, str(number))
            )
        answers: dict[int, Answer] = {}
        while core.has_work:
            for result in core.step():
                if not isinstance(result, GenerationResult):
                    raise RuntimeError(f"not a result: {result}")
                answer = answers[int(result.id)] = Answer([], [])
                for span in result.spans:
                    answer.ids.extend(span.ids)
                    answer.logprobs.extend(span.logprobs)
        computed = core.stats().tokens_prefilled
        self._first = computed if self._first is None else self._first
        self.prefilled = computed - self._first
        return [answers[number] for number in range(len(prompts))]


def talk(
    generate: Generate, model: Model, arguments: argparse.Namespace
) -> tuple[list[Conversation], int]:
    """All conversations at once, turn by turn.

    Returns:
        The conversations, and the new prompt tokens of all turns but the first.
    """
    conversations = [Conversation() for _ in range(arguments.conversations)]
    new = 0
    for turn in range(arguments.turns):
        for number, conversation in enumerate(conversations):
            added = model.speak(number, turn, conversation.before, conversation.answer)
            new += len(added) if turn else 0
            conversation.read(added)
        seeds = [1000 * number + turn for number in range(len(conversations))]
        answers = generate([conversation.before for conversation in conversations], seeds)
        for conversation, answer in zip(conversations, answers, strict=True):
            conversation.wrote(answer)
    return conversations, new
