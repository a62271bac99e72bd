"""How far the logprobs that the engine reports are from the trainer's, for the same tokens (L11).

The engine holds conversations at temperature 1 with fixed seeds, several turns each: prompts are
computed in pieces, later turns over cached prefixes. The trainer then scores every sampled token in
whole packed conversations with the code of an RL step, backward pass left out, over fp32 weights.
Two models: SmolLM2-135M-Instruct asked the questions below (random weights of its shape and random
prompts if it is not installed), and glm5-tiny, trained for some steps and with a final norm scaled
up, so that its distributions are as peaked as those of models that learned for long, going on with
texts long enough for attention to select keys.

`mean_abs_*`, `p99_abs_*` and `max_abs_*` are of |engine - trainer| in nats, `outside_*` is the
share of tokens whose ratio trainer / engine leaves [1/2, 2], `tokens_*` how many were compared:

    fp32       engine in float32
    bf16       weights, activations and cache in bfloat16
    int8       8-bit weights and products, the rest bfloat16
    int8_fp32  8-bit weights and products, the rest float32
    bf16_both  the tokens of bf16, and a trainer with bfloat16 products (autocast)

`nats_*` is the mean -logprob of the tokens that float32 sampled, `prefill_per_new_token` what the
engine computed of the prompts after the first turn over what was new in them.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.data.corpora import open_corpus, sample_texts
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore, GenerationFailure
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.gguf_import import SMOLLM2, resolve_model
from headrace.model.presets import preset
from headrace.observe.machine import describe_machine
from headrace.rollout.types import Segment
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.training import train_tokenizer
from headrace.training.batch import Sample, rollout_sample, supervised_sample
from headrace.training.rl_record import RlRecord
from headrace.training.supervised import Budget
from headrace.training.trainer import OptimizerConfig, RlConfig, Trainer

SMOLLM2_SHAPE = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    rope_theta=100000.0,
    tie_embeddings=True,
)
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
FIRST, LATER = 160, 24
"""New tokens of glm5-tiny's prompts: the first is longer than what its attention selects (128)."""
ROW = 256
"""Tokens of a row that glm5-tiny is trained on."""
SHARPER = 4.0
"""Factor on glm5-tiny's logits."""
TIMEOUT_S = 3600.0

Speaker = Callable[[int, int, list[int], list[int]], list[int]]
"""(conversation, turn, ids before the last answer, last answer) -> ids to add before the next."""


class Setting(NamedTuple):
    """How the engine computes; see `EngineConfig`."""

    dtype: str
    weights: str = "same"


SETTINGS = {
    "fp32": Setting("float32"),
    "bf16": Setting("bfloat16"),
    "int8": Setting("bfloat16", "int8"),
    "int8_fp32": Setting("float32", "int8"),
}


class Model(NamedTuple):
    """A checkpoint and who talks to it.

    Attributes:
        context: most tokens of a conversation.
    """

    path: Path
    speak: Speaker
    stop_ids: tuple[int, ...]
    context: int


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

    def wrote(self, result: GenerationResult) -> None:
        """The answer to it."""
        for span in result.spans:
            self.answer += span.ids
            self.mask += [True] * len(span.ids)
            self.logprobs += span.logprobs

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


def talk(
    core: EngineCore, model: Model, arguments: argparse.Namespace
) -> tuple[list[Conversation], float]:
    """All conversations at once, turn by turn.

    Returns:
        The conversations, and prefilled / new prompt tokens of all turns but the first.
    """
    conversations = [Conversation() for _ in range(arguments.conversations)]
    new = prefilled = 0
    for turn in range(arguments.turns):
        if turn == 1:
            prefilled = core.stats().tokens_prefilled
        for number, conversation in enumerate(conversations):
            added = model.speak(number, turn, conversation.before, conversation.answer)
            new += len(added) if turn else 0
            conversation.read(added)
            sampling = SamplingParams(
                arguments.new, seed=1000 * number + turn, stop_ids=model.stop_ids
            )
            core.add(
                GenerationRequest(
                    str(number), tuple(conversation.before), sampling, TIMEOUT_S, str(number)
                )
            )
        while core.has_work:
            for result in core.step():
                if isinstance(result, GenerationFailure):
                    raise RuntimeError(result.message)
                conversations[int(result.id)].wrote(result)
    return conversations, (core.stats().tokens_prefilled - prefilled) / new


