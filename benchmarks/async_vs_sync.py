"""Asynchronous against synchronous RL while the tail of tool latencies grows.

Engine, trainer and tools are timed waits of stated capacity (`simulated_rl`), everything between
them is the product: stage, loop, orchestrator, runner, ledger on disk, publication. Tool latencies
are log-normal; sigma of their logarithm grows and their mean stays, so only the tail grows. Turns
are log-normal, too. The shape is that of terminal agents at a hundredth of the time: turns of 5 s
of sampling and tools of 10 s on average (here 50 and 100 ms), updates of 110 s, weights
handed out in 0.5 s and loaded in 1.5 s.

Both modes train on batches of the same size from the same stream of rollouts. Their runs alternate,
`--processes` at a time, as many as there are cores: a run that waits for its core would measure the
others. Wall is from the begin of the stage to the end of an update and what the loop does after it
(publication, report).

`speedup_sigma_S`: wall of sync over wall of async for the same number of updates, which is all that
sync makes; async goes on, as its start-up is long beside a few updates.
`speedup_after_start_sigma_S`: the same ratio per update, without the first update of either.
Bound: no schedule is faster than max(generation time, training time). Generation time is that of
the TRAINED tokens with every slot of the engine taken all the time; training time is that of the
updates at the trainer's rate. Not in it, and so against us: start-up, saving and loading weights,
rollouts that were dropped as stale or were unfinished at the end, timers that wake late.
`bound_fraction_sigma_S`: bound over wall, of all updates of async.
`bound_fraction_after_start_sigma_S`: the same without the first update, whose wall is start-up; it
matters only where training is the bound, as the engine has worked for later updates by then.
`*_utilisation_*`: work done, dropped work included, over wall.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from headrace.recipe import AgenticRlStage, Recipe
from headrace.rollout.record.ledger import Ledger
from headrace.stages.agentic_rl import run_agentic_rl
from headrace.stages.context import StageContext
from report import fill_sizes, new_parser, print_report
from simulated_rl import TASK, Rates, simulate
from worker_pool import worker_pool

SIGMAS = (0.0, 0.5, 1.0, 1.5)
MODES = ("sync", "async")
GROUP_SIZE = 8


class Job(NamedTuple):
    """One run."""

    mode: str
    rates: Rates
    updates: int
    groups: int
    concurrency: int
    staleness: int


class Measured(msgspec.Struct, frozen=True):
    """What one run came to; seconds.

    Attributes:
        ends: wall when each update was over, see the module.
        engine_s: work done by the engine, in seconds of the whole engine.
        trained: tokens of each update.
        stale: trajectories dropped as stale.
        lag: mean lag of a trajectory's oldest token.
        waited_s: for batches.
        published_s: the loop spent in publications.
    """

    ends: tuple[float, ...]
    engine_s: float
    trained: tuple[int, ...]
    stale: float
    lag: float
    waited_s: float
    published_s: float

    @property
    def wall_s(self) -> float:
        """Of all updates."""
        return self.ends[-1]

    @property
    def after_start_s(self) -> float:
        """Of all updates but the first."""
        return self.ends[-1] - self.ends[0]

    @property
    def update_s(self) -> float:
        """Mean of an update but the first."""
        return self.after_start_s / (len(self.ends) - 1)


def recipe_of(job: Job) -> Recipe:
    """The recipe of one run."""
    return Recipe.model_validate(
        {
            "name": f"simulated-{job.mode}",
            "model": {"path": "unused"},
            "engine": {"weight_transport": "disk"},
            "evaluation": {"task": TASK, "instances": 1},
            "stages": [
                {
                    "kind": "agentic_rl",
                    "name": "rl",
                    "task": TASK,
                    "mode": job.mode,
                    "updates": job.updates,
                    "group_size": GROUP_SIZE,
                    "groups_per_batch": job.groups,
                    "concurrency": job.concurrency,
                    "staleness": job.staleness,
                    # Tails are heavy here: more in stock, as the trainer must never wait.
                    "ready_batches": 4,
                }
            ],
        }
    )


def run(job: Job) -> Measured:
    """Make one run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        return uvloop.run(measure(job, Path(folder)))


async def measure(job: Job, folder: Path) -> Measured:
    """Make one run in `folder`."""
    recipe = recipe_of(job)
    stage = recipe.stages[0]
    assert isinstance(stage, AgenticRlStage)
    rows: list[tuple[float, dict[str, float]]] = []
    with Ledger.create(folder) as ledger:
        ledger.stage_started(stage.name)
        simulation = simulate(job.rates, ledger)
        context = StageContext(
            recipe=recipe,
            run_dir=folder,
            ledger=ledger,
            cluster=simulation.cluster,
            cores=simulation.system.cores,
            system=simulation.system,
            tasks={TASK: simulation.task},
            log=lambda _stage, _step, row: rows.append((time.monotonic(), row)),
            progress=lambda _: None,
            message=lambda _: None,
        )
        begun = time.monotonic()
        await run_agentic_rl(context, stage, folder / "start", folder / "end")
        return Measured(
            ends=tuple(at - begun for at, _ in rows),
            engine_s=simulation.engine.busy_s,
            trained=tuple(tokens for _, _, tokens in simulation.trainer.updates),
            stale=sum(row["dropped_stale"] for _, row in rows),
            lag=sum(row["oldest_lag_mean"] for _, row in rows) / len(rows),
            waited_s=sum(row["wait_s"] for _, row in rows),
            published_s=sum(row["publish_s"] for _, row in rows),
        )


