"""AdamW, Muon and Muon Split on one small latent-attention model: held-out loss, attention logits.

The three differ in how matrices are updated and in nothing else: same model, same initial weights
per seed, same batches in the same order, same schedule, AdamW for embeddings and norms. Muon
orthogonalises each up-projection of latent attention as one matrix, Muon Split one matrix per head.
The text is the standard library of the running interpreter, read as bytes; the held-out documents
are never trained on. Every run has one thread, so results do not depend on the number of cores.

Learning rates are the best of `--sweep --steps 60 --rows 4` (one seed; the best is inside the grid
for each), so no algorithm is judged at another's rate.
`max_logit_*` is the largest scaled attention score over layers, heads and visible keys of a fixed
held-out batch, measured every few steps: largest over training, mean over seeds.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.data.corpora import open_corpus
from headrace.data.documents import Split
from headrace.model.attention import LatentQuery
from headrace.model.causal import CausalAttend
from headrace.model.config import LatentConfig, ModelConfig
from headrace.model.decoder import Decoder
from headrace.optim.groups import Algorithm, OptimizerGroups, build_optimizers
from report import fill_sizes, new_parser, print_report
from worker_pool import worker_pool

ALGORITHMS: tuple[Algorithm, ...] = ("adamw", "muon", "muon_split")
LEARNING_RATES: dict[Algorithm, float] = {"adamw": 4e-3, "muon": 16e-3, "muon_split": 16e-3}
SWEEP = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
VOCABULARY = 256
WARM_UP = 0.1
FINAL_RATE = 0.1
"""Share of the peak learning rate at the end of the cosine."""


class Result(NamedTuple):
    """One training run."""

    loss: float
    max_logit: float
    seconds: float


class LogitProbe(CausalAttend):
    """Causal attention that remembers the largest scaled score of any visible key."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = -math.inf

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        k_nope = torch.einsum("btr,hnr->bthn", query.latent, query.w_uk)
        scores = torch.einsum("bthn,bshn->bhts", query.q_nope, k_nope)
        scores += torch.einsum("bthr,bsr->bhts", query.q_rope, query.k_rope)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        self.largest = max(
            self.largest, float((scores * query.scale).masked_fill(hidden, -math.inf).max())
        )
        return super().attend_latent(layer, query)


def new_model(arguments: argparse.Namespace, seed: int) -> Decoder:
    """Latent attention with many small heads, as in the shape the split was made for."""
    size, heads = arguments.hidden, arguments.heads
    nope, rope = 3 * size // (2 * heads), size // (2 * heads)
    model = Decoder(
        ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=size,
            intermediate_size=3 * size,
            num_layers=arguments.layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=nope + rope,
            max_positions=arguments.tokens,
            rope_interleaved=True,
            family="deepseek_v3",
            latent=LatentConfig(
                q_rank=size // 2,
                kv_rank=size // 4,
                nope_dim=nope,
                rope_dim=rope,
                value_dim=nope + rope,
            ),
        )
    )
    model.init_weights(seed)
    return model


def corpus_bytes(split: Split, limit: int) -> bytes:
    """The documents of one split one after another, at most `limit` bytes."""
    data = bytearray()
    for document in open_corpus("builtin").documents(split):
        data += document.text.encode() + b"\0"
        if len(data) >= limit:
            break
    return bytes(data[:limit])


