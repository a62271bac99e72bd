"""What sparse attention costs in quality: a dense base, its indexer warmed up, then adapted.

A small latent-attention model learns text and synthetic retrieval with dense attention ("dense").
It gets an indexer that keeps `--topk` keys of every context, trained alone against the frozen
model's attention ("warmup"), and at last everything trains under sparse attention ("adapted").
"untrained" is the base with a fresh indexer: what any selection at all would give. "continued" is
the dense base trained further on what adaptation read, for as many steps: what adaptation would
give if sparsity cost nothing.

`acc_*` are shares of right answers about facts whose keys were never seen in training, mean over
lengths and over one fact or several in the context; `acc_*_L` and `acc_*_single`, `_multi` are its
parts. `loss_*` are bits per byte of held-out text, `kl_*` the indexer's held-out loss in nats per
token (warm-up: over all keys; adaptation: over the selected ones). `chance_multi` is the share that
naming any fact's value would give; without looking anything up it is 10 ** -digits.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.data.corpora import open_corpus, sample_texts
from headrace.data.retrieval import FILLER, RetrievalSpec, RetrievalWriter
from headrace.data.sources import Framing, SourceSpec, open_source
from headrace.data.stream import StreamSpec, TokenStream
from headrace.measure.retrieval import retrieval_accuracy
from headrace.measure.text import bits_per_byte
from headrace.model.adapt import extend_with_indexer
from headrace.model.config import IndexerConfig
from headrace.model.decoder import Decoder
from headrace.model.presets import preset
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import train_tokenizer
from headrace.training.forward import LossConfig
from headrace.training.streams import TextStream
from headrace.training.supervised import Budget
from headrace.training.trainer import OptimizerConfig, Trainer
from report import fill_sizes, new_parser, print_report
from worker_pool import worker_pool

VARIANTS = ("dense", "untrained", "warmup", "adapted", "continued")
ANSWER_WEIGHT, CONTEXT_WEIGHT = 10.0, 0.02
"""Of retrieval documents: almost only their answers can be learned from."""
FACT_TOKENS = 18
"""At least a fact's or a question's tokens, with a tokenizer that knows their words."""
PHASES = ((0.12, 16), (0.45, 8), (0.7, 3), (1.0, 1))
"""Of the base: (share of the steps at which it ends, divisor of the longest row)."""
SHORTEST_ROW = 48
"""Tokens that hold one fact and its question: copying is learned first, telling facts apart next.
"""


class Score(NamedTuple):
    """One model: right answers by (length, keys), and bits per byte."""

    accuracy: dict[tuple[int, int], float]
    bits_per_byte: float

    def mean(self, length: int | None = None, keys: int | None = None) -> float:
        """Mean accuracy over what fits."""
        return statistics.fmean(
            value
            for (tokens, facts), value in self.accuracy.items()
            if length in (None, tokens) and keys in (None, facts)
        )


class Result(NamedTuple):
    """One seed: scores by variant; indexer losses and seconds by name."""

    scores: dict[str, Score]
    divergences: dict[str, float]
    seconds: dict[str, float]


class Experiment:
    """One seed's models and data, in a process of one thread."""

    def __init__(
        self, arguments: argparse.Namespace, tokenizer: TextTokenizer, cache: Path, seed: int
    ) -> None:
        self._arguments = arguments
        self._tokenizer = tokenizer
        self._cache = cache
        self._seed = seed
        self._seconds: dict[str, float] = {}
        self._divergences: dict[str, float] = {}

    def run(self) -> Result:
        """Train and score all variants."""
        arguments = self._arguments
        base = self._base()
        scores = {"dense": self._score(base)}
        indexer = IndexerConfig(arguments.index_heads, arguments.index_dim, arguments.topk)
        sparse = extend_with_indexer(base, indexer, self._seed)
        scores["untrained"] = self._score(sparse)
        trainer = self._trainer(
            sparse,
            arguments.warmup_rate,
            LossConfig(language=False, index="dense"),
            trainable="indexer",
        )
        self._teach(trainer, "warmup", arguments.warmup_steps, arguments.warmup_rate)
        scores["warmup"] = self._score(sparse)
        trainer = self._trainer(sparse, arguments.adapt_rate, LossConfig(index="sparse"))
        self._teach(trainer, "adapt", arguments.adapt_steps, arguments.adapt_rate)
        scores["adapted"] = self._score(sparse)
        further = self._trainer(base, arguments.adapt_rate, LossConfig())
        self._train(further, "continued", arguments.adapt_steps, arguments.adapt_rate)
        scores["continued"] = self._score(base)
        return Result(scores, self._divergences, self._seconds)

    def _base(self) -> Decoder:
        """The dense model: short documents first, where looking back is learned soonest."""
        arguments = self._arguments
        model = Decoder(model_config(arguments, self._tokenizer.vocab_size))
        model.init_weights(self._seed)
        trainer = self._trainer(model, arguments.learning_rate, LossConfig())
        done = 0
        for share, divisor in PHASES:
            until = round(share * arguments.steps)
            self._train(
                trainer,
                "base",
                until - done,
                arguments.learning_rate,
                length=row_length(arguments, divisor),
                first=done,
                total=arguments.steps,
            )
            done = until
        return model

    def _trainer(
        self, model: Decoder, rate: float, losses: LossConfig, trainable: Any = "all"
    ) -> Trainer:
        config = OptimizerConfig(rate, algorithm="muon_split", bfloat16=True)
        return Trainer(model, config, losses=losses, trainable=trainable)

    def _teach(self, trainer: Trainer, name: str, steps: int, rate: float) -> None:
        """Train, with the indexer's held-out loss before and after."""
        self._divergences[f"{name}_before"] = self._divergence(trainer)
        self._train(trainer, name, steps, rate)
        self._divergences[f"{name}_after"] = self._divergence(trainer)

    def _train(
        self,
        trainer: Trainer,
        name: str,
        steps: int,
        rate: float,
        *,
        length: int | None = None,
        first: int = 0,
        total: int | None = None,
    ) -> None:
        """Steps `first` to `first + steps` of `total` on rows of `length` tokens."""
        stream = self._stream(length or self._arguments.length, "train")
        budget = Budget(total or steps, None, rate, (total or steps) // 20, 0.1)
        started = time.perf_counter()
        trainer.model.train()
        for step in range(first, first + steps):
            trainer.supervised_step(stream.next_batch(), budget.rate(step, 0.0))
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _divergence(self, trainer: Trainer) -> float:
        """The indexer's loss on a fixed held-out batch."""
        batch = self._stream(self._arguments.length, "held_out").next_batch()
        found = trainer.loss_and_gradients(batch).index
        trainer.model.zero_grad(set_to_none=True)
        return found

    def _stream(self, length: int, split: Any) -> TextStream:
        arguments = self._arguments
        spec = StreamSpec(sources(arguments, length, split))
        rows = max(1, arguments.batch_tokens // length)
        stream = TokenStream(
            spec, self._tokenizer, length, rows, self._seed + 1, cache_dir=self._cache
        )
        return TextStream(stream)

    def _score(self, model: Decoder) -> Score:
        arguments = self._arguments
        started = time.perf_counter()
        model.eval()
        writer = RetrievalWriter(
            self._tokenizer, key_letters=arguments.letters, value_digits=arguments.digits
        )
        begin = [self._tokenizer.token_id(token) for token in Framing().begin]
        prefix = [i for i in begin if i is not None]
        accuracy = {}
        for length in lengths(arguments):
            for keys in (1, arguments.keys):
                score = retrieval_accuracy(
                    model,
                    writer,
                    length=length,
                    keys=keys,
                    examples=arguments.examples,
                    seed=self._seed * 100_000,
                    prefix=prefix,
                )
                accuracy[length, keys] = score.right / score.examples
        text = bits_per_byte(
            model,
            self._tokenizer,
            open_corpus("builtin").documents("held_out"),
            context=arguments.length,
            max_bytes=arguments.held_out_bytes,
            prefix=prefix,
        )
        self._seconds["scoring"] = self._seconds.get("scoring", 0.0) + time.perf_counter() - started
        return Score(accuracy, text.bits_per_byte)


def row_length(arguments: argparse.Namespace, divisor: int) -> int:
    """Tokens of a row in one phase of the base."""
    return max(SHORTEST_ROW, arguments.length // divisor)


def lengths(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Lengths of scored contexts."""
    return arguments.length // 4, arguments.length // 2, arguments.length


def model_config(arguments: argparse.Namespace, vocabulary: int) -> Any:
    """glm5-tiny made smaller and dense."""
    size = arguments.hidden
    return preset(
        "glm5-tiny",
        vocabulary,
        hidden_size=size,
        intermediate_size=2 * size,
        num_layers=arguments.layers,
        max_positions=arguments.length,
        latent={"q_rank": size, "kv_rank": 48, "nope_dim": 16, "value_dim": 32},
        indexer=None,
        moe=None,
        mtp=None,
    )


def sources(arguments: argparse.Namespace, length: int, split: Any) -> tuple[SourceSpec, ...]:
    """Text and retrieval for rows of `length` tokens."""
    room = length - 3  # framing
    # As many facts as leave room for their questions in the shortest document.
    keys = max(1, min(arguments.keys, room // (2 * FACT_TOKENS)))
    queries = min(arguments.queries, keys)
    shortest = max((keys + queries) * FACT_TOKENS, room // 2)
    retrieval = RetrievalSpec(
        tokens=(min(shortest, room), room),
        keys=(1, keys),
        queries=queries,
        answer_weight=ANSWER_WEIGHT,
        context_weight=CONTEXT_WEIGHT,
        key_letters=arguments.letters,
        value_digits=arguments.digits,
    )
    count = max(16, arguments.documents_tokens // length)
    return (
        SourceSpec(split=split, weight=arguments.text_share),
        SourceSpec(
            shape="retrieval",
            split=split,
            weight=1 - arguments.text_share,
            count=count if split == "train" else 16,
            retrieval=retrieval,
        ),
    )


def retrieval_texts() -> list[str]:
    """Facts and questions for the tokenizer, so that only keys and values are spelt out."""
    return ["The value of A is 1.\nWhat is the value of A? 1\n"] * 500


def run_seed(
    arguments: argparse.Namespace, tokenizer: TextTokenizer, cache: Path, seed: int
) -> Result:
    """One seed, in a worker process."""
    torch.set_num_threads(arguments.threads)
    return Experiment(arguments, tokenizer, cache, seed).run()


def metrics_of(arguments: argparse.Namespace, results: Sequence[Result]) -> dict[str, float]:
    """Flat numbers, means over seeds."""
    metrics: dict[str, float] = {}
    for name in VARIANTS:
        scores = [result.scores[name] for result in results]
        metrics[f"acc_{name}"] = statistics.fmean(s.mean() for s in scores)
        parts = {f"_{length}": (length, None) for length in lengths(arguments)}
        parts |= {"_single": (None, 1), "_multi": (None, arguments.keys)}
        for suffix, (length, keys) in parts.items():
            metrics[f"acc_{name}{suffix}"] = statistics.fmean(s.mean(length, keys) for s in scores)
        metrics[f"loss_{name}"] = statistics.fmean(s.bits_per_byte for s in scores)
    for name in results[0].divergences:
        metrics[f"kl_{name}"] = statistics.fmean(r.divergences[name] for r in results)
    for name in results[0].seconds:
        metrics[f"seconds_{name}"] = statistics.fmean(r.seconds[name] for r in results)
    metrics["chance_multi"] = 1 / arguments.keys
    metrics["examples"] = float(
        len(results) * arguments.examples * len(results[0].scores["dense"].accuracy)
    )
    return metrics


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--length", type=int, help="longest row and scored context")
    parser.add_argument("--topk", type=int)
    parser.add_argument("--steps", type=int, help="of the dense base")
    parser.add_argument("--warmup-steps", type=int)
    parser.add_argument("--adapt-steps", type=int)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--documents-tokens", type=int, help="of retrieval documents, per length")
    parser.add_argument("--examples", type=int, help="per length and number of facts")
    parser.add_argument("--held-out-bytes", type=int)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--index-heads", type=int, default=4)
    parser.add_argument("--index-dim", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--warmup-rate", type=float, default=1e-2)
    parser.add_argument("--adapt-rate", type=float, default=4e-3)
    parser.add_argument("--text-share", type=float, default=0.2)
    parser.add_argument("--letters", type=int, default=2, help="of a key")
    parser.add_argument("--digits", type=int, default=2, help="of a value")
    parser.add_argument("--keys", type=int, default=2, help="facts of a multi-key context")
    parser.add_argument("--queries", type=int, default=6, help="of a training document")
    parser.add_argument("--threads", type=int, default=1, help="of each seed's process")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args(argv)
    return fill_sizes(
        arguments,
        (
            ("seeds", 1, 2),
            ("length", 256, 1024),
            ("topk", 32, 64),
            ("steps", 60, 900),
            ("warmup_steps", 10, 80),
            ("adapt_steps", 10, 100),
            ("documents_tokens", 50_000, 1_500_000),
            ("examples", 6, 32),
            ("held_out_bytes", 20_000, 100_000),
        ),
    )


def measure(arguments: argparse.Namespace) -> list[Result]:
    """All seeds, as many at a time as there are workers."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        texts = sample_texts(open_corpus("builtin"), max_bytes=1 << 20)
        tokenizer = train_tokenizer([*texts, *FILLER, *retrieval_texts()], arguments.vocabulary)
        for length in {row_length(arguments, divisor) for _, divisor in PHASES}:
            for source in sources(arguments, length, "train"):
                open_source(source, tokenizer, cache_dir=cache)
        with worker_pool(arguments.workers) as pool:
            futures = [
                pool.submit(run_seed, arguments, tokenizer, cache, seed)
                for seed in range(arguments.seeds)
            ]
            results = []
            for seed, future in enumerate(futures):
                results.append(future.result(timeout=3600))
                shown = {k: round(v.mean(), 3) for k, v in results[-1].scores.items()}
                print(f"seed {seed}: {shown}", flush=True)
    return results


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    metrics = metrics_of(arguments, measure(arguments))
    metrics["wall_s"] = time.perf_counter() - started
    notes = (
        "The paper: nearly lossless after adaptation, at another scale. Accuracies are of "
        "whole answers; their standard error is at most 0.5 / sqrt(examples)."
    )
    print_report("dsa_quality", arguments, metrics, notes)


if __name__ == "__main__":
    main()
