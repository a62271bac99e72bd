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
    fp32_matched  engine in float32 and deterministic, trainer with `batch_invariant`: the same sums
               in the same order
    bf16       weights, activations and cache in bfloat16
    int8       8-bit weights and products, the rest bfloat16
    int8_fp32  8-bit weights and products, the rest float32
    bf16_both  the tokens of bf16, and a trainer with bfloat16 products (autocast)
    vllm_bf16, vllm_fp32   vLLM instead of the engine, for the dense model, if `--vllm-python`
               names an environment that has it: same conversations, its tokens and logprobs

`nats_*` is the mean -logprob of the tokens that float32 sampled, `prefill_per_new_token` what the
engine computed of the prompts after the first turn over what was new in them, and
`update_ratio_fp32_matched` the processor time of the matched trainer for the loss and gradients of
a conversation over that of the plain one (median of interleaved rounds).
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from conversations import (
    LATER,
    TIMEOUT_S,
    Answer,
    Conversation,
    Embedded,
    Model,
    chat,
    reading,
    talk,
)
from headrace.data.corpora import open_corpus, sample_texts
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.gguf_import import SMOLLM2
from headrace.model.presets import preset
from headrace.tokens.renderer import create_renderer
from headrace.tokens.training import train_tokenizer
from headrace.training.batch import Sample, supervised_sample
from headrace.training.rl_record import RlRecord
from headrace.training.supervised import Budget
from headrace.training.trainer import OptimizerConfig, RlConfig, Trainer
from peer_process import Peer
from report import fill_sizes, new_parser, print_report
from smollm2 import SHAPE, checkpoint_of

FIRST = 160
"""New tokens of glm5-tiny's first prompts: more than its attention selects (128)."""
ROW = 256
"""Tokens of a row that glm5-tiny is trained on."""
SHARPER = 4.0
"""Factor on glm5-tiny's logits."""
START_S = 600.0


class Setting(NamedTuple):
    """How the engine computes; see `EngineConfig`."""

    dtype: str
    weights: str = "same"
    deterministic: bool = False


VLLM = {"vllm_bf16": "bfloat16", "vllm_fp32": "float32"}
"""Its rows, and what it computes in."""
SETTINGS = {
    "fp32": Setting("float32"),
    "fp32_matched": Setting("float32", deterministic=True),
    "bf16": Setting("bfloat16"),
    "int8": Setting("bfloat16", "int8"),
    "int8_fp32": Setting("float32", "int8"),
}


class Differences(RlRecord):
    """Keeps what an RL step finds out about each token."""

    def __init__(self) -> None:
        super().__init__(version=0)
        self._gaps: list[Tensor] = []

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """`gap` is the rollout's logprob minus the trainer's."""
        self._gaps.append(columns["gap"].double())

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


def update_ratio(trainer: Trainer, plain: Trainer, sample: Sample, rounds: int) -> float:
    """Processor time of `trainer` for the loss and gradients of a sample, over that of `plain`."""
    ratios = []
    for _ in range(rounds):
        seconds = []
        for side in (trainer, plain):
            began = time.process_time()
            side.loss_and_gradients([sample], rl=RlConfig(0.2, 0.28))
            seconds.append(time.process_time() - began)
            side.model.zero_grad(set_to_none=True)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


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
            deterministic=setting.deterministic,
            seed=0,
        )
        weights = load_checkpoint(model.path, dtype=getattr(torch, setting.dtype))
        engine = Embedded(EngineCore(weights, config), arguments.new, model.stop_ids)
        conversations, new = talk(engine, model, arguments)
        torch.set_num_threads(threads)
        if setting.deterministic:
            matched = Trainer(
                load_checkpoint(model.path),
                OptimizerConfig(1e-6, micro_tokens=4096, batch_invariant=True),
            )
            metrics |= compare(matched, conversations, name + suffix)
            metrics[f"update_ratio_{name}{suffix}"] = update_ratio(
                matched, exact, conversations[0].sample(), 1 if arguments.quick else 5
            )
            continue
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
            metrics[f"prefill_per_new_token{suffix}"] = engine.prefilled / new
    if arguments.vllm_python and not suffix:
        for name, dtype in VLLM.items():
            conversations = talk_to_vllm(model, arguments, dtype)
            metrics |= compare(exact, conversations, name)
    return metrics


def talk_to_vllm(model: Model, arguments: argparse.Namespace, dtype: str) -> list[Conversation]:
    """The same conversations, held by vLLM on one thread."""
    options = {
        "model": str(model.path),
        "dtype": dtype,
        "threads": 1,
        "cores": str(min(os.sched_getaffinity(0))),
        "max_context": model.context + 1,
        "max_running": arguments.conversations,
        # Compiling takes longer than all conversations.
        "eager": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        with Peer("vllm", arguments.vllm_python, "vllm_peer.py", options, log) as peer:
            peer.wait_ready(START_S)
            stop_ids = list(model.stop_ids)

            def generate(prompts: list[list[int]], seeds: list[int]) -> list[Answer]:
                found = peer.ask(
                    "generate",
                    TIMEOUT_S,
                    prompts=prompts,
                    seeds=seeds,
                    new=arguments.new,
                    stop_ids=stop_ids,
                )
                return [Answer(output["ids"], output["logprobs"]) for output in found["outputs"]]

            return talk(generate, model, arguments)[0]


def dense_model(arguments: argparse.Namespace, folder: Path) -> tuple[Model, str]:
    """The model that was asked for, and what to say about it."""
    path, note = checkpoint_of(arguments.model, folder)
    if note:
        ids = np.random.default_rng(0).integers(1, SHAPE.vocab_size, 100_000)
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
    parser = new_parser(__doc__)
    parser.add_argument(
        "--model", default=SMOLLM2, help="dense model: a name or a checkpoint directory"
    )
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("HEADRACE_VLLM_PYTHON"),
        help="Python of an environment with vLLM, to add its rows",
    )
    parser.add_argument("--conversations", type=int, help="held at once")
    parser.add_argument("--turns", type=int, help="of each")
    parser.add_argument("--new", type=int, help="most tokens sampled in a turn")
    parser.add_argument("--steps", type=int, help="that glm5-tiny is trained for")
    arguments = parser.parse_args(argv)
    fill_sizes(
        arguments,
        (("conversations", 4, 8), ("turns", 3, 20), ("new", 16, 32), ("steps", 20, 300)),
    )
    if arguments.turns < 2 or min(arguments.conversations, arguments.new, arguments.steps) < 1:
        parser.error("--turns must be at least 2, --conversations, --new and --steps at least 1")
    return arguments


def show(metrics: dict[str, float], suffix: str) -> None:
    """One row per setting."""
    print(f"{'setting':16s}{'tokens':>8s}{'mean':>10s}{'p99':>10s}{'max':>10s}{'outside':>10s}")
    for name in ("fp32", "fp32_matched", "bf16", "bf16_both", "int8", "int8_fp32", *VLLM):
        key = name + suffix
        if f"tokens_{key}" not in metrics:
            continue
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
                notes.append(note)
                print(note, flush=True)
                metrics |= measure(model, arguments, threads, suffix)
            except UserError as error:
                raise SystemExit(str(error)) from error
            show(metrics, suffix)
    metrics["wall_s"] = time.perf_counter() - started
    if not arguments.vllm_python:
        notes.append("vLLM left out: no --vllm-python")
    print_report(
        "logprob_mismatch",
        arguments,
        metrics,
        "; ".join(notes),
        engine_threads=1,
        trainer_threads=threads,
    )


if __name__ == "__main__":
    main()
