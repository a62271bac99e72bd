"""Where the turns of agents are sent, over several replicas: round-robin, least loaded, by session.

Each side gets replicas of its own in processes, all over the same small random weights, and the
same agents: sessions whose prompt grows turn by turn by an observation, answered in a few tokens,
with a pause of random length in between. Sides take turns. In a second part a replica joins the
router's and another one leaves in the middle.

`prefill_per_new_token*` is what the replicas computed of prompts over what was new in them: 1 means
that every turn found its session's earlier tokens where it was sent. `turn_p50_ms_*` and
`turn_p99_ms_*` are of whole turns, waiting included. `imbalance*` is the largest number of sessions
of a replica over its fair share when all sessions are open; `moved_share_join_leave` the share of
sessions that were sent elsewhere than at their last turn while replicas came and went, where an
even spread alone asks for `moved_share_needed`.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from headrace.cluster.local import LocalCluster, available_cores
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.types import EngineClient, GenerationRequest, SamplingParams
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.replicas.replica import StartReplica, Weights
from headrace.rollout.replicas.router import Router
from report import fill_sizes, new_parser, print_report

VOCAB = 4096
SIDES = ("round_robin", "least_loaded", "router")
SIZES = [
    ("agents", 16, 32),
    ("turns", 5, 12),
    ("rounds", 1, 3),
    ("first", 128, 256),
    ("later", 32, 48),
]


class Turns(NamedTuple):
    """What one side's agents saw.

    Attributes:
        seconds: of each turn.
        new: prompt tokens that no earlier turn of their session had.
    """

    seconds: list[float]
    new: int


Choose = Callable[[GenerationRequest], ProcessEngine]


def round_robin(engines: list[ProcessEngine]) -> Choose:
    """One after the other, whoever asks."""
    count = 0

    def choose(request: GenerationRequest) -> ProcessEngine:
        nonlocal count
        count += 1
        return engines[count % len(engines)]

    return choose


def least_loaded(engines: list[ProcessEngine], open_: dict[int, int]) -> Choose:
    """The one with the fewest requests in flight; of equal ones any."""
    chance = random.Random(0)

    def choose(request: GenerationRequest) -> ProcessEngine:
        fewest = min(open_[i] for i in range(len(engines)))
        return engines[chance.choice([i for i in range(len(engines)) if open_[i] == fewest])]

    return choose


class Plain:
    """A pool without memory of sessions."""

    def __init__(self, engines: list[ProcessEngine], kind: str) -> None:
        self._engines = engines
        self._open = dict.fromkeys(range(len(engines)), 0)
        make = round_robin(engines) if kind == "round_robin" else least_loaded(engines, self._open)
        self._choose = make

    async def generate(self, request: GenerationRequest) -> None:
        """One request, wherever the rule sends it."""
        engine = self._choose(request)
        number = self._engines.index(engine)
        self._open[number] += 1
        try:
            await engine.generate(request)
        finally:
            self._open[number] -= 1


async def talk(
    generate: Callable[[GenerationRequest], Awaitable[Any]],
    name: str,
    sizes: tuple[int, int, int],
    seed: int,
) -> Turns:
    """One agent: its prompt grows by what it would have read and written."""
    turns, first, later = sizes
    chance = np.random.default_rng(seed)
    prompt: list[int] = []
    seconds, new = [], 0
    for turn in range(turns):
        added = chance.integers(1, VOCAB, first if turn == 0 else later).tolist()
        prompt += added
        new += len(added)
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        request = GenerationRequest(
            f"{name}/{turn}", tuple(prompt), sampling, timeout_s=300.0, session=name
        )
        began = time.perf_counter()
        await generate(request)
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(float(chance.exponential(0.05)))
    return Turns(seconds, new)


async def agents(
    generate: Callable[[GenerationRequest], Awaitable[Any]],
    count: int,
    sizes: tuple[int, int, int],
    label: str,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Turns:
    """All agents at once, and something else beside them."""
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(
            talk(generate, f"{label}-{i}", sizes, zlib.crc32(f"{label}/{i}".encode()))
        )
        for i in range(count)
    ]
    if beside is not None:
        tasks.append(asyncio.create_task(beside()))
    found = [turns for turns in await asyncio.gather(*tasks) if isinstance(turns, Turns)]
    return Turns([s for turns in found for s in turns.seconds], sum(turns.new for turns in found))


@asynccontextmanager
async def engines(folder: str, names: list[str]) -> AsyncIterator[dict[str, ProcessEngine]]:
    """Replicas that are up, one thread each, spread over the cores."""
    cluster, cores = LocalCluster(), available_cores()
    made = {
        name: ProcessEngine(
            cluster,
            EngineConfig(engine_id=name, max_running=16, max_context=2048, cache_tokens=32768),
            checkpoint=folder,
            cores=(cores[i % len(cores)],),
        )
        for i, name in enumerate(names)
    }
    try:
        await asyncio.gather(*(engine.start() for engine in made.values()))
        yield made
    finally:
        await asyncio.gather(*(engine.close() for engine in made.values()))
        await cluster.close()


async def prefilled(pool: dict[str, ProcessEngine]) -> int:
    """Prompt tokens computed so far."""
    return sum([(await engine.stats())["tokens_prefilled"] for engine in pool.values()])


async def measure(folder: str, arguments: argparse.Namespace) -> dict[str, float]:
    """All metrics."""
    replicas, count = arguments.replicas, arguments.agents
    sizes = (arguments.turns, arguments.first, arguments.later)
    rounds = arguments.rounds
    names = [f"replica-{i}" for i in range(replicas)]
    ratios: dict[str, list[float]] = {side: [] for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    imbalances: list[float] = []
    metrics: dict[str, float] = {}
    async with engines(folder, [*names, "joining"]) as pool:
        serving = {name: pool[name] for name in names}
        for round_ in range(rounds):
            for side in SIDES:
                before = await prefilled(pool)
                label = f"{side}-{round_}"
                if side == "router":
                    router = await routed(folder, serving)
                    turns = await agents(router.generate, count, sizes, label)
                    imbalances.append((await router.stats())["imbalance"])
                    await router.close()
                else:
                    plain = Plain(list(serving.values()), side)
                    turns = await agents(plain.generate, count, sizes, label)
                ratios[side].append((await prefilled(pool) - before) / turns.new)
                seconds[side] += turns.seconds
                print(f"round {round_ + 1} {side}: {ratios[side][-1]:.2f} prefilled per new token")
        router = await routed(folder, serving)
        before, moved = await prefilled(pool), 0

        async def join_and_leave() -> None:
            await asyncio.sleep(0.3)
            router.add("joining", keep(pool["joining"]))
            await router.ready(replicas + 1)
            await asyncio.sleep(0.3)
            await router.remove(names[0], grace_s=60.0)

        turns = await agents(router.generate, count, sizes, "churn", join_and_leave)
        moved = router.moved
        metrics["prefill_per_new_token_join_leave"] = (await prefilled(pool) - before) / turns.new
        metrics["turn_p99_ms_join_leave"] = 1e3 * float(np.quantile(turns.seconds, 0.99))
        metrics["moved_share_join_leave"] = moved / count
        metrics["moved_share_needed"] = 1 / replicas
        metrics["imbalance_join_leave"] = (await router.stats())["imbalance"]
        await router.close()
    for side in SIDES:
        suffix = "" if side == "router" else f"_{side}"
        metrics[f"prefill_per_new_token{suffix}"] = statistics.median(ratios[side])
        metrics[f"turn_p50_ms_{side}"] = 1e3 * float(np.quantile(seconds[side], 0.5))
        metrics[f"turn_p99_ms_{side}"] = 1e3 * float(np.quantile(seconds[side], 0.99))
    metrics["imbalance"] = statistics.median(imbalances)
    return metrics


class Borrowed:
    """A replica that outlives the router it is lent to."""

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def close(self) -> None:
        """Give it back."""


def keep(engine: ProcessEngine) -> StartReplica:
    """Starts nothing: the engine is up."""

    async def start(checkpoint: str, version: int) -> EngineClient:
        return cast(EngineClient, Borrowed(engine))

    return start


async def routed(folder: str, serving: dict[str, ProcessEngine]) -> Router:
    """A router over replicas that are up."""
    router = Router(Weights(folder, 0))
    for name, engine in serving.items():
        router.add(name, keep(engine))
    await router.ready(len(serving))
    return router


def main() -> None:
    """Run it."""
    parser = new_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    for name, *_ in SIZES:
        parser.add_argument(f"--{name}", type=int)
    arguments = fill_sizes(parser.parse_args(), SIZES)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        max_positions=2048,
        tie_embeddings=True,
    )
    model = Decoder(config, dtype=torch.float32)
    model.init_weights(0)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, f"{folder}/model")
        metrics = asyncio.run(measure(f"{folder}/model", arguments))
    notes = (
        f"{arguments.replicas} replicas share {len(available_cores())} cores, so latencies are "
        "those of a crowded machine; sides took turns over the same processes"
    )
    print_report("routing", arguments, metrics, notes)


if __name__ == "__main__":
    main()