def windows(data: Tensor, rows: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Random windows [rows, tokens + 1] of a corpus, int64."""
    starts = torch.randint(len(data) - tokens, (rows, 1), generator=generator)
    return data[starts + torch.arange(tokens + 1)].long()


def loss_of(model: Decoder, batch: Tensor) -> Tensor:
    """Mean next-byte loss of windows [B, T + 1], nats."""
    logits = model.logits(model(batch[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2)


def train(arguments: argparse.Namespace, algorithm: Algorithm, seed: int, rate: float) -> Result:
    """One run from initial weights to held-out loss, in a worker that has the corpus."""
    started = time.perf_counter()
    train_data, held_out = _corpus
    model = new_model(arguments, seed)
    optimizers = build_optimizers(
        model, OptimizerGroups(rate, algorithm, weight_decay=0.1, precision="float32")
    )
    batches = torch.Generator().manual_seed(1000 + seed)
    fixed = torch.Generator().manual_seed(1)
    probe_batch = windows(held_out, 2, arguments.tokens, fixed)
    probe = LogitProbe()
    for step in range(arguments.steps):
        loss_of(model, windows(train_data, arguments.rows, arguments.tokens, batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(rate_at(step, arguments.steps, rate))
        model.zero_grad(set_to_none=True)
        if (step + 1) % arguments.probe_every == 0 or step + 1 == arguments.steps:
            with torch.no_grad():
                model(probe_batch[:, :-1], attend=probe)
    with torch.no_grad():
        loss = statistics.fmean(
            loss_of(model, windows(held_out, 8, arguments.tokens, fixed)).item()
            for _ in range(arguments.held_out_batches)
        )
    return Result(loss, probe.largest, time.perf_counter() - started)


_corpus: tuple[Tensor, Tensor]
"""Training and held-out bytes of this worker process."""


def start_worker(train_data: bytes, held_out: bytes) -> None:
    global _corpus
    torch.set_num_threads(1)
    _corpus = (_tensor(train_data), _tensor(held_out))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def runs(arguments: argparse.Namespace) -> Iterator[tuple[Algorithm, int, float, Result]]:
    """Every run of the benchmark or of the sweep, algorithms in turns, one per core at a time."""
    rates: list[dict[Algorithm, float]]
    rates = [dict.fromkeys(ALGORITHMS, rate) for rate in SWEEP]
    plan: list[tuple[Algorithm, int, float]] = [
        (algorithm, seed, rate[algorithm])
        for seed in range(1 if arguments.sweep else arguments.seeds)
        for rate in (rates if arguments.sweep else [LEARNING_RATES])
        for algorithm in ALGORITHMS
    ]
    corpus = (corpus_bytes("train", 8_000_000), corpus_bytes("held_out", 200_000))
    with worker_pool(arguments.workers, start_worker, corpus) as pool:
        futures = [pool.submit(train, arguments, *run) for run in plan]
        for (algorithm, seed, rate), future in zip(plan, futures, strict=True):
            yield algorithm, seed, rate, future.result(timeout=600)


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="one seed at several learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--probe-every", type=int, default=5)
    parser.add_argument("--held-out-batches", type=int)
    return fill_sizes(
        parser.parse_args(),
        (("steps", 50, 400), ("rows", 4, 8), ("held_out_batches", 4, 32)),
    )


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    results: dict[Algorithm, list[Result]] = {algorithm: [] for algorithm in ALGORITHMS}
    for algorithm, seed, rate, result in runs(arguments):
        if arguments.sweep or not arguments.json:
            print(
                f"{algorithm:11s} seed {seed} rate {rate:.1e}: loss {result.loss:.4f}, "
                f"largest logit {result.max_logit:.1f}, {result.seconds:.0f} s",
                flush=True,
            )
        results[algorithm].append(result)
    if arguments.sweep:
        return
    metrics: dict[str, float] = {}
    for algorithm, done in results.items():
        losses = [result.loss for result in done]
        metrics[f"loss_{algorithm}"] = statistics.fmean(losses)
        metrics[f"spread_{algorithm}"] = max(losses) - min(losses)
        metrics[f"max_logit_{algorithm}"] = statistics.fmean(r.max_logit for r in done)
        metrics[f"spread_max_logit_{algorithm}"] = max(r.max_logit for r in done) - min(
            r.max_logit for r in done
        )
        metrics[f"seconds_{algorithm}"] = statistics.fmean(r.seconds for r in done)
    # Seeds share initial weights and batches across algorithms, so differences are paired.
    for base in ("adamw", "muon"):
        metrics[f"gain_over_{base}"] = statistics.fmean(
            other.loss - split.loss
            for other, split in zip(results[base], results["muon_split"], strict=True)
        )
    metrics["wall_s"] = time.perf_counter() - started
    notes = (
        "Losses in nats per byte on held-out documents; spread is largest minus smallest "
        "over seeds. Scaled down from the paper: model size, tokens, head count."
    )
    print_report("muon_split", arguments, metrics, notes, learning_rates=LEARNING_RATES)


if __name__ == "__main__":
    main()
