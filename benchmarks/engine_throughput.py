"""Tokens per second of the engine, of transformers, vLLM and llama.cpp, on the same weights.

SmolLM2-135M-Instruct in bfloat16 (random weights of its shape if it is not installed). Requests
sample at temperature 1 a fixed number of tokens, stop tokens ignored: 64 ("short") or 512 ("long")
after prompts of 64 tokens, all different ("distinct") or all the same ("shared"; with one request
at a time, one whose prompt was seen just before), 1, 16 or 64 requests together (c1, c16, c64).
Seconds include the prompts. Every side runs in a process of its own with as many threads, all cores
unless `--threads` says otherwise, and is stopped while another runs. Sides take turns within a
round; a ratio is of tokens per second in one round, and what is reported the median over rounds and
workloads. vLLM (`--vllm-python`) and llama.cpp (`--llama-python`, an environment with
llama-cpp-python) are left out unless given. A side that in the first round at one concurrency is
slower than `--drop` of the best other side is not run there again; what is reported of it is of the
rounds that it ran.

`roofline_c1` and `roofline_c64` are tokens per second of steps that only decode, over what this
machine allows: at c1 reading every weight once per step at its measured memory bandwidth, at c64
the slower of that and multiplying 64 rows at its measured bfloat16 rate (the best of torch and the
engine's own products, on the model's shapes and a large square). Attention, sampling and everything
else are left out of both. `roofline_reread_*` takes the rate at which as many bytes as the weights
have are read again and again, which is higher where a shared cache holds them. `roofline_held_*`
adds to the weights what attention cannot avoid to read at that bandwidth: the keys and values that
a step's sequences hold on average, which at c64 are more bytes than the weights.

`prefill_per_new_token` counts sessions of 20 turns with prefix cache. `decode_ms_*`,
`speedup_sparse_*` and `exponent_*` are of the GLM-5 architecture: see latent_decode.py.
`--parts small` adds the small float32 models of small_decoding.py.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

import latent_decode
from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.model.gguf_import import SMOLLM2
from headrace.model.presets import count_parameters
from peer_process import Peer
from peers.llama_file import write_gguf
from report import fill_sizes, new_parser, print_report
from small_decoding import measure_small
from smollm2 import checkpoint_of

PARTS = ("peers", "turns", "latent", "small")
SIDES: tuple[str, ...] = ("headrace", "transformers", "vllm", "llama", "llama_quantised")
CONCURRENCIES = (1, 16, 64)
RANKED = ("transformers", "vllm", "llama")
"""Sides of the same precision that headrace is compared with."""
PROMPT = 64
TURNS = {"sessions": 4, "count": 20, "added": 48, "new": 16}
STARTED = time.perf_counter()
START_S, ANSWER_S = 600.0, 900.0
"""How long a peer may take to be ready, and to answer."""


class Workload(NamedTuple):
    """What is asked of every side."""

    length: str
    kind: str
    new: int
    rounds: int

    @property
    def name(self) -> str:
        """As in the metrics' names."""
        return f"{self.length}_{self.kind}"


class Rate(NamedTuple):
    """One side's tokens per second in one round, and of headrace those of decoding alone."""

    side: str
    concurrency: int
    workload: str
    round: int
    tokens_per_s: float
    decode_tokens_per_s: float = 0.0


