"""A thousand rollouts alive at once on a two-core machine: memory, punctuality, fairness.

Three tasks of different speed share one stage in fixed ratios. Real are the orchestrator, its task
ratios, the runner, the ledger (SQLite on disk), the gateway with its HTTP server, sessions and
renderer, and agents that talk to it as the product's own do, over loopback, all in one process and
event loop, as in a run. Not real are the tools, which sleep for log-normally distributed times; the
engine, which answers with the same few tokens after `--engine-ms`; rewards, dealt out so that every
group has signal; and the trainer, which takes each batch at once.

A stretch of `--seconds` is measured `--settle` seconds after all slots were first taken; in full
that is enough for the slowest rollouts, with `--quick` it is not. `alive` is the least number of
unfinished rollouts seen in it, `alive_max` the largest. `ratio_error` is the largest distance of a
task's share of all *dispatched* groups from its ratio, `trained_ratio_error` the same of groups
that were handed to the trainer within the stretch: a slow task's come later, so the beginning would
say nothing. `kib_per_rollout` is the growth of resident memory from before the first of them, after
a few rollouts that load code, to its mean in the stretch, over the mean number alive;
`kib_per_finished` its growth within the stretch per finished rollout (what would add up over
night). `delay_p99_ms` is how late sleeps ended in the stretch. `busy` is the share of one core that
the process used: near 1, delays say that the machine is too slow for so many calls a second, or
busy with something else.
"""

import argparse
import asyncio
import itertools
import math
import os
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from headrace.engine.config import UpdatePolicy
from headrace.engine.types import GenerationRequest, GenerationResult, OnProgress
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.http.server import ConnectionLimits
from headrace.rollout.choosing.mixing import TaskMix, TaskShare
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import RolloutRunner
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import FinishReason, Outcome, Span
from headrace.stages.task_metrics import ratio_errors
from headrace.tasks.conversation import ClientPool
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.training import train_tokenizer
from report import fill_sizes, new_parser, print_report

STAGE = "rl"
GROUP = 8
RATIOS = {"quick": 0.5, "middling": 0.3, "slow": 0.2}
SPEEDS = {"quick": 0.6, "middling": 1.0, "slow": 1.6}
"""Time that a task's tools take, relative to `--median`."""
SIZES = [("seconds", 12.0, 240.0), ("settle", 10.0, 90.0), ("median", 16.0, 10.0), ("calls", 2, 4)]
SIGMA = 0.5
WARM_S = 120.0
"""Most that the first rollouts, or the filling, may take."""
LOOK_S = 0.1


