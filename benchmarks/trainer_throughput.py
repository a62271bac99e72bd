"""Training tokens per second: headrace's step against transformers with torch's AdamW.

Both do the same step on the same weights and batches of supervised documents of many lengths, with
a loss on their second halves: forward, backward with gradient accumulation, gradient clipping,
AdamW. The other side sorts documents by length and pads them, without an attention mask (right
padding needs none), which is its fastest way; ours packs. Rounds alternate, so that load from
elsewhere hits both alike; a ratio is the median over rounds of that round's times, tokens are those
of the documents. Losses of every round must agree. Unless SmolLM2-135M-Instruct is installed,
random weights of its shape stand in.

"glm5_tiny_full" is the step that pre-training does (multi-token prediction, expert balance), which
transformers cannot do; it has no ratio.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.decoder import Decoder
from headrace.model.gguf_import import SMOLLM2, resolve_model
from headrace.model.presets import preset
from headrace.observe.machine import describe_machine
from headrace.training.batch import Sample, supervised_sample
from headrace.training.forward import LossConfig
from headrace.training.meters import StepMeter, matmul_rate
from headrace.training.trainer import OptimizerConfig, Trainer
from smollm2 import random_smollm2

LEARNING_RATE = 1e-5


class Setting(NamedTuple):
    """One model and its batches.

    Attributes:
        shortest, longest: document lengths, drawn log-uniformly.
        batch_tokens: documents are drawn until a batch has these; micro_tokens: of a forward pass.
    """

    model: Callable[[], Decoder]
    bfloat16: bool
    shortest: int
    longest: int
    batch_tokens: int
    micro_tokens: int
    losses: LossConfig = LossConfig()
    compared: bool = True


def load_smollm2() -> Decoder:
    """The released weights, or random ones of the same shape."""
    try:
        return load_checkpoint(resolve_model(SMOLLM2))
    except UserError as error:
        print(f"random weights instead of SmolLM2: {error}", flush=True)
        return random_smollm2()


def _tiny() -> Decoder:
    model = Decoder(preset("glm5-tiny"))
    model.init_weights(0)
    return model


# Documents no longer than glm5-tiny's top-k: transformers' choice among equal index scores differs.
SETTINGS = {
    "smollm2": Setting(load_smollm2, True, 64, 768, 4096, 4096),
    "glm5_tiny": Setting(_tiny, False, 32, 128, 8192, 4096),
    "glm5_tiny_full": Setting(
        _tiny,
        False,
        32,
        128,
        8192,
        4096,
        LossConfig(mtp_weight=0.3, balance_weight=1e-4),
        compared=False,
    ),
}


def new_batch(setting: Setting, vocab: int, seed: int, tokens: int) -> list[Sample]:
    """Random documents, `tokens` in all, with loss on the second half of each."""
    rng = np.random.default_rng(seed)
    batch: list[Sample] = []
    left = tokens
    while left > 1:
        span = np.log([setting.shortest, setting.longest])
        n = max(2, min(left, int(np.exp(rng.uniform(*span)))))
        weights = [0.0] * (n // 2) + [1.0] * (n - n // 2)
        batch.append(supervised_sample(rng.integers(1, vocab, n).tolist(), weights))
        left -= n
    return batch


def run_headrace(trainer: Trainer, batch: Sequence[Sample]) -> tuple[float, float]:
    """(seconds, loss) of one step."""
    began = time.perf_counter()
    loss = trainer.supervised_step(batch, LEARNING_RATE)["loss"]
    return time.perf_counter() - began, loss


def run_transformers(
    model: Any, optimizer: torch.optim.Optimizer, setting: Setting, batch: Sequence[Sample]
) -> tuple[float, float]:
    """(seconds, loss) of one step: padded micro-batches, accumulated gradients."""
    began = time.perf_counter()
    documents = sorted(
        ((np.frombuffer(s.ids, "<i4"), np.frombuffer(s.weights, "<f4")) for s in batch),
        key=lambda pair: len(pair[0]),
    )
    total = float(sum(weights[1:].sum() for _, weights in documents))
    groups: list[list[Any]] = []
    for document in documents:
        if groups and (len(groups[-1]) + 1) * len(document[0]) <= setting.micro_tokens:
            groups[-1].append(document)
        else:
            groups.append([document])
    loss_sum = 0.0
    for group in groups:
        longest = len(group[-1][0])
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        labels = torch.full((len(group), longest), -100)
        for row, (tokens, weights) in enumerate(group):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            trained = torch.from_numpy(weights > 0)
            labels[row, : len(tokens)][trained] = ids[row, : len(tokens)][trained]
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        loss = loss / total
        loss.backward()
        loss_sum += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began, loss_sum


def measure(name: str, setting: Setting, rounds: int, tokens: int) -> dict[str, float]:
    """Metrics of one setting."""
    model = setting.model()
    sides: dict[str, Callable[[Sequence[Sample]], tuple[float, float]]] = {}
    if setting.compared:
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(model, f"{folder}/model")
            theirs = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
        theirs.train()
        optimizer = torch.optim.AdamW(
            theirs.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        sides["transformers"] = functools.partial(run_transformers, theirs, optimizer, setting)
    config = OptimizerConfig(
        LEARNING_RATE, bfloat16=setting.bfloat16, micro_tokens=setting.micro_tokens
    )
    trainer = Trainer(model, config, losses=setting.losses)
    sides["headrace"] = functools.partial(run_headrace, trainer)
    vocab = model.config.vocab_size
    depth = model.config.mtp.depth if model.config.mtp and setting.losses.mtp_weight else 0
    meter = StepMeter(model.config, mtp_steps=depth, bfloat16=setting.bfloat16)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    worst = 0.0
    # The first round warms up: allocations, compiled ops, optimizer state.
    for index in range(rounds + 1):
        batch = new_batch(setting, vocab, index, tokens)
        losses = []
        for side, run in sides.items():
            took, loss = run(batch)
            losses.append(loss)
            if index:
                seconds[side].append(took)
        if index:
            meter.add(len(s) for s in batch)
        worst = max(worst, max(losses) / min(losses) - 1)
    allowed = 5e-3 if setting.bfloat16 else 1e-4
    if worst > allowed:
        raise RuntimeError(f"{name}: losses differ by {worst:.2%}, more than {allowed:.2%}")
    ours = sum(seconds["headrace"])
    metrics = {
        f"tokens_per_s_{name}": tokens / statistics.median(seconds["headrace"]),
        f"mfu_{name}": meter.read(ours)["mfu"],
    }
    if setting.compared:
        pairs = zip(seconds["transformers"], seconds["headrace"], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        metrics |= {
            f"tokens_per_s_{name}_transformers": tokens
            / statistics.median(seconds["transformers"]),
            f"mfu_{name}_transformers": metrics[f"mfu_{name}"]
            * ours
            / sum(seconds["transformers"]),
            f"ratio_{name}": statistics.median(ratios),
            f"ratio_{name}_lowest_round": min(ratios),
            f"loss_difference_{name}": worst,
        }
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller batches")
    parser.add_argument("--threads", type=int, help="compute threads; by default all cores")
    parser.add_argument("--only", choices=SETTINGS, help="one setting instead of all")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    # It reports the prediction layers, which it does not have.
    logging.set_verbosity_error()
    metrics: dict[str, float] = {}
    for name, setting in SETTINGS.items():
        if options.only not in (None, name):
            continue
        rounds, tokens = (
            (1, setting.batch_tokens // 4)
            if options.quick
            else (
                3,
                setting.batch_tokens,
            )
        )
        found = measure(name, setting, rounds, tokens)
        metrics |= {key: float(f"{value:.4g}") for key, value in found.items()}
        print(name, {key: float(f"{value:.3g}") for key, value in found.items()}, flush=True)
    threads = torch.get_num_threads()
    report = {
        "name": "trainer_throughput",
        "machine": describe_machine(),
        "config": {
            "threads": threads,
            "quick": options.quick,
            "gflops_float32": round(matmul_rate(torch.float32, "cpu", threads) / 1e9),
            "gflops_bfloat16": round(matmul_rate(torch.bfloat16, "cpu", threads) / 1e9),
        },
        "metrics": metrics,
        "notes": "smollm2 in bfloat16 (autocast on both sides), glm5_tiny in float32",
    }
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
