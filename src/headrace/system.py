"""Everything that makes rollouts possible, started and stopped together.

Sandboxes, task services, the engine's process, the gateway and the runner, wired as a recipe says.
Used by runs, benchmarks and tests; it knows nothing of stages or training.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.cluster.local import LocalCluster, available_cores
from headrace.cluster.types import Cluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.split import SplitEngine
from headrace.errors import UserError
from headrace.gateway.context import ContextPolicy
from headrace.gateway.gateway import Gateway
from headrace.gateway.history import ignore_lines
from headrace.gateway.server import GatewayServer
from headrace.recipe import Recipe
from headrace.recipe.tables import GatewayTable
from headrace.rollout.ledger import Ledger
from headrace.rollout.runner import RolloutRunner
from headrace.sandbox import open_provider
from headrace.sandbox.types import Limits, SandboxProvider
from headrace.tasks.registry import create_task
from headrace.tasks.types import TaskService
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.thinking import Thinking, ThinkingMode, request_renderer


class Placement(msgspec.Struct, frozen=True):
    """Which cores belong to whom. Engine and trainer never share one when there are two; `prefill`
    are those of an engine that only computes prompts, none if there is no such engine."""

    engine: tuple[int, ...]
    trainer: tuple[int, ...]
    all: tuple[int, ...]
    prefill: tuple[int, ...] = ()


def placement(recipe: Recipe) -> Placement:
    """Cores as the recipe says, else halves of what this process may use.

    Raises:
        UserError: a named core is not available, or the engine has too few to divide.
    """
    cores = available_cores()
    half = max(1, len(cores) // 2)
    engine = recipe.cluster.engine_cores or cores[:half]
    trainer = recipe.cluster.trainer_cores or cores[half:] or cores
    for field, named in (("engine_cores", engine), ("trainer_cores", trainer)):
        missing = sorted(set(named) - set(cores))
        if missing:
            raise UserError(
                f"cluster.{field}: core {missing[0]} is not available here; "
                f"available: {', '.join(map(str, cores))}"
            )
    prefill = recipe.engine.prefill_cores
    if prefill >= len(engine):
        raise UserError(
            f"engine.prefill_cores {prefill}: the engine has {len(engine)} in all "
            f"({', '.join(map(str, engine))}) and needs at least one to sample on; name more in "
            "cluster.engine_cores, or lower it (0: one engine for everything)"
        )
    sampling = len(engine) - prefill
    return Placement(tuple(engine[:sampling]), tuple(trainer), cores, tuple(engine[sampling:]))


@contextlib.asynccontextmanager
async def open_tasks(
    recipe: Recipe, names: set[str], *, no_isolation: bool
) -> AsyncIterator[tuple[SandboxProvider, dict[str, TaskService]]]:
    """Sandboxes and the named task services.

    Raises:
        UserError: unknown task or option, or no isolation on this machine.
    """
    box = recipe.sandbox
    limits = Limits(
        wall_s=box.wall_s,
        cpu_s=box.wall_s,
        processes=box.processes,
        memory_mb=box.memory_mb,
        output_bytes=box.output_bytes,
        disk_mb=box.disk_mb,
    )
    for name in names | set(recipe.tasks):
        create_task(name, recipe.tasks.get(name, {}), None)  # mistakes before anything starts
    kind = "none" if no_isolation and box.kind in ("auto", "none") else box.kind
    provider = open_provider(kind, limits)
    services = {name: create_task(name, recipe.tasks.get(name, {}), provider) for name in names}
    try:
        yield provider, services
    finally:
        for service in services.values():
            close = getattr(service, "close", None)
            if close is not None:
                await close()
        await provider.close()


class System:
    """A running engine behind a running gateway. Made by `open_system`."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cores: Placement,
        engine: ProcessEngine | SplitEngine,
        server: GatewayServer,
        runner: RolloutRunner,
        renderer: ChatRenderer,
    ) -> None:
        self.cluster = cluster
        self.cores = cores
        self.engine = engine
        self.server = server
        self.runner = runner
        self.renderer = renderer