class Limits(NamedTuple):
    """What the machine did at most in one round, per second."""

    concurrency: int
    workload: str
    round: int
    read_bytes: float
    reread_bytes: float
    matmul_flops: float

    def most(self, parameters: int, *, again: bool = False, held_bytes: float = 0.0) -> float:
        """Tokens per second that decoding cannot exceed.

        Args:
            parameters: that one token is multiplied with, 2 bytes and 2 operations each.
            again: weights are read as fast as what was read just before.
            held_bytes: keys and values read beside the weights.
        """
        read = 2 * parameters + held_bytes
        seconds = read / (self.reread_bytes if again else self.read_bytes)
        if self.concurrency > 1:
            operations = 2 * parameters * self.concurrency
            seconds = max(seconds, operations / self.matmul_flops)
        return self.concurrency / seconds


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Short ones first: they decide who runs the long ones."""
    return [
        Workload(length, kind, getattr(arguments, length), getattr(arguments, f"rounds_{length}"))
        for length in ("short", "long")
        for kind in ("distinct", "shared")
    ]


def new_prompts(workload: Workload, concurrency: int, seed: str, vocab: int) -> list[list[int]]:
    """Random prompts, other ones for each seed."""
    draw = random.Random(seed)
    # One request after the other: two, if they are short.
    count = max(concurrency, 2 if workload.length == "short" else 1)
    prompts = [[draw.randrange(100, vocab) for _ in range(PROMPT)] for _ in range(count)]
    return [prompts[0]] * count if workload.kind == "shared" else prompts


def best_of(rates: Sequence[Rate]) -> float:
    """Most tokens per second of any side but headrace; 0 of none."""
    return max((r.tokens_per_s for r in rates if r.side in RANKED), default=0.0)


class Comparison:
    """Runs all workloads on all sides, in turns.

    Args:
        peers: by side, "headrace" among them, ready.
        arguments: see `parse`.
        vocab: ids are drawn from it.
    """

    def __init__(self, peers: dict[str, Peer], arguments: argparse.Namespace, vocab: int) -> None:
        self.rates: list[Rate] = []
        self.limits: list[Limits] = []
        self.dropped: list[str] = []
        self._peers = peers
        self._arguments = arguments
        self._vocab = vocab

    def run(self, concurrency: int) -> None:
        """Every workload at one concurrency."""
        sides = list(self._peers)
        warm = Workload("long", "distinct", 2, 1)
        for side in sides:
            self._ask(side, warm, concurrency, f"warm {concurrency} {side}")
        for workload in workloads(self._arguments):
            for number in range(workload.rounds):
                found = list(self._round(workload, concurrency, number, sides))
                self.rates += found
                self._show(workload, concurrency, found)
                floor = self._arguments.drop * best_of(found)
                slow = {rate.side for rate in found if rate.tokens_per_s < floor} - {"headrace"}
                for side in slow:
                    self.dropped.append(f"{side} at c{concurrency}")
                    sides.remove(side)

    def _round(
        self, workload: Workload, concurrency: int, number: int, sides: list[str]
    ) -> Iterator[Rate]:
        answer = self._peers["headrace"].ask("rates", ANSWER_S)
        self.limits.append(Limits(concurrency, workload.name, number, **answer))
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            seed = f"{workload.name} {concurrency} {number}"
            prompts = new_prompts(workload, concurrency, seed, self._vocab)
            if concurrency == 1 and workload.kind == "shared":
                self._peers[side].ask(
                    "run", ANSWER_S, prompts=prompts[:1], new=1, concurrency=1, seed=0
                )
            answer = self._ask(side, workload, concurrency, seed)
            decoded = answer.get("decode_tokens", 0)
            yield Rate(
                side,
                concurrency,
                workload.name,
                number,
                workload.new * len(prompts) / answer["seconds"],
                decoded / answer["decode_s"] if decoded else 0.0,
            )

    def _ask(self, side: str, workload: Workload, concurrency: int, seed: str) -> dict[str, Any]:
        return self._peers[side].ask(
            "run",
            ANSWER_S,
            prompts=new_prompts(workload, concurrency, seed, self._vocab),
            new=workload.new,
            concurrency=concurrency,
            seed=random.Random(seed).randrange(1 << 31),
        )

    def _show(self, workload: Workload, concurrency: int, found: Sequence[Rate]) -> None:
        shown = ", ".join(f"{rate.side} {rate.tokens_per_s:.0f}" for rate in found)
        say(f"c{concurrency} {workload.name}: {shown} tokens/s")


def say(line: str) -> None:
    """Progress, with the time since the start."""
    print(f"[{time.perf_counter() - STARTED:4.0f} s] {line}", flush=True)


def metrics_of(rates: Sequence[Rate]) -> dict[str, float]:
    """Tokens per second, and ratios of headrace's to others' in the same round."""
    metrics: dict[str, float] = {}
    rounds: dict[tuple[int, str, int], list[Rate]] = defaultdict(list)
    for rate in rates:
        rounds[rate.concurrency, rate.workload, rate.round].append(rate)
    values: dict[str, list[float]] = defaultdict(list)
    for (concurrency, workload, _), found in rounds.items():
        by_side = {rate.side: rate.tokens_per_s for rate in found}
        ours = by_side["headrace"]
        # Of every workload, also of those that the slower sides did not run.
        kept = {"tokens_per_s_headrace": ours}
        if best := best_of(found):
            kept |= {"tokens_per_s_best": best, "ratio_vs_best": ours / best}
        entries = dict(kept)
        for side in by_side.keys() - {"headrace"}:
            entries[f"tokens_per_s_{side}"] = by_side[side]
            entries[f"ratio_vs_{side}"] = ours / by_side[side]
        for name, value in entries.items():
            values[f"{name}_c{concurrency}"].append(value)
            if name in kept:
                values[f"{name}_c{concurrency}_{workload}"].append(value)
    for name in sorted(values, key=lambda name: (not name.startswith("ratio_vs_best"), name)):
        metrics[name] = statistics.median(values[name])
    return metrics


def held_bytes(config: ModelConfig, concurrency: int, new: int) -> float:
    """Keys and values that the average decoding step's sequences hold, in bfloat16."""
    token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return concurrency * (PROMPT + new / 2) * token


