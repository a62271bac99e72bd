"""A small RL problem whose answers have many spellings in tokens, trained from tokens or from text.

A two-layer transformer from random weights learns to write its prompt backwards in small letters.
Its vocabulary is a real BPE: letters and merges of them, so that "ab" is one token or two. The
reward is the share of letters that are right, read from the text: no spelling is better than
another. Nothing but what the trainer is given differs between the variants.
"""

import statistics
from collections import deque
from functools import cache
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, trainers
from torch import Tensor

from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.types import Outcome, Segment
from headrace.training.batch import Sample, rollout_sample
from headrace.training.reinforced import RlConfig
from headrace.training.trainer import OptimizerConfig, Trainer

VARIANTS = ("tokens", "text", "text_by_position")
LAGS = (0, 8)
"""Updates that the weights a rollout is sampled with are behind the trainer's."""
LETTERS = "abcd"
MERGES = 12
LENGTH = 4
"""Letters of a prompt and of its answer."""
STEPS = LENGTH + 1
"""Tokens of the longest answer: one a letter, and the stop token."""
ASK = "?"
EVERY = 10
"""Updates between measurements."""


class Job(NamedTuple):
    """One run."""

    variant: str
    lag: int
    seed: int
    updates: int
    groups: int
    group_size: int
    learning_rate: float


class Outcomes(NamedTuple):
    """What one run came to.

    Attributes:
        final: reward of the final policy on fresh prompts.
        progress: mean of all measurements but the first, which is the same in all variants.
        respelt: share of sampled answers that were not spelt as their text is encoded.
        masked: mean share of trained tokens without a gradient.
    """

    final: float
    progress: float
    respelt: float
    masked: float


class Answer(NamedTuple):
    """A sampled answer, its stop token included if it was sampled.

    Attributes:
        ids, logprobs: one of each per token.
        text: without the stop token.
    """

    ids: list[int]
    logprobs: list[float]
    text: str