class SilentEngine:
    """Answers every request alike after some time."""

    weight_version = 1
    max_context = 4096

    def __init__(self, ids: tuple[int, ...], delay_s: float) -> None:
        self._spans = (Span(ids, (-0.5,) * len(ids), 1, "silent"),)
        self._delay_s = delay_s

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        await asyncio.sleep(self._delay_s)
        return GenerationResult(request.id, self._spans, FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        return

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        raise NotImplementedError("there are no weights")

    async def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        return


class Delays:
    """How late sleeps end."""

    def __init__(self) -> None:
        self.sleeping = 0
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Sleep, and note how much longer it took."""
        due = time.monotonic() + seconds
        self.sleeping += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.sleeping -= 1
        self.seconds.append(max(0.0, time.monotonic() - due))


class SleepingTask:
    """An agent of several calls whose tool sleeps in between."""

    def __init__(self, name: str, median_s: float, calls: int, delays: Delays) -> None:
        self.name = name
        self.pool = ClientPool(retries=2)
        self._median_s = median_s
        self._calls = calls
        self._delays = delays
        self._attempts = itertools.count()

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, "sleeping", 1, self._calls)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return f"{self.name} {instance.seed}"

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        attempt = next(self._attempts)
        draw = random.Random(f"{self.name} {instance.seed} {attempt}")
        client = self.pool.get(endpoint.base_url)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Use the tool, then answer."},
            {"role": "user", "content": f"Item {instance.seed}: what is in the log?"},
        ]
        for call in range(self._calls):
            message = await client.complete(endpoint, messages)
            messages.append({"role": "assistant", "content": message.content or ""})
            if call + 1 < self._calls:
                await self._delays.sleep(draw.lognormvariate(math.log(self._median_s), SIGMA))
                lines = "\n".join(f"{draw.randrange(10**6)} ok" for _ in range(20))
                messages.append({"role": "user", "content": lines})
        # Every second rollout succeeds, so every group has signal.
        return RolloutResult(Outcome.OK, {"reward": float(attempt % 2)})


class Look(NamedTuple):
    """One look at the run."""

    alive: int
    sleeping: int
    rss_kib: float


def resident_kib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1024


class Bench:
    """The source of rollouts, its consumer, and who looks at them.

    Args:
        arguments: see `parse`.
        source: running.
        ledger: its record.
        delays: of its tasks.
    """

    def __init__(
        self, arguments: argparse.Namespace, source: RolloutSource, ledger: Ledger, delays: Delays
    ) -> None:
        self.arguments = arguments
        self.source = source
        self.ledger = ledger
        self.delays = delays
        self.trained: Counter[str] = Counter()
        self.filled_s = 0.0
        source.start()
        self._training = asyncio.create_task(self._train())

    async def stop(self) -> None:
        """End everything."""
        self._training.cancel()
        await asyncio.gather(self._training, return_exceptions=True)
        await self.source.stop()

    async def _pause(self) -> None:
        """Until the next look."""
        await asyncio.wait({self._training}, timeout=LOOK_S)
        if self._training.done():
            self._training.result()

    async def _train(self) -> None:
        """Take every batch at once, as a trainer that costs nothing."""
        for step in itertools.count(1):
            batch = await self.source.cut(1, 600.0)
            assert batch is not None
            self.trained.update(batch.tasks)
            self.ledger.commit_batch(STAGE, batch.index, step)

    async def fill(self) -> None:
        """Until every slot is taken, and `settle` seconds more.

        Raises:
            TimeoutError: it takes too long.
        """
        wanted = self.arguments.concurrency - 2 * GROUP
        begun = time.monotonic()
        while self.source.in_flight < wanted:
            if time.monotonic() - begun > WARM_S:
                raise TimeoutError(f"only {self.source.in_flight} of {wanted} rollouts alive")
            await self._pause()
        self.filled_s = time.monotonic() - begun
        while time.monotonic() - begun < self.filled_s + self.arguments.settle:
            await self._pause()

    async def look(self) -> list[Look]:
        """Look at everything for a while."""
        looks = []
        until = time.monotonic() + self.arguments.seconds
        while time.monotonic() < until:
            looks.append(Look(self.source.in_flight, self.delays.sleeping, resident_kib()))
            await self._pause()
        return looks


class Served(NamedTuple):
    """What rollouts run on."""

    server: GatewayServer
    ledger: Ledger
    arguments: argparse.Namespace

    def source(self, stage: str, concurrency: int, tasks: dict[str, SleepingTask]) -> RolloutSource:
        """A source of rollouts of these tasks, in `RATIOS`."""
        runner = RolloutRunner(
            tasks=tasks,
            gate=self.server.gateway,
            ledger=self.ledger,
            base_url=self.server.base_url,
            model="silent",
            max_tokens=32,
            max_turns=self.arguments.calls,
            timeout_s=600.0,
        )
        mix = TaskMix([TaskShare(n, RATIOS[n], task.instance) for n, task in tasks.items()])
        config = SourceConfig(
            stage=stage,
            group_size=GROUP,
            groups_per_batch=4,
            concurrency=concurrency,
            staleness=0,
            temperature=1.0,
            max_tokens=4096,
        )
        self.ledger.stage_started(stage)
        return RolloutSource(config, runner=runner, ledger=self.ledger, mix=mix)


def tasks_of(arguments: argparse.Namespace, median_s: float, delays: Delays) -> dict[str, Any]:
    """The three tasks, by name."""
    return {
        name: SleepingTask(name, median_s * speed, arguments.calls, delays)
        for name, speed in SPEEDS.items()
    }


async def warm_up(served: Served) -> None:
    """A few rollouts whose tools hardly sleep, to load code."""
    tasks = tasks_of(served.arguments, 0.01, Delays())
    source = served.source("warm", 8 * GROUP, tasks)
    source.start()
    for step in range(1, 9):
        batch = await source.cut(1, WARM_S)
        if batch is None:
            raise TimeoutError("the first rollouts do not end")
        served.ledger.commit_batch("warm", batch.index, step)
    await source.stop()
    for task in tasks.values():
        await task.pool.close()


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """All metrics."""
    texts = [f"Item {i}: what is in the log? Use the tool, then answer. ok" for i in range(500)]
    renderer = CompactRenderer(train_tokenizer(texts, 512))
    ids = (*renderer.tokenizer.encode("look at item 12 of the log"), renderer.stop_ids[0])
    engine = SilentEngine(ids, arguments.engine_ms / 1e3)
    with Ledger.create(folder) as ledger:
        gateway = Gateway(
            engine,
            renderer,
            model="silent",
            on_call=ledger.record_call,
            max_running=2 * arguments.concurrency,
        )
        server = await GatewayServer.start(
            gateway, limits=ConnectionLimits(connections=2 * arguments.concurrency)
        )
        try:
            served = Served(server, ledger, arguments)
            await warm_up(served)
            return await measure_served(served)
        finally:
            await server.stop()


async def measure_served(served: Served) -> dict[str, float]:
    """All metrics of a stage on a gateway that is warm."""
    arguments, delays = served.arguments, Delays()
    before_kib = resident_kib()
    tasks = tasks_of(arguments, arguments.median, delays)
    source = served.source(STAGE, arguments.concurrency, tasks)
    bench = Bench(arguments, source, served.ledger, delays)
    try:
        await bench.fill()
        delays.seconds, bench.trained = [], Counter()
        source.take_window()
        calls, cpu = served.server.gateway.counters["calls"], time.process_time()
        started = time.monotonic()
        looks = await bench.look()
        seconds = time.monotonic() - started
        if not delays.seconds:
            raise TimeoutError("no tool came back within the stretch; give more --seconds")
        window = source.take_window()
        found = {
            **shape(looks, before_kib, window.finished),
            **ratio_errors(source.sharing.mix),
            **shares("trained", bench.trained),
            "delay_p50_ms": 1e3 * float(np.quantile(delays.seconds, 0.5)),
            "delay_p99_ms": 1e3 * float(np.quantile(delays.seconds, 0.99)),
            "delay_max_ms": 1e3 * max(delays.seconds),
            "filling_s": bench.filled_s,
            "rollouts_per_s": window.finished / seconds,
            "calls_per_s": (served.server.gateway.counters["calls"] - calls) / seconds,
            "busy": (time.process_time() - cpu) / seconds,
            "failed": float(window.env_failed),
            "descriptors": float(len(os.listdir("/proc/self/fd"))),
        }
        for name in RATIOS:
            found[f"rollouts_per_s_{name}"] = window.of(name).finished / seconds
        return found
    finally:
        await bench.stop()
        for task in tasks.values():
            await task.pool.close()


def shape(looks: list[Look], before_kib: float, finished: int) -> dict[str, float]:
    """How many were alive, and the memory they took."""
    alive = [look.alive for look in looks]
    rss = [look.rss_kib for look in looks]
    part = max(1, len(rss) // 4)
    grown = float(np.mean(rss[-part:]) - np.mean(rss[:part]))
    # The mean of the last quarter is three quarters of the stretch behind that of the first.
    return {
        "alive": float(min(alive)),
        "alive_mean": float(np.mean(alive)),
        "alive_max": float(max(alive)),
        "sleeping_mean": float(np.mean([look.sleeping for look in looks])),
        "kib_per_rollout": (float(np.mean(rss)) - before_kib) / float(np.mean(alive)),
        "kib_per_finished": grown / max(1.0, 0.75 * finished),
        "rss_mib": max(rss) / 1024,
    }


def shares(name: str, groups: Counter[str]) -> dict[str, float]:
    """Largest distance of a task's share of these groups from its ratio, and how many they are."""
    total = max(1, groups.total())
    error = max(abs(groups[task] / total - ratio) for task, ratio in RATIOS.items())
    return {f"{name}_ratio_error": error, f"{name}_groups": float(total)}


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--concurrency", type=int, default=1100, help="rollouts in flight")
    parser.add_argument("--engine-ms", type=float, default=50.0, help="an answer takes so long")
    for name, _, full in SIZES:
        parser.add_argument(f"--{name}", type=type(full))
    return fill_sizes(parser.parse_args(), SIZES)


def main() -> None:
    """Run it."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        metrics = uvloop.run(measure(arguments, Path(folder)))
    notes = (
        "real: orchestrator, runner, ledger, gateway and agents over HTTP; not real: tools "
        "(log-normal sleeps), engine (one answer after a fixed time), rewards, trainer"
    )
    print_report("concurrent_rollouts", arguments, metrics, notes, ratios=RATIOS, speeds=SPEEDS)


if __name__ == "__main__":
    main()
