"""What long prompts do to the tokens of others: time between tokens, with one engine and with two.

Some requests decode all the time. After a while by themselves, agents join them: sessions whose
prompt grows by a long observation each turn, answered in a few tokens, the next turn at once. Every
engine is a process on cores of its own, as in production, all over the same random weights of
SmolLM2-135M's shape, and in turns; tokens are timed where the caller is told of them.

    unchunked   one engine on all cores, a prompt is computed in one pass
    chunked     the same, at most `prefill_tokens` of prompts beside running requests
    paced       the same, and chunks follow the clock: `decode_slowdown` is promised
    split       half of the cores sample, the others compute prompts and hand them over

`intertoken_p99_ratio_*` is the 99th percentile of the time between two tokens of a decoding request
while the agents are there, over the median without them on the same engine: medians over rounds.
`intertoken_factor_paced` is the one that the engine promises. `split_vs_chunked_p99` compares
milliseconds. `prefill_tokens_per_s_*` are the agents' new tokens over the time they took, answers
included; `turn_s_*` the median time to a turn's first token. `pass_growth_*` are from one process
without callers: how much longer a pass takes with so many prompt tokens in it.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import torch

from headrace.cluster.local import LocalCluster, available_cores
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.split import MIN_TOKENS, SplitEngine
from headrace.engine.types import GenerationRequest, Progress, SamplingParams
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.observe.machine import describe_machine

SIDES = ("unchunked", "chunked", "paced", "split")
SLOWDOWN = 4.0
"""What "paced" promises: a step takes at most so many times as long because of prompts."""
GROWTHS = (16, 64, 256)
_DECODE_PROMPT, _TIMEOUT_S = 32, 600.0

Engine = ProcessEngine | SplitEngine


def shape(arguments: argparse.Namespace) -> ModelConfig:
    """SmolLM2-135M, or a small relative of it."""
    hidden, inner, layers, heads, kv_heads, vocab = (
        (192, 512, 6, 3, 1, 4096) if arguments.quick else (576, 1536, 30, 9, 3, 49152)
    )
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        max_positions=8192,
        tie_embeddings=True,
    )


def sizes(arguments: argparse.Namespace) -> EngineConfig:
    """Of every engine but for the chunks."""
    grown = arguments.turns * (arguments.grow + arguments.answer)
    long = max(grown, _DECODE_PROMPT + arguments.most) + 1
    room = arguments.sessions * grown + arguments.decodes * (_DECODE_PROMPT + arguments.most)
    return EngineConfig(
        max_running=arguments.decodes + arguments.sessions,
        max_context=long,
        cache_tokens=2 * room,
        dtype=arguments.dtype,
        seed=0,
    )


@contextlib.asynccontextmanager
async def open_engines(
    arguments: argparse.Namespace, checkpoint: str, log: str
) -> AsyncIterator[dict[str, Engine]]:
    """All sides, loaded; those that are not measured sleep."""
    cores = available_cores()
    if len(cores) < 2:
        raise SystemExit("decode_latency: two roles need two cores; only one is usable here")
    half = len(cores) // 2
    cluster = LocalCluster()
    config = sizes(arguments)

    def engine(name: str, owned: tuple[int, ...], config: EngineConfig) -> ProcessEngine:
        return ProcessEngine(
            cluster,
            msgspec.structs.replace(config, engine_id=name),
            checkpoint=checkpoint,
            cores=owned,
            threads=len(owned),
            log_path=log,
        )

    whole = msgspec.structs.replace(config, prefill_tokens=config.max_context)
    engines: dict[str, Engine] = {
        "unchunked": engine("unchunked", cores, whole),
        "chunked": engine("chunked", cores, config),
        "paced": engine("paced", cores, msgspec.structs.replace(config, decode_slowdown=SLOWDOWN)),
        "split": SplitEngine(
            engine("prefill", cores[half:], config), engine("decode", cores[:half], config)
        ),
    }
    try:
        for each in engines.values():
            await each.start()
        yield engines
    finally:
        for each in engines.values():
            await each.close()
        await cluster.close()


class Decodes:
    """Requests that decode until they are aborted, and the times between their tokens."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace, draw: np.random.Generator):
        self._engine = engine
        self._last: dict[str, float] = {}
        self._begun = asyncio.Event()
        self._count = arguments.decodes
        self.gaps: list[float] = []
        vocab = shape(arguments).vocab_size
        self._tasks = {
            f"decode-{i}": asyncio.create_task(
                engine.generate(
                    GenerationRequest(
                        f"decode-{i}",
                        tuple(draw.integers(1, vocab, _DECODE_PROMPT).tolist()),
                        SamplingParams(arguments.most, seed=i),
                        _TIMEOUT_S,
                    ),
                    self._tell,
                )
            )
            for i in range(self._count)
        }

    def _tell(self, progress: Progress) -> None:
        now = time.perf_counter()
        last = self._last.get(progress.id)
        if last is not None:
            self.gaps.append((now - last) / len(progress.ids))
        self._last[progress.id] = now
        if len(self._last) == self._count:
            self._begun.set()

    async def begin(self) -> None:
        """Return when all have sampled."""
        async with asyncio.timeout(_TIMEOUT_S):
            await self._begun.wait()
        self.gaps = []

    async def wait(self, tokens: int) -> list[float]:
        """The next gaps, at least so many; seconds."""
        self.gaps = []
        while len(self.gaps) < tokens:
            await asyncio.sleep(0.01)
            self._check()
        return self.gaps

    def _check(self) -> None:
        if any(task.done() for task in self._tasks.values()):
            raise RuntimeError("a decoding request ended within the measurement; raise --most")

    async def end(self) -> None:
        """Stop them all."""
        self._check()
        for name in self._tasks:
            await self._engine.abort(name)
        await asyncio.gather(*self._tasks.values())