class Spelling:
    """The BPE. Capital letters and the request are never merged."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(LETTERS), (2000, 8), generator=generator).tolist()
        alphabet = [*LETTERS, *LETTERS.upper(), ASK]
        self._bpe = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False
        )
        self._bpe.train_from_iterator(["".join(LETTERS[i] for i in row) for row in drawn], trainer)
        self.stop = self._bpe.get_vocab_size()
        self.size = self.stop + 1

    def encode(self, text: str) -> list[int]:
        """The one spelling that text has."""
        return self._bpe.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """The text of any spelling."""
        return "".join(self._bpe.id_to_token(i) or "" for i in ids)


@cache
def spelling() -> Spelling:
    """The same in every run."""
    return Spelling()


def new_policy(seed: int) -> Decoder:
    """Random weights."""
    model = Decoder(
        ModelConfig(
            vocab_size=spelling().size,
            hidden_size=48,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            head_dim=12,
            max_positions=16,
        )
    )
    model.init_weights(seed)
    return model


def new_prompts(count: int, generator: torch.Generator) -> list[str]:
    """Random capital letters."""
    drawn = torch.randint(len(LETTERS), (count, LENGTH), generator=generator).tolist()
    return ["".join(LETTERS[i] for i in row).upper() for row in drawn]


def reward_of(prompt: str, text: str) -> float:
    """Share of letters that are right; letters too many count as wrong ones."""
    wanted = prompt[::-1].lower()
    right = sum(a == b for a, b in zip(wanted, text, strict=False))
    return right / max(len(wanted), len(text))


@torch.no_grad()
def roll_out(policy: Decoder, prompts: list[str], generator: torch.Generator) -> list[Answer]:
    """An answer to each prompt at temperature 1."""
    ids = torch.tensor([spelling().encode(prompt + ASK) for prompt in prompts])
    given = ids.shape[1]
    logprobs: list[Tensor] = []
    for _ in range(STEPS):
        scores = policy.logits(policy(ids))[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs.append(scores.gather(1, drawn))
        ids = torch.cat((ids, drawn), 1)
    answers = []
    rows = zip(ids[:, given:].tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
    for tokens, recorded in rows:
        ended = spelling().stop in tokens
        length = tokens.index(spelling().stop) if ended else STEPS
        text = spelling().decode(tokens[:length])
        answers.append(Answer(tokens[: length + ended], recorded[: length + ended], text))
    return answers


def spelt_as_text(answer: Answer) -> list[int]:
    """Its tokens after a detour through text; a stop token only where one was sampled."""
    ended = answer.ids[-1:] == [spelling().stop]
    return [*spelling().encode(answer.text), *([spelling().stop] if ended else [])]


@torch.no_grad()
def score(policy: Decoder, prompts: list[str], answers: list[list[int]]) -> list[list[float]]:
    """The policy's logprobs of given answers."""
    given = LENGTH + len(ASK)
    longest = max(map(len, answers))
    rows = [
        [*spelling().encode(prompt + ASK), *answer, *[0] * (longest - len(answer))]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    ids = torch.tensor(rows)
    scores = policy.logits(policy(ids))[:, given - 1 : -1].float().log_softmax(-1)
    found = scores.gather(2, ids[:, given:, None])[..., 0].tolist()
    return [row[: len(answer)] for row, answer in zip(found, answers, strict=True)]


def trained_as(
    variant: str, policy: Decoder, prompts: list[str], answers: list[Answer]
) -> list[tuple[list[int], list[float]]]:
    """Ids and logprobs that the trainer is given for each answer; `policy` is its own."""
    if variant == "tokens":
        return [(answer.ids, answer.logprobs) for answer in answers]
    spelt = [spelt_as_text(answer) for answer in answers]
    if variant == "text":
        return list(zip(spelt, score(policy, prompts, spelt), strict=True))
    return [
        (ids, lay(answer.logprobs, len(ids))) for ids, answer in zip(spelt, answers, strict=True)
    ]


def lay(logprobs: list[float], count: int) -> list[float]:
    """The first `count` of them; the last one again where there are too few."""
    return [*logprobs, *logprobs[-1:] * count][:count]


def training_samples(
    prompts: list[str],
    given: list[tuple[list[int], list[float]]],
    rewards: list[float],
    group_size: int,
    version: int,
) -> list[Sample]:
    """Rollouts with the advantages of their groups; groups without signal are left out."""
    samples: list[Sample] = []
    for first in range(0, len(prompts), group_size):
        scored = [
            ScoredRollout(str(first + i), Outcome.OK, reward)
            for i, reward in enumerate(rewards[first : first + group_size])
        ]
        for member in advantages(scored).members:
            row = int(member.session_id)
            ids, logprobs = given[row]
            before = spelling().encode(prompts[row] + ASK)
            segment = Segment(
                member.session_id,
                (*before, *ids),
                (False,) * len(before) + (True,) * len(ids),
                (0.0,) * len(before) + tuple(logprobs),
                (-1,) * len(before) + (version,) * len(ids),
            )
            if ids:
                samples.append(
                    rollout_sample(segment, member.advantage, trajectory=row, group=first)
                )
    return samples


def measure(policy: Decoder, seed: int, update: int) -> float:
    """Mean reward on prompts that are the same for all variants."""
    prompts = new_prompts(256, torch.Generator().manual_seed(10_000 + seed))
    answers = roll_out(policy, prompts, torch.Generator().manual_seed(update))
    return statistics.fmean(map(reward_of, prompts, [answer.text for answer in answers]))


def run(job: Job) -> Outcomes:
    """Train once."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(job.seed)
    trainer = Trainer(new_policy(job.seed), OptimizerConfig(job.learning_rate))
    behaviour = new_policy(job.seed)
    # Its first entry is the weights of `lag` updates ago, or the first ones there were.
    past: deque[dict[str, Tensor]] = deque(maxlen=job.lag + 1)
    measured, respelt, masked = [], [], []
    for update in range(job.updates):
        past.append({name: t.clone() for name, t in trainer.model.state_dict().items()})
        behaviour.load_state_dict(past[0])
        prompts = [
            prompt for prompt in new_prompts(job.groups, generator) for _ in range(job.group_size)
        ]
        answers = roll_out(behaviour, prompts, generator)
        respelt += [spelt_as_text(answer) != answer.ids for answer in answers]
        rewards = [reward_of(p, answer.text) for p, answer in zip(prompts, answers, strict=True)]
        given = trained_as(job.variant, trainer.model, prompts, answers)
        version = update - (len(past) - 1)
        samples = training_samples(prompts, given, rewards, job.group_size, version)
        if samples:
            metrics = trainer.rl_step(samples, RlConfig(), version=update, fresh=True)
            masked.append(metrics["masked_low"] + metrics["masked_high"])
        if (update + 1) % EVERY == 0 or update + 1 == job.updates:
            measured.append(measure(trainer.model, job.seed, update))
    return Outcomes(
        measured[-1],
        statistics.fmean(measured),
        statistics.fmean(respelt),
        statistics.fmean(masked or [0.0]),
    )
