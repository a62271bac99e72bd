"""Synthetic documents whose end can be predicted only by looking far back: facts and questions.

    The old miller crossed the bridge at noon.
    The value of QXB is 4821.
    A young fox slept in the yard after the rain.
    ...
    What is the value of QXB? 4821

One fact is a needle; more of them are distractors of the same shape (multi-key), and several can be
asked for (multi-query). Keys of the held-out split never appear in training documents, so scores
measure looking up, not memory. Lines are encoded one by one: ids are exact, spans too.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from headrace.errors import UserError

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HELD_OUT_SHARE = 8
"""One key of so many is kept for evaluation."""

_WHO = (
    "The old miller", "A young fox", "The quiet teacher", "Her brother", "The grey heron",
    "A tired sailor", "The baker's son", "Our neighbour", "The red cart", "A small boat",
    "The night train", "Some children",
)  # fmt: skip
_DID = (
    "crossed the bridge", "slept in the yard", "waited by the gate", "passed the orchard",
    "stopped at the mill", "went down to the river", "stood under the oak", "came round the hill",
    "rested near the well", "turned into the lane",
)  # fmt: skip
_WHEN = (
    "at noon", "before dawn", "after the rain", "in the early spring", "on a cold morning",
    "late in the evening", "while the bells rang", "without a word",
)  # fmt: skip
FILLER = tuple(f"{who} {did} {when}.\n" for who in _WHO for did in _DID for when in _WHEN)
"""The lines between the facts: plain sentences, none of them about a value."""


class TextEncoder(Protocol):
    """What a tokenizer has to offer here (`headrace.tokens.tokenizer.TextTokenizer` does)."""

    def encode_text(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class RetrievalExample:
    """One document of T tokens, `ids[answer_start:]` beginning with the last answer.

    Attributes:
        text: what the ids say.
        ids: int32 [T].
        answers: [start, stop) token spans of the answers, in order, never empty.
        depth: where the fact that the last question asks for lies, 0 (beginning) to 1 (end).
    """

    text: str
    ids: np.ndarray
    answers: tuple[tuple[int, int], ...]
    depth: float

    @property
    def answer_start(self) -> int:
        """Index of the last answer's first token; ids before it are the prompt to evaluate."""
        return self.answers[-1][0]

    @property
    def answer_ids(self) -> np.ndarray:
        """Ids of the last answer, what greedy decoding of the prompt has to give."""
        start, stop = self.answers[-1]
        return self.ids[start:stop]

    def weights(self, answer: float = 1.0, context: float = 1.0) -> np.ndarray:
        """Loss weights float32 [T]: `answer` on the answers, `context` elsewhere."""
        weights = np.full(len(self.ids), context, np.float32)
        for start, stop in self.answers:
            weights[start:stop] = answer
        return weights