def bound_s(rates: Rates, trained: tuple[int, ...]) -> float:
    """No schedule makes these updates in less."""
    tokens = sum(trained)
    return max(rates.generation_s(tokens), rates.training_s(tokens))


def summarise(found: dict[tuple[float, str], tuple[Rates, Measured]]) -> dict[str, float]:
    """Flat metrics of all runs, by (sigma, mode)."""
    metrics: dict[str, float] = {}
    for sigma in SIGMAS:
        name = f"sigma_{sigma:g}".replace(".", "_")
        (rates, sync), (_, fast) = found[sigma, "sync"], found[sigma, "async"]
        metrics[f"speedup_{name}"] = sync.wall_s / fast.ends[len(sync.ends) - 1]
        metrics[f"speedup_after_start_{name}"] = sync.update_s / fast.update_s
        metrics[f"bound_fraction_{name}"] = bound_s(rates, fast.trained) / fast.wall_s
        metrics[f"bound_fraction_after_start_{name}"] = (
            bound_s(rates, fast.trained[1:]) / fast.after_start_s
        )
        for mode, one in (("sync", sync), ("async", fast)):
            tokens = sum(one.trained)
            metrics |= {
                f"{mode}_wall_s_{name}": one.wall_s,
                f"{mode}_engine_utilisation_{name}": one.engine_s / one.wall_s,
                f"{mode}_trainer_utilisation_{name}": rates.training_s(tokens) / one.wall_s,
                f"{mode}_generation_s_{name}": rates.generation_s(tokens),
                f"{mode}_training_s_{name}": rates.training_s(tokens),
                f"{mode}_waited_s_{name}": one.waited_s,
                f"{mode}_published_s_{name}": one.published_s,
                f"{mode}_stale_{name}": one.stale,
                f"{mode}_lag_{name}": one.lag,
            }
    for key in ("bound_fraction", "bound_fraction_after_start"):
        metrics[f"{key}_min"] = min(metrics[f"{key}_sigma_{s:g}".replace(".", "_")] for s in SIGMAS)
    return metrics


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags, with sizes filled in."""
    parser = new_parser(__doc__)
    parser.add_argument("--updates", type=int, help="of async")
    parser.add_argument("--sync-updates", type=int, help="of sync, at most as many, 2 or more")
    parser.add_argument("--groups", type=int, default=8, help=f"groups of {GROUP_SIZE} per update")
    parser.add_argument("--concurrency", type=int, default=96, help="rollouts in flight (async)")
    parser.add_argument("--staleness", type=int, default=8, help="largest lag that trains")
    parser.add_argument("--slots", type=int, default=28, help="calls the engine decodes at once")
    parser.add_argument("--token-s", type=float, default=0.003125, help="seconds per token")
    parser.add_argument("--tokens", type=int, default=16, help="mean tokens of a call")
    parser.add_argument("--update-tokens-per-s", type=float, default=7500.0)
    parser.add_argument("--save-s", type=float, default=0.005, help="trainer, per publication")
    parser.add_argument("--load-s", type=float, default=0.015, help="engine, per publication")
    parser.add_argument("--latency", type=float, default=0.1, help="mean of a tool's time, seconds")
    parser.add_argument("--turns", type=float, default=7.0, help="median of a rollout's turns")
    parser.add_argument("--turns-sigma", type=float, default=0.5)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=int, default=cores, help="runs at a time, of one core each"
    )
    found = fill_sizes(parser.parse_args(arguments), (("updates", 6, 240), ("sync_updates", 3, 24)))
    if not 2 <= found.sync_updates <= found.updates:
        parser.error(
            f"--sync-updates {found.sync_updates} has to be at least 2 and at most --updates "
            f"{found.updates}"
        )
    return found


def jobs_of(arguments: argparse.Namespace) -> list[tuple[float, Job]]:
    """All runs, modes alternating, the longest first."""
    jobs = []
    for sigma in reversed(SIGMAS):
        rates = Rates(
            slots=arguments.slots,
            token_s=arguments.token_s,
            update_tokens_per_s=arguments.update_tokens_per_s,
            save_s=arguments.save_s,
            load_s=arguments.load_s,
            latency_s=arguments.latency,
            sigma=sigma,
            turns=arguments.turns,
            turns_sigma=arguments.turns_sigma,
            tokens=arguments.tokens,
        )
        for mode in MODES:
            job = Job(
                mode,
                rates,
                arguments.updates if mode == "async" else arguments.sync_updates,
                arguments.groups,
                arguments.concurrency,
                arguments.staleness,
            )
            jobs.append((sigma, job))
    return jobs


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    started = time.perf_counter()
    found: dict[tuple[float, str], tuple[Rates, Measured]] = {}
    jobs = jobs_of(arguments)
    with worker_pool(arguments.processes) as pool:
        measured = pool.map(run, [job for _, job in jobs])
        for (sigma, job), one in zip(jobs, measured, strict=True):
            found[sigma, job.mode] = (job.rates, one)
    print_report(
        "async_vs_sync",
        arguments,
        summarise(found) | {"wall_s": time.perf_counter() - started},
        "Engine, trainer and tools are timed waits; stage, loop, orchestrator, runner and ledger "
        "are real. The mean of tool latencies is the same at every sigma. Prompts cost nothing, "
        "and a slot decodes as fast alone as beside others.",
    )


if __name__ == "__main__":
    main()