def roofline_metrics(
    rates: Sequence[Rate],
    limits: Sequence[Limits],
    parameters: int,
    held: Callable[[int, str], float],
) -> dict[str, float]:
    """How near decoding comes to what the machine allows, and what that is.

    Args:
        rates: of all sides.
        limits: of the same rounds.
        parameters: see `Limits.most`.
        held: bytes of keys and values that an average step reads, by concurrency and workload.
    """
    metrics: dict[str, float] = {
        "weights_mb": 2 * parameters / 1e6,
        "read_gb_per_s": statistics.median(limit.read_bytes for limit in limits) / 1e9,
        "reread_gb_per_s": statistics.median(limit.reread_bytes for limit in limits) / 1e9,
        "matmul_tflops": statistics.median(limit.matmul_flops for limit in limits) / 1e12,
    }
    found = {(limit.concurrency, limit.workload, limit.round): limit for limit in limits}
    for concurrency in (1, 64):
        achieved = [
            (rate, found[rate.concurrency, rate.workload, rate.round])
            for rate in rates
            if rate.side == "headrace"
            and rate.concurrency == concurrency
            and rate.decode_tokens_per_s
        ]
        if not achieved:
            continue
        decoded = [rate.decode_tokens_per_s for rate, _ in achieved]
        metrics[f"decode_tokens_per_s_c{concurrency}"] = statistics.median(decoded)
        for name, again, holds in (
            ("roofline", False, False),
            ("roofline_reread", True, False),
            ("roofline_held", False, True),
        ):
            most = [
                limit.most(
                    parameters,
                    again=again,
                    held_bytes=holds * held(concurrency, rate.workload),
                )
                for rate, limit in achieved
            ]
            shares = [a / bound for a, bound in zip(decoded, most, strict=True)]
            metrics[f"{name}_c{concurrency}"] = statistics.median(shares)
            metrics[f"{name}_tokens_per_s_c{concurrency}"] = statistics.median(most)
    return metrics


def start_peers(
    arguments: argparse.Namespace, checkpoint: Path, folder: Path, stack: ExitStack
) -> tuple[dict[str, Peer], list[str]]:
    """Every side that there is, ready, and notes on those that there are not."""
    threads = dict.fromkeys(SIDES, arguments.threads)
    for entry in arguments.threads_of:
        side, _, count = entry.partition("=")
        threads[side] = int(count)
    cores = sorted(os.sched_getaffinity(0))
    context = max(PROMPT + arguments.long, TURNS["count"] * (TURNS["added"] + TURNS["new"]))
    shared: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "max_context": context + 1,
        "max_running": max(CONCURRENCIES),
    }
    notes: list[str] = []
    commands: dict[str, tuple[str, str, dict[str, Any]]] = {
        "headrace": (sys.executable, "headrace_peer.py", {}),
    }
    if "peers" in arguments.parts:
        commands["transformers"] = (sys.executable, "transformers_peer.py", {})
        if arguments.vllm_python:
            bound = ",".join(map(str, cores[: threads["vllm"]]))
            commands["vllm"] = (arguments.vllm_python, "vllm_peer.py", {"cores": bound})
        else:
            notes.append("vLLM left out: no --vllm-python")
        if arguments.llama_python:
            write_gguf(checkpoint, folder / "weights.gguf")
            found = {"gguf": str(folder / "weights.gguf")}
            commands["llama"] = (arguments.llama_python, "llama_peer.py", found)
            if arguments.llama_quantised:
                found = {"gguf": str(arguments.llama_quantised)}
                commands["llama_quantised"] = (arguments.llama_python, "llama_peer.py", found)
                notes.append(
                    f"llama_quantised is {arguments.llama_quantised.name}, of lower precision, "
                    "and not among the best"
                )
        else:
            notes.append("llama.cpp left out: no --llama-python")
    peers: dict[str, Peer] = {}
    for side, (python, script, own) in commands.items():
        options = shared | own | {"threads": threads[side]}
        environment = {"OMP_NUM_THREADS": str(threads[side])}
        log = folder / f"{side}.log"
        peers[side] = stack.enter_context(Peer(side, python, script, options, log, environment))
    for side, peer in peers.items():
        peer.wait_ready(START_S)
        say(f"{side} is ready")
    return peers, notes