class RetrievalWriter:
    """Writes examples with one tokenizer; remembers how filler lines are encoded."""

    def __init__(
        self,
        tokenizer: TextEncoder,
        *,
        filler: Sequence[str] = FILLER,
        key_letters: int = 3,
        value_digits: int = 4,
    ) -> None:
        """
        Args:
            tokenizer: encodes the lines.
            filler: lines to hide the facts among, e.g. of a corpus, each ending with a line break.
            key_letters: letters of a key, 2 to 8.
            value_digits: digits of a value, 1 to 8.

        Raises:
            UserError: no filler, or sizes outside their ranges.
        """
        if not filler:
            raise UserError("retrieval filler is empty; give at least one line")
        if not 2 <= key_letters <= 8:
            raise UserError(f"retrieval key_letters = {key_letters}: must be 2 to 8")
        if not 1 <= value_digits <= 8:
            raise UserError(f"retrieval value_digits = {value_digits}: must be 1 to 8")
        self._tokenizer = tokenizer
        self._filler = tuple(filler)
        self._key_letters = key_letters
        self._value_digits = value_digits
        self._encoded: dict[int, list[int]] = {}

    def example(
        self,
        seed: int,
        tokens_target: int,
        keys: int = 1,
        *,
        split: Literal["train", "held_out"] = "train",
        queries: int = 1,
        depth: float | None = None,
    ) -> RetrievalExample:
        """One document; equal arguments give equal documents.

        Args:
            seed: which of the documents.
            tokens_target: most tokens; filler is added while it fits, so it is missed by less
                than a line.
            keys: facts in the text.
            split: which keys may appear.
            queries: questions at the end, of different keys, 1 <= queries <= keys.
            depth: place of the fact asked last, 0 to 1; None: anywhere.

        Raises:
            UserError: facts and questions alone exceed tokens_target, or there are not so many
                keys.
        """
        self._check(keys, queries, split, depth)
        # A string seed is hashed by `random` itself, the same way everywhere.
        rng = random.Random(f"{seed}/{split}/{keys}/{queries}/{tokens_target}")
        facts = self._facts(rng, keys, split)
        asked = rng.sample(range(keys), queries)
        encode = self._tokenizer.encode_text
        fact_texts = [f"The value of {key} is {value}.\n" for key, value in facts]
        fact_ids = [encode(text) for text in fact_texts]
        tail: list[tuple[str, list[int], bool]] = []
        for i in asked:
            key, value = facts[i]
            question = f"What is the value of {key}? "
            tail += [(question, encode(question), False), (value, encode(value), True)]
            tail.append(("\n", encode("\n"), False))
        room = tokens_target - sum(map(len, fact_ids)) - sum(len(ids) for _, ids, _ in tail)
        if room < 0:
            raise UserError(
                f"retrieval tokens_target = {tokens_target}: {keys} facts and {queries} questions "
                f"alone need {tokens_target - room} tokens; raise it or ask for fewer"
            )
        lines = self._filler_lines(rng, room)
        places = [rng.randrange(len(lines) + 1) for _ in facts]
        if depth is not None:
            places[asked[-1]] = round(depth * len(lines))
        order = sorted(range(keys), key=lambda i: (places[i], rng.random()))
        return self._assemble(lines, fact_texts, fact_ids, places, order, tail, asked[-1])

    def _check(self, keys: int, queries: int, split: str, depth: float | None) -> None:
        if split not in ("train", "held_out"):
            raise UserError(f"retrieval split {split!r}: use 'train' or 'held_out'")
        if not 1 <= queries <= keys:
            raise UserError(f"retrieval queries = {queries}: must be 1 to keys = {keys}")
        # Half of a split at most, so that drawing by trial ends soon.
        most = len(_LETTERS) ** self._key_letters // _HELD_OUT_SHARE // 2
        if keys > most:
            raise UserError(f"retrieval keys = {keys}: at most {most}; raise key_letters")
        if depth is not None and not 0 <= depth <= 1:
            raise UserError(f"retrieval depth = {depth}: must be 0 to 1")

    def _facts(self, rng: random.Random, keys: int, split: str) -> list[tuple[str, str]]:
        facts: dict[str, str] = {}
        while len(facts) < keys:
            key = "".join(rng.choice(_LETTERS) for _ in range(self._key_letters))
            if key not in facts and is_held_out_key(key) == (split == "held_out"):
                facts[key] = "".join(str(rng.randrange(10)) for _ in range(self._value_digits))
        return list(facts.items())

    def _filler_lines(self, rng: random.Random, room: int) -> list[int]:
        """Numbers of filler lines that take up to `room` tokens."""
        lines: list[int] = []
        while True:
            line = rng.randrange(len(self._filler))
            ids = self._encoded.get(line)
            if ids is None:
                ids = self._encoded[line] = self._tokenizer.encode_text(self._filler[line])
            room -= len(ids)
            # Lines without tokens take no room and would go on forever.
            if room < 0 or not ids:
                return lines
            lines.append(line)

    def _assemble(
        self,
        lines: list[int],
        fact_texts: list[str],
        fact_ids: list[list[int]],
        places: list[int],
        order: list[int],
        tail: list[tuple[str, list[int], bool]],
        asked: int,
    ) -> RetrievalExample:
        texts: list[str] = []
        ids: list[int] = []
        needle = 0
        waiting = iter([*order, -1])
        fact = next(waiting)
        for place in range(len(lines) + 1):
            while fact >= 0 and places[fact] == place:
                if fact == asked:
                    needle = len(ids)
                texts.append(fact_texts[fact])
                ids += fact_ids[fact]
                fact = next(waiting)
            if place < len(lines):
                texts.append(self._filler[lines[place]])
                ids += self._encoded[lines[place]]
        body = len(ids)
        answers: list[tuple[int, int]] = []
        for text, encoded, is_answer in tail:
            if is_answer:
                answers.append((len(ids), len(ids) + len(encoded)))
            texts.append(text)
            ids += encoded
        return RetrievalExample(
            "".join(texts), np.asarray(ids, np.int32), tuple(answers), needle / max(1, body)
        )


def is_held_out_key(key: str) -> bool:
    """Whether `key` belongs to evaluation."""
    return hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % _HELD_OUT_SHARE == 0


def retrieval_example(
    seed: int,
    tokens_target: int,
    keys: int,
    tokenizer: TextEncoder,
    *,
    split: Literal["train", "held_out"] = "train",
    queries: int = 1,
    depth: float | None = None,
) -> RetrievalExample:
    """One document in the standard form. For many, `RetrievalWriter.example` is faster."""
    writer = RetrievalWriter(tokenizer)
    return writer.example(seed, tokens_target, keys, split=split, queries=queries, depth=depth)


@dataclass(frozen=True)
class RetrievalSpec:
    """A training source of retrieval documents; each draws its size from the ranges.

    Attributes:
        tokens: (least, most) tokens of a document.
        keys: (least, most) facts of a document.
        queries: questions of a document, fewer where it has fewer facts.
        answer_weight: loss weight of answer tokens.
        context_weight: loss weight of all other tokens.
        key_letters: letters of a key.
        value_digits: digits of a value.
    """

    tokens: tuple[int, int] = (256, 1024)
    keys: tuple[int, int] = (1, 8)
    queries: int = 1
    answer_weight: float = 1.0
    context_weight: float = 1.0
    key_letters: int = 3
    value_digits: int = 4

    def __post_init__(self) -> None:
        for name, (least, most) in (("tokens", self.tokens), ("keys", self.keys)):
            if not 1 <= least <= most:
                raise UserError(f"retrieval {name} = {[least, most]}: needs 1 <= least <= most")
        if min(self.answer_weight, self.context_weight) < 0:
            raise UserError("retrieval answer_weight and context_weight must not be negative")


def retrieval_examples(
    spec: RetrievalSpec,
    tokenizer: TextEncoder,
    count: int,
    seed: int,
    split: Literal["train", "held_out"] = "train",
) -> Iterator[RetrievalExample]:
    """`count` documents of `spec`; another seed gives other ones."""
    writer = RetrievalWriter(
        tokenizer, key_letters=spec.key_letters, value_digits=spec.value_digits
    )
    rng = random.Random(f"{seed}/{split}")
    for i in range(count):
        keys = rng.randint(*spec.keys)
        yield writer.example(
            seed * 1_000_003 + i,
            rng.randint(*spec.tokens),
            keys,
            split=split,
            queries=min(spec.queries, keys),
        )