class Differences(RlRecord):
    """Keeps what an RL step finds out about each token."""

    def __init__(self) -> None:
        super().__init__(version=0)
        self._gaps: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Column 1 is the rollout's logprob minus the trainer's."""
        self._gaps.append(rows[:, 1])

    def metrics_of(self, name: str) -> dict[str, float]:
        """Flat numbers under names that end like `name`."""
        gaps = torch.cat(self._gaps).abs()
        return {
            f"mean_abs_{name}": float(gaps.mean()),
            f"p99_abs_{name}": float(gaps.quantile(0.99)),
            f"max_abs_{name}": float(gaps.max()),
            f"outside_{name}": float((gaps > math.log(2)).double().mean()),
            f"tokens_{name}": float(len(gaps)),
        }


@torch.no_grad()
def compare(trainer: Trainer, conversations: Sequence[Conversation], name: str) -> dict[str, float]:
    """Metrics of what was reported against what the trainer computes."""
    found = Differences()
    samples = [conversation.sample() for conversation in conversations]
    trainer.loss_and_gradients(samples, rl=RlConfig(0.2, 0.28), record=found)
    return found.metrics_of(name)


def measure(
    model: Model, arguments: argparse.Namespace, threads: int, suffix: str
) -> dict[str, float]:
    """Metrics of one model, named with `suffix` at the end."""
    metrics: dict[str, float] = {}
    exact, half = (
        Trainer(
            load_checkpoint(model.path),
            OptimizerConfig(1e-6, bfloat16=bfloat16, micro_tokens=4096),
        )
        for bfloat16 in (False, True)
    )
    for name, setting in SETTINGS.items():
        # As in a run on two cores: one thread for the engine, and with it the compiled step.
        torch.set_num_threads(1)
        config = EngineConfig(
            max_running=arguments.conversations,
            max_context=model.context,
            prefill_tokens=256,
            dtype=setting.dtype,
            weights=setting.weights,
            seed=0,
        )
        weights = load_checkpoint(model.path, dtype=getattr(torch, setting.dtype))
        conversations, ratio = talk(EngineCore(weights, config), model, arguments)
        torch.set_num_threads(threads)
        metrics |= compare(exact, conversations, name + suffix)
        if name == "bf16":
            metrics |= compare(half, conversations, f"bf16_both{suffix}")
        if name == "fp32":
            logprobs = [
                logprob
                for conversation in conversations
                for logprob, sampled in zip(conversation.logprobs, conversation.mask, strict=True)
                if sampled
            ]
            metrics[f"nats{suffix}"] = -sum(logprobs) / len(logprobs)
            metrics[f"prefill_per_new_token{suffix}"] = ratio
    return metrics


def dense_model(arguments: argparse.Namespace, folder: Path) -> tuple[Model, str]:
    """The model that was asked for, and what to say about it."""
    try:
        path = resolve_model(arguments.model)
    except UserError as error:
        if arguments.model != SMOLLM2:
            raise
        path, note = folder / "dense", f"random weights and prompts instead of SmolLM2: {error}"
        random = Decoder(SMOLLM2_SHAPE)
        random.init_weights(0)
        save_checkpoint(random, path)
        ids = np.random.default_rng(0).integers(1, SMOLLM2_SHAPE.vocab_size, 100_000)
        context = FIRST + arguments.turns * (LATER + arguments.new)
        return Model(path, reading(ids, arguments.turns, 2 * LATER), (), context), note
    renderer = create_renderer("auto", path)
    context = 128 + arguments.turns * (64 + arguments.new)
    positions = ModelConfig.from_file(path).max_positions
    if context > positions:
        raise UserError(
            f"--turns {arguments.turns} of --new {arguments.new} tokens may need {context} "
            f"positions, the model has {positions}; lower one of them"
        )
    return Model(path, chat(renderer), renderer.stop_ids, context), f"dense: {arguments.model}"


def glm5_model(arguments: argparse.Namespace, folder: Path) -> tuple[Model, str]:
    """glm5-tiny after some steps on a little text, which it then goes on with."""
    # So small a model gains nothing from a second thread, and waits for it on a busy machine.
    torch.set_num_threads(1)
    texts = sample_texts(open_corpus("builtin"), max_bytes=1 << 18)
    tokenizer = train_tokenizer(texts, 1024)
    ids = np.concatenate(tokenizer.encode_texts(texts))
    model = Decoder(preset("glm5-tiny", tokenizer.vocab_size))
    model.init_weights(0)
    # Not in bfloat16: every new count of tokens per expert has its product compiled anew there.
    trainer = Trainer(model, OptimizerConfig(6e-3, weight_decay=0.1, algorithm="muon_split"))
    budget = Budget(arguments.steps, None, 6e-3, arguments.steps // 20, 0.1)
    rng = np.random.default_rng(0)
    loss = 0.0
    for step in range(arguments.steps):
        begins = rng.integers(0, len(ids) - ROW, 8)
        rows = [supervised_sample(ids[b : b + ROW].tolist(), [1.0] * ROW) for b in begins]
        loss = trainer.supervised_step(rows, budget.rate(step, 0.0))["loss"]
    with torch.no_grad():
        model.norm.weight.mul_(SHARPER)
    save_checkpoint(model, folder / "glm5")
    context = FIRST + arguments.turns * (LATER + arguments.new)
    note = f"glm5-tiny after {arguments.steps} steps, loss {loss:.2f} nats"
    return Model(folder / "glm5", reading(ids, arguments.turns, FIRST), (), context), note


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="small enough for 50 s on two cores")
    parser.add_argument(
        "--model", default=SMOLLM2, help="dense model: a name or a checkpoint directory"
    )
    parser.add_argument("--conversations", type=int, help="held at once")
    parser.add_argument("--turns", type=int, help="of each")
    parser.add_argument("--new", type=int, help="most tokens sampled in a turn")
    parser.add_argument("--steps", type=int, help="that glm5-tiny is trained for")
    arguments = parser.parse_args(argv)
    for name, small, full in (
        ("conversations", 4, 8),
        ("turns", 3, 20),
        ("new", 16, 32),
        ("steps", 20, 300),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, small if arguments.quick else full)
    if arguments.turns < 2 or min(arguments.conversations, arguments.new, arguments.steps) < 1:
        parser.error("--turns must be at least 2, --conversations, --new and --steps at least 1")
    return arguments


def show(metrics: dict[str, float], suffix: str) -> None:
    """One row per setting."""
    print(f"{'setting':16s}{'tokens':>8s}{'mean':>10s}{'p99':>10s}{'max':>10s}{'outside':>10s}")
    for name in ("fp32", "bf16", "bf16_both", "int8", "int8_fp32"):
        key = name + suffix
        print(
            f"{key:16s}{metrics[f'tokens_{key}']:8.0f}"
            + "".join(f"{metrics[f'{kind}_abs_{key}']:10.2g}" for kind in ("mean", "p99", "max"))
            + f"{metrics[f'outside_{key}']:10.2%}",
            flush=True,
        )


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    threads = torch.get_num_threads()
    metrics: dict[str, float] = {}
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix, prepare in (("", dense_model), ("_glm5", glm5_model)):
            torch.set_num_threads(threads)
            try:
                model, note = prepare(arguments, Path(folder))
            except UserError as error:
                raise SystemExit(str(error)) from error
            notes.append(note)
            print(note, flush=True)
            metrics |= measure(model, arguments, threads, suffix)
            show(metrics, suffix)
    metrics["wall_s"] = time.perf_counter() - started
    report = {
        "name": "logprob_mismatch",
        "machine": describe_machine(),
        "config": {
            **{key: value for key, value in vars(arguments).items() if key != "json"},
            "engine_threads": 1,
            "trainer_threads": threads,
        },
        "metrics": {key: float(f"{value:.4g}") for key, value in metrics.items()},
        "notes": "; ".join(notes),
    }
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
