"""Asynchronous against synchronous RL with real models on one workload with long-tailed latencies.

Everything is real but the task: engine, gateway, ledger and trainer do their work, while the "tool"
of the task only waits for a log-normally distributed time, the same stream of times in both modes.
Rewards are dealt out so that every group has signal, so both modes train equally many trajectories.
The modes run one after the other in this process tree, on the same cores.

`bound_fraction` is the time the busier side (engine or trainer) spent working in async mode divided
by async mode's wall clock: 1.0 means that the busier side never waited.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from headrace.cluster.local import LocalCluster
from headrace.recipe import AgenticRlStage, Recipe
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import Outcome
from headrace.stages.agentic_rl import run_agentic_rl
from headrace.stages.context import StageContext, next_version
from headrace.stages.new_model import create_checkpoint
from headrace.system import open_system
from headrace.tasks.conversation import ClientPool
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from headrace.tokens.training import train_tokenizer

TURNS = 3


class WaitingTask:
    """Talks to the model for a few turns and waits in between, as a slow tool would make it."""

    name = "waiting"

    def __init__(self, median_s: float, sigma: float) -> None:
        self.median_s = median_s
        self.sigma = sigma
        self.pool = ClientPool(retries=2)
        self.attempts: dict[int, itertools.count[int]] = {}

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, "waiting", 1, TURNS)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return str(instance.seed)

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        attempt = next(self.attempts.setdefault(instance.seed, itertools.count()))
        rng = random.Random(f"{instance.seed} {attempt}")
        client = self.pool.get(endpoint.base_url)
        messages: list[Any] = [{"role": "user", "content": f"item {instance.seed}"}]
        for turn in range(TURNS):
            content = (await client.complete(endpoint, messages)).content or ""
            messages.append({"role": "assistant", "content": content})
            if turn + 1 < TURNS:
                await asyncio.sleep(rng.lognormvariate(math.log(self.median_s), self.sigma))
                messages.append({"role": "user", "content": f"result {rng.randrange(100)}"})
        # Half of each group succeeds: signal without a model that has to be good at anything.
        return RolloutResult(Outcome.OK, {"reward": float(attempt % 2)})


def recipe_of(arguments: argparse.Namespace, mode: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": f"waiting-{mode}",
            "model": {
                "init": {
                    "hidden_size": arguments.hidden,
                    "intermediate_size": arguments.hidden * 2,
                    "num_layers": 4,
                    "num_heads": 4,
                    "num_kv_heads": 4,
                    "max_positions": 512,
                },
                "renderer": "compact",
            },
            "tokenizer": {"vocab_size": 320},
            "engine": {"max_running": 64, "max_context": 512},
            "rollout": {"max_tokens": arguments.max_tokens, "timeout_s": 120},
            "evaluation": {"task": "waiting"},
            "stages": [
                {
                    "kind": "agentic_rl",
                    "name": "rl",
                    "task": "waiting",
                    "mode": mode,
                    "updates": arguments.updates,
                    "group_size": 8,
                    "groups_per_batch": arguments.groups,
                    "concurrency": arguments.concurrency,
                    "staleness": 8,
                    "learning_rate": 1e-5,
                }
            ],
        }
    )


async def create_model(arguments: argparse.Namespace, folder: Path) -> Path:
    """A checkpoint with random weights that both modes start from."""
    tokenizer = train_tokenizer(["item result 0 1 2 3 4 5 6 7 8 9"] * 20, 320)
    tokenizer.save(folder / "tokenizer")
    cluster = LocalCluster()
    try:
        await create_checkpoint(
            cluster,
            recipe_of(arguments, "sync").model,
            tokenizer,
            folder / "tokenizer",
            folder / "start",
            seed=0,
            run_dir=folder,
        )
    finally:
        await cluster.close()
    return folder / "start"


async def measure(
    arguments: argparse.Namespace, mode: str, start: Path, folder: Path
) -> dict[str, float]:
    """Run one mode; returns wall clock, busy times and trained trajectories."""
    recipe = recipe_of(arguments, mode)
    stage = recipe.stages[0]
    assert isinstance(stage, AgenticRlStage)
    task = WaitingTask(arguments.median, arguments.sigma)
    cluster = LocalCluster()
    rows: list[tuple[float, dict[str, float]]] = []
    with Ledger.create(folder) as ledger:
        try:
            ledger.stage_started(stage.name)
            async with open_system(
                recipe,
                cluster=cluster,
                checkpoint=start,
                version=next_version(ledger),
                tasks={task.name: task},
                ledger=ledger,
                log_dir=folder / "logs",
            ) as system:
                before = await system.engine.stats()
                context = StageContext(
                    recipe=recipe,
                    run_dir=folder,
                    ledger=ledger,
                    cluster=cluster,
                    cores=system.cores,
                    system=system,
                    tasks={task.name: task},
                    log=lambda _stage, _step, row: rows.append((time.time(), row)),
                    progress=lambda _: None,
                    message=lambda _: None,
                )
                await run_agentic_rl(context, stage, start, folder / "end")
                after = await system.engine.stats()
            dispatched = min(s.dispatched_at for s in ledger.sessions(stage=stage.name))
            wall = rows[-1][0] - dispatched
            return {
                "wall_s": wall,
                "engine_busy_s": float(after["busy_s"] - before["busy_s"]),
                "trainer_busy_s": sum(r["trainer_busy"] * r["step_s"] for _, r in rows),
                "trajectories": sum(r["trained_trajectories"] for _, r in rows),
                "lag_mean": sum(r["lag_mean"] for _, r in rows) / len(rows),
            }
        finally:
            await task.pool.close()
            await cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="fewer updates, ends within 50 s")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 per update")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--median", type=float, default=0.4, help="tool latency, seconds")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the latency's logarithm")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.updates, arguments.median = 3, 0.25
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        (root / "logs").mkdir()
        start = uvloop.run(create_model(arguments, root))
        for mode in ("sync", "async"):
            (root / mode / "logs").mkdir(parents=True)
            results[mode] = uvloop.run(measure(arguments, mode, start, root / mode))
            if not arguments.json:
                print(mode, {k: round(v, 2) for k, v in results[mode].items()}, flush=True)
    sync, asynchronous = results["sync"], results["async"]
    per_trajectory = {m: r["wall_s"] / r["trajectories"] for m, r in results.items()}
    bound = max(asynchronous["engine_busy_s"], asynchronous["trainer_busy_s"])
    metrics = {
        "speedup": per_trajectory["sync"] / per_trajectory["async"],
        "bound_fraction": bound / asynchronous["wall_s"],
        "sync_wall_s": sync["wall_s"],
        "async_wall_s": asynchronous["wall_s"],
        "bound_s": bound,
        "trajectories": asynchronous["trajectories"],
        "sync_engine_utilisation": sync["engine_busy_s"] / sync["wall_s"],
        "sync_trainer_utilisation": sync["trainer_busy_s"] / sync["wall_s"],
        "async_engine_utilisation": asynchronous["engine_busy_s"] / asynchronous["wall_s"],
        "async_trainer_utilisation": asynchronous["trainer_busy_s"] / asynchronous["wall_s"],
        "async_lag_mean": asynchronous["lag_mean"],
    }
    result = {
        "name": "async_real_models",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "config": {k: v for k, v in vars(arguments).items() if k != "json"},
        "metrics": metrics,
        "notes": "tool latency log-normal, same stream in both modes; wall clock per trained "
        "trajectory, from the first dispatch to the last update",
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in metrics.items():
            print(f"{name:28s} {value:.3f}")


if __name__ == "__main__":
    main()