def measure_peers(arguments: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """The parts that need SmolLM2: metrics and notes."""
    metrics: dict[str, float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint, note = checkpoint_of(arguments.model, folder)
        config = ModelConfig.from_file(checkpoint)
        peers, notes = start_peers(arguments, checkpoint, folder, stack)
        if note:
            notes.append(note)
        if "peers" in arguments.parts:
            comparison = Comparison(peers, arguments, config.vocab_size)
            for concurrency in CONCURRENCIES:
                comparison.run(concurrency)
            metrics |= metrics_of(comparison.rates)
            new = {workload.name: workload.new for workload in workloads(arguments)}
            metrics |= roofline_metrics(
                comparison.rates,
                comparison.limits,
                count_parameters(config).active,
                lambda concurrency, name: held_bytes(config, concurrency, new[name]),
            )
            if comparison.dropped:
                notes.append("too slow to be run again: " + ", ".join(comparison.dropped))
        if "turns" in arguments.parts:
            turns = dict(TURNS, new=4) if arguments.quick else TURNS
            metrics |= peers["headrace"].ask("turns", ANSWER_S, **turns)
            say(f"{metrics['prefill_per_new_token']:.3f} prefilled tokens per new token")
    return metrics, notes


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__, quick="few tokens and one round; within 50 s without vLLM")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]))
    parser.add_argument("--model", default=SMOLLM2, help="a name or a checkpoint directory")
    parser.add_argument("--vllm-python", default=os.environ.get("HEADRACE_VLLM_PYTHON"))
    parser.add_argument("--llama-python", default=os.environ.get("HEADRACE_LLAMA_PYTHON"))
    parser.add_argument(
        "--llama-quantised", type=Path, help="a GGUF file of the model at lower precision to add"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--threads-of",
        nargs="+",
        default=[],
        metavar="SIDE=N",
        help="for a side that is fastest with another number",
    )
    parser.add_argument("--drop", type=float, default=0.6, help="see above; 0 drops nobody")
    parser.add_argument("--short", type=int, help="new tokens")
    parser.add_argument("--long", type=int, help="new tokens")
    parser.add_argument("--rounds-short", type=int)
    parser.add_argument("--rounds-long", type=int)
    arguments = parser.parse_args(argv)
    for entry in arguments.threads_of:
        side, _, count = entry.partition("=")
        if side not in SIDES or not count.isdigit() or int(count) < 1:
            parser.error(f"--threads-of {entry!r} must be SIDE=N, SIDE one of {', '.join(SIDES)}")
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}; it must be at least 1")
    return fill_sizes(
        arguments,
        (("short", 2, 64), ("long", 6, 512), ("rounds_short", 1, 2), ("rounds_long", 1, 1)),
    )


def main() -> None:
    arguments = parse()
    # So that peers are ended when this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(arguments.threads)
    metrics: dict[str, float] = {}
    notes: list[str] = []
    try:
        if {"peers", "turns"} & set(arguments.parts):
            metrics, notes = measure_peers(arguments)
        if "latent" in arguments.parts:
            metrics |= latent_decode.measure(*((1, 4) if arguments.quick else (5, 24)), say)
            notes.append(f"latent attention: {latent_decode.SHAPE}")
        if "small" in arguments.parts:
            metrics |= measure_small(arguments.quick, say)
    except UserError as error:
        raise SystemExit(str(error)) from error
    metrics["wall_s"] = time.perf_counter() - STARTED
    print_report(
        "engine_throughput",
        arguments,
        metrics,
        "; ".join(notes),
        prompt_tokens=PROMPT,
        dtype="bfloat16",
    )


if __name__ == "__main__":
    main()