async def run_session(
    engine: Engine, name: str, arguments: argparse.Namespace, draw: np.random.Generator
) -> list[float]:
    """Seconds to the first token of each turn of one agent."""
    vocab = shape(arguments).vocab_size
    prompt: tuple[int, ...] = ()
    waits: list[float] = []
    for turn in range(arguments.turns):
        prompt = (*prompt, *draw.integers(1, vocab, arguments.grow).tolist())
        firsts: list[float] = []
        began = time.perf_counter()
        result = await engine.generate(
            GenerationRequest(
                f"{name}-{turn}",
                prompt,
                SamplingParams(arguments.answer, seed=turn),
                _TIMEOUT_S,
                session=name,
            ),
            lambda _, firsts=firsts: firsts.append(time.perf_counter()),
        )
        waits.append(firsts[0] - began)
        prompt = (*prompt, *(i for span in result.spans for i in span.ids))
    return waits


async def run_round(engine: Engine, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """One side, once."""
    draw = np.random.default_rng(seed)
    decodes = Decodes(engine, arguments, draw)
    await decodes.begin()
    alone = await decodes.wait(arguments.alone * arguments.decodes)
    decodes.gaps = []
    began = time.perf_counter()
    waits = await asyncio.gather(
        *(
            run_session(engine, f"agent-{seed}-{i}", arguments, draw)
            for i in range(arguments.sessions)
        )
    )
    took = time.perf_counter() - began
    joined = decodes.gaps
    await decodes.end()
    new = arguments.sessions * arguments.turns * arguments.grow
    median = statistics.median(alone)
    return {
        "intertoken_alone_ms": 1e3 * median,
        "intertoken_alone_p99_ratio": float(np.quantile(alone, 0.99)) / median,
        "intertoken_p50_ms": 1e3 * statistics.median(joined),
        "intertoken_p99_ms": 1e3 * float(np.quantile(joined, 0.99)),
        "intertoken_max_ms": 1e3 * max(joined),
        "intertoken_p99_ratio": float(np.quantile(joined, 0.99)) / median,
        "decode_tokens_per_s": len(joined) / took,
        "prefill_tokens_per_s": new / took,
        "turn_s": statistics.median(wait for waited in waits for wait in waited),
    }


async def measure(arguments: argparse.Namespace, checkpoint: str, log: str) -> dict[str, float]:
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    async with open_engines(arguments, checkpoint, log) as engines:
        for number in range(-1, arguments.rounds):
            for side, engine in engines.items():
                if number < 0:
                    # Memory that is touched for the first time costs more.
                    await run_round(engine, warming(arguments), 1000)
                else:
                    rounds[side].append(await run_round(engine, arguments, number))
        split = await engines["split"].stats()
    metrics = {
        f"{name}_{side}": statistics.median(each[name] for each in rounds[side])
        for side in SIDES
        for name in rounds[side][0]
    }
    asked = split["handed_over"] + split["kept"] + split["fell_back"]
    if split["fell_back"]:
        raise RuntimeError(f"{split['fell_back']} of {asked} prompts did not cross over")
    return {
        **metrics,
        "intertoken_factor_paced": metrics["intertoken_p99_ratio_paced"],
        "split_vs_chunked_p99": statistics.median(
            one["intertoken_p99_ms"] / other["intertoken_p99_ms"]
            for one, other in zip(rounds["split"], rounds["chunked"], strict=True)
        ),
        "split_vs_unchunked_p99": statistics.median(
            one["intertoken_p99_ms"] / other["intertoken_p99_ms"]
            for one, other in zip(rounds["split"], rounds["unchunked"], strict=True)
        ),
    }


def warming(arguments: argparse.Namespace) -> argparse.Namespace:
    """A short round that touches as much memory as a long one."""
    return argparse.Namespace(**{**vars(arguments), "alone": 1})


def pass_growth(arguments: argparse.Namespace, checkpoint: str) -> dict[str, float]:
    """Seconds of a pass with decodes and some prompt tokens, over those of one without; one
    thread. What a prompt that stays in the sampling engine costs those beside it."""
    torch.set_num_threads(1)
    model = load_checkpoint(checkpoint, dtype=getattr(torch, arguments.dtype))
    core = EngineCore(model, sizes(arguments))
    draw = np.random.default_rng(0)
    vocab = model.config.vocab_size
    for i in range(arguments.decodes):
        prompt = tuple(draw.integers(1, vocab, _DECODE_PROMPT).tolist())
        core.add(GenerationRequest(f"d{i}", prompt, SamplingParams(arguments.most), _TIMEOUT_S))
    for _ in range(4):
        core.step()
    plain: list[float] = []
    grown: dict[int, list[float]] = {growth: [] for growth in GROWTHS}
    for number in range(arguments.passes):
        for growth in GROWTHS:
            plain.append(_seconds(core))
            prompt = tuple(draw.integers(1, vocab, growth).tolist())
            name = f"p{number}-{growth}"
            core.add(GenerationRequest(name, prompt, SamplingParams(1), _TIMEOUT_S))
            grown[growth].append(_seconds(core))
    usual = statistics.median(plain)
    return {
        f"pass_growth_{growth}": statistics.median(times) / usual for growth, times in grown.items()
    }


def _seconds(core: EngineCore) -> float:
    began = time.perf_counter()
    core.step()
    return time.perf_counter() - began


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="small enough for 50 s on two cores")
    parser.add_argument("--decodes", type=int, default=8, help="requests that decode all the time")
    parser.add_argument("--sessions", type=int, default=2, help="agents")
    parser.add_argument("--turns", type=int, help="of each agent")
    parser.add_argument("--grow", type=int, help="new tokens of a turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens sampled in a turn")
    parser.add_argument("--alone", type=int, help="tokens of each decode without agents")
    parser.add_argument("--most", type=int, default=4000, help="tokens a decode may sample")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--passes", type=int)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    arguments = parser.parse_args(argv)
    for name, small, full in (
        ("turns", 2, 4),
        ("grow", 768, 1536),
        ("alone", 40, 60),
        ("rounds", 1, 3),
        ("passes", 6, 20),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, small if arguments.quick else full)
    return arguments


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Decoder(shape(arguments), dtype=getattr(torch, arguments.dtype))
        model.init_weights(0)
        save_checkpoint(model, Path(folder) / "model")
        del model
        checkpoint = str(Path(folder) / "model")
        metrics = asyncio.run(measure(arguments, checkpoint, str(Path(folder) / "log")))
        metrics |= pass_growth(arguments, checkpoint)
    metrics["wall_s"] = time.perf_counter() - started
    config = sizes(arguments)
    report = {
        "name": "decode_latency",
        "machine": describe_machine(),
        "config": {
            **{key: value for key, value in vars(arguments).items() if key != "json"},
            "prefill_tokens": config.prefill_tokens,
            "min_tokens": MIN_TOKENS,
            "cores": len(available_cores()),
        },
        "metrics": {key: round(value, 4) for key, value in metrics.items()},
        "notes": "Random weights; both roles of split have half of the cores that the other two "
        "sides have. The caller that times the tokens shares the cores with the engines.",
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in metrics.items():
            print(f"{name:40s} {value:10.4f}")


if __name__ == "__main__":
    main()
