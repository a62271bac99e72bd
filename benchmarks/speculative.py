"""Speculative decoding with prediction layers: tokens per pass, and what it is worth in time.

A small GLM-5 with dense attention and three prediction steps that share one layer is trained on
the builtin corpus, then continues held-out texts, greedily and at temperature 1, with and without
drafts, one request at a time and eight together, rounds of both in turns. The tokens must be the
same.

`accept_length_*` are output tokens per pass of the main model, `speedup_c*` ratios of output tokens
per second (with drafts / without; medians over rounds). At this size a pass costs mostly its
overhead and the prediction layer is a fifth of the model, so speed gains little; in the GLM-5
report's model the layer is one of 79.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.data.corpora import open_corpus, sample_texts
from headrace.data.sources import open_source
from headrace.data.stream import StreamSpec, TokenStream
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore, GenerationFailure
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.model.config import MtpConfig
from headrace.model.decoder import Decoder
from headrace.observe.machine import describe_machine
from headrace.tokens.training import train_tokenizer
from headrace.training.forward import LossConfig
from headrace.training.streams import TextStream
from headrace.training.supervised import Budget
from headrace.training.trainer import OptimizerConfig, Trainer
from mtp_sharing import HELD_OUT, MTP_WEIGHT, TRAIN, held_out_windows, new_model


def trained(arguments: argparse.Namespace) -> tuple[Decoder, Tensor]:
    """A model, and held-out prompts [texts, prompt]."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        tokenizer = train_tokenizer(
            sample_texts(open_corpus("builtin"), max_bytes=1 << 20), arguments.vocabulary
        )
        for source in (TRAIN, HELD_OUT):
            open_source(source, tokenizer, cache_dir=cache)
        model = new_model(arguments, tokenizer.vocab_size, MtpConfig(depth=3, shared=True))
        model.init_weights(0)
        config = OptimizerConfig(
            arguments.learning_rate, weight_decay=0.1, algorithm="muon_split", bfloat16=True
        )
        trainer = Trainer(model, config, losses=LossConfig(mtp_weight=MTP_WEIGHT))
        stream = TextStream(
            TokenStream(
                StreamSpec((TRAIN,)),
                tokenizer,
                arguments.tokens,
                arguments.rows,
                seed=0,
                cache_dir=cache,
            )
        )
        budget = Budget(arguments.steps, None, arguments.learning_rate, arguments.steps // 20, 0.1)
        for step in range(arguments.steps):
            trainer.supervised_step(stream.next_batch(), budget.rate(step, 0.0))
        windows = held_out_windows(arguments, tokenizer, cache)
    return model.eval(), windows[:, : arguments.prompt]


def generate(
    core: EngineCore, prompts: Tensor, new: int, together: int, temperature: float
) -> tuple[list[GenerationResult], float, int]:
    """Results in order, seconds, and passes of the main model."""
    results: list[GenerationResult] = []
    passes = 0
    started = time.perf_counter()
    for first in range(0, len(prompts), together):
        group = prompts[first : first + together].tolist()
        for i, prompt in enumerate(group):
            sampling = SamplingParams(new, temperature=temperature, seed=first + i)
            core.add(GenerationRequest(str(first + i), tuple(prompt), sampling, timeout_s=600.0))
        done: dict[int, GenerationResult] = {}
        while core.has_work:
            passes += 1
            for ended in core.step():
                if isinstance(ended, GenerationFailure):
                    raise RuntimeError(ended.message)
                done[int(ended.id)] = ended
        results += [done[i] for i in sorted(done)]
    return results, time.perf_counter() - started, passes


def written(results: list[GenerationResult]) -> list[list[int]]:
    """Output ids of each."""
    return [[i for span in result.spans for i in span.ids] for result in results]


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    model, prompts = trained(arguments)
    sizes = EngineConfig(max_running=8, max_context=arguments.prompt + arguments.new, seed=0)
    sides = {
        "plain": EngineCore(model, sizes),
        "drafting": EngineCore(model, EngineConfig(**{**vars_of(sizes), "draft_tokens": 3})),
    }
    metrics: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        for together in (1, 8):
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            texts: dict[str, list[list[int]]] = {}
            rate = tokens_per_pass = 0.0
            for _ in range(arguments.rounds):
                for side, core in sides.items():
                    core.forget_prefixes()
                    results, took, passes = generate(
                        core, prompts, arguments.new, together, temperature
                    )
                    seconds[side].append(took)
                    texts[side] = written(results)
                    if side == "drafting":
                        drafted = sum(r.drafted_tokens for r in results)
                        rate = sum(r.accepted_tokens for r in results) / max(1, drafted)
                        tokens_per_pass = sum(map(len, texts[side])) / passes
            same = sum(a == b for a, b in zip(texts["plain"], texts["drafting"], strict=True))
            ratios = [a / b for a, b in zip(seconds["plain"], seconds["drafting"], strict=True)]
            suffix = f"_c{together}" + ("" if name == "greedy" else "_sampled")
            metrics[f"speedup{suffix}"] = statistics.median(ratios)
            metrics[f"accept_rate{suffix}"] = rate
            metrics[f"same_texts{suffix}"] = same / len(prompts)
            if together == 1:
                metrics["accept_length" + suffix.removeprefix("_c1")] = tokens_per_pass
    return metrics


def vars_of(config: EngineConfig) -> dict[str, Any]:
    """Fields and values."""
    return {name: getattr(config, name) for name in config.__struct_fields__}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="small enough for 50 s on two cores")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--texts", type=int, help="held-out texts")
    parser.add_argument("--new", type=int, help="tokens written per text")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a training row")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--prompt", type=int, default=48)
    arguments = parser.parse_args(argv)
    for name, small, full in (
        ("steps", 30, 500),
        ("rounds", 2, 5),
        ("texts", 8, 24),
        ("new", 16, 32),
        ("hidden", 128, 192),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, small if arguments.quick else full)
    return arguments


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    metrics = measure(arguments)
    metrics["wall_s"] = time.perf_counter() - started
    report = {
        "name": "speculative",
        "machine": describe_machine(),
        "config": {
            **{key: value for key, value in vars(arguments).items() if key != "json"},
            "draft_tokens": 3,
            "threads": torch.get_num_threads(),
        },
        "metrics": {key: round(value, 4) for key, value in metrics.items()},
        "notes": "Texts may differ where two likeliest tokens tie to the last bits (same_texts). "
        "Scaled down: a model of a few million parameters after minutes of training.",
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in metrics.items():
            print(f"{name:28s} {value:.4f}")


if __name__ == "__main__":
    main()