@contextlib.asynccontextmanager
async def open_system(
    recipe: Recipe,
    *,
    cluster: LocalCluster,
    checkpoint: Path,
    version: int,
    tasks: Mapping[str, TaskService],
    ledger: Ledger,
    log_dir: Path,
) -> AsyncIterator[System]:
    """Start engine and gateway over `checkpoint`, stamped `version`.

    Raises:
        UserError: the checkpoint or its tokenizer cannot be used, or the port is taken.
    """
    cores = placement(recipe)
    renderer = create_renderer(recipe.model.renderer, checkpoint)
    engine = _new_engine(
        recipe, cores, cluster=cluster, checkpoint=checkpoint, version=version, log_dir=log_dir
    )
    try:
        await engine.start()
        gateway = Gateway(
            engine,
            renderer,
            model=recipe.name,
            on_call=ledger.record_call,
            request_timeout_s=recipe.rollout.timeout_s,
            default_max_tokens=recipe.rollout.max_tokens,
            **_gateway_options(recipe.gateway, renderer),
        )
        server = await GatewayServer.start(
            gateway, host=recipe.gateway.host, port=recipe.gateway.port
        )
        try:
            runner = RolloutRunner(
                tasks=tasks,
                gate=gateway,
                ledger=ledger,
                base_url=server.base_url,
                model=recipe.name,
                max_tokens=recipe.rollout.max_tokens,
                max_turns=recipe.rollout.max_turns,
                timeout_s=recipe.rollout.timeout_s,
            )
            yield System(
                cluster=cluster,
                cores=cores,
                engine=engine,
                server=server,
                runner=runner,
                renderer=renderer,
            )
        finally:
            await server.stop()
    finally:
        await engine.close()


def _new_engine(
    recipe: Recipe,
    cores: Placement,
    *,
    cluster: LocalCluster,
    checkpoint: Path,
    version: int,
    log_dir: Path,
) -> ProcessEngine | SplitEngine:
    """The engine that the recipe asks for, in one role or two; not started."""

    def of(engine_id: str, owned: tuple[int, ...], log: str) -> ProcessEngine:
        return ProcessEngine(
            cluster,
            EngineConfig(
                engine_id=engine_id,
                max_running=recipe.engine.max_running,
                cache_tokens=recipe.engine.cache_tokens,
                max_context=recipe.engine.max_context,
                max_waiting=recipe.engine.max_waiting,
                dtype=recipe.engine.dtype,
                weights=recipe.engine.weights,
                draft_tokens=recipe.engine.draft_tokens,
                decode_slowdown=recipe.engine.decode_slowdown,
                deterministic=recipe.engine.deterministic,
                seed=recipe.seed,
            ),
            checkpoint=str(checkpoint),
            version=version,
            cores=owned,
            threads=len(owned),
            log_path=str(log_dir / log),
        )

    sampling = of("engine-0", cores.engine, "engine.log")
    if not cores.prefill:
        return sampling
    return SplitEngine(of("prefill-0", cores.prefill, "prefill.log"), sampling)


def _gateway_options(table: GatewayTable, renderer: ChatRenderer) -> dict[str, Any]:
    """What a recipe asks of a gateway, as its arguments.

    Raises:
        UserError: the format of the model cannot think in this mode.
    """
    thinking = None if table.thinking == "template" else ThinkingMode(table.thinking)
    if thinking is not None:
        try:
            request_renderer(renderer, Thinking(thinking))
        except ValueError as error:
            raise UserError(f"gateway.{error}") from error
    context = None
    if table.keep_recent or table.discard_above:
        context = ContextPolicy(table.keep_recent or None, table.discard_above or None)
    return {
        "mode": table.mode,
        "thinking": thinking,
        "normaliser": ignore_lines(table.volatile) if table.volatile else None,
        "repairs": table.repairs,
        "context": context,
    }
