"""Speculative decoding with prediction layers: tokens per pass, and what it is worth in time.

A small GLM-5 with dense attention and three prediction steps that share one layer is trained on
the builtin corpus, then continues held-out texts, greedily and at temperature 1, with and without
drafts, one request at a time and eight together, rounds of both in turns. The tokens must be the
same.

`accept_length_*` are output tokens per pass of the main model, `speedup_c*` ratios of output tokens
per second (with drafts / without; medians over rounds). `pass_cost_*` says what a pass with its
drafts costs, in passes without: drafting pays where texts give more tokens per pass than that.

The model is deep and narrow because depth decides what a draft costs beside a pass: a guess runs
one layer (and the output layer) of twelve here, of 79 in the GLM-5 report's model. With four layers
three guesses cost most of a pass, and no acceptance this small a model reaches would pay for them.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.model.config import MtpConfig
from headrace.model.decoder import Decoder
from mtp_sharing import held_out_windows, prepare_tokens, train
from report import fill_sizes, new_parser, print_report

STARTED = time.perf_counter()


def say(line: str) -> None:
    """Progress, with the time since the start."""
    print(f"[{time.perf_counter() - STARTED:4.0f} s] {line}", flush=True)


def trained(arguments: argparse.Namespace) -> tuple[Decoder, Tensor]:
    """A model, and held-out prompts [texts, prompt]."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        tokenizer = prepare_tokens(arguments.vocabulary, cache)
        mtp = MtpConfig(depth=3, shared=True)
        model, _ = train(arguments, tokenizer, cache, mtp, seed=0)
        windows = held_out_windows(arguments, tokenizer, cache)
    return model, windows[:, : arguments.prompt]


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
                if not isinstance(ended, GenerationResult):
                    raise RuntimeError(str(ended))
                done[int(ended.id)] = ended
        results += [done[i] for i in sorted(done)]
    return results, time.perf_counter() - started, passes


def written(results: list[GenerationResult]) -> list[list[int]]:
    """Output ids of each."""
    return [[i for span in result.spans for i in span.ids] for result in results]


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    say(f"training for {arguments.steps} steps")
    model, prompts = trained(arguments)
    sizes = EngineConfig(max_running=8, max_context=arguments.prompt + arguments.new, seed=0)
    sides = {
        "plain": EngineCore(model, sizes),
        "drafting": EngineCore(model, msgspec.structs.replace(sizes, draft_tokens=3)),
    }
    metrics: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        for together in (1, 8):
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            texts: dict[str, list[list[int]]] = {}
            rate = tokens_per_pass = 0.0
            passed: dict[str, int] = {}
            for _ in range(arguments.rounds):
                for side, core in sides.items():
                    core.forget_prefixes()
                    results, took, passes = generate(
                        core, prompts, arguments.new, together, temperature
                    )
                    seconds[side].append(took)
                    texts[side] = written(results)
                    passed[side] = passes
                    if side == "drafting":
                        drafted = sum(r.drafted_tokens for r in results)
                        rate = sum(r.accepted_tokens for r in results) / max(1, drafted)
                        tokens_per_pass = sum(map(len, texts[side])) / passes
            same = sum(a == b for a, b in zip(texts["plain"], texts["drafting"], strict=True))
            ratios = [a / b for a, b in zip(seconds["plain"], seconds["drafting"], strict=True)]
            suffix = f"_c{together}" + ("" if name == "greedy" else "_sampled")
            metrics[f"speedup{suffix}"] = statistics.median(ratios)
            say(f"{name}, {together} at once: {statistics.median(ratios):.2f} times as fast")
            metrics[f"accept_rate{suffix}"] = rate
            per_pass = {s: statistics.median(seconds[s]) / passed[s] for s in sides}
            metrics[f"pass_cost{suffix}"] = per_pass["drafting"] / per_pass["plain"]
            metrics[f"same_texts{suffix}"] = same / len(prompts)
            if together == 1:
                metrics["accept_length" + suffix.removeprefix("_c1")] = tokens_per_pass
    return metrics


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--texts", type=int, help="held-out texts")
    parser.add_argument("--new", type=int, help="tokens written per text")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a training row")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--prompt", type=int, default=48)
    arguments = parser.parse_args(argv)
    return fill_sizes(
        arguments,
        (
            ("steps", 30, 300),
            ("rounds", 2, 5),
            ("texts", 8, 24),
            ("new", 16, 32),
            ("hidden", 96, 128),
        ),
    )


def main() -> None:
    arguments = parse()
    metrics = measure(arguments)
    metrics["wall_s"] = time.perf_counter() - STARTED
    notes = (
        "Texts may differ where two likeliest tokens tie to the last bits (same_texts). "
        "Scaled down: a model of a few million parameters after minutes of training."
        + ("" if metrics["speedup_c1"] > 1 else " Drafting does not pay here: see pass_cost_c1.")
    )
    print_report(
        "speculative", arguments, metrics, notes, draft_tokens=3, threads=torch.get_num_threads()
    )


if __name__ == "__main__":
    main()
