"""Everything that makes rollouts possible, started and stopped together.

The engine's process, the gateway and the runner, wired as a recipe says, around the task services
of `task_services.py`. Used by runs, benchmarks and tests; it knows nothing of stages or training.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.cluster.local import LocalCluster, available_cores
from headrace.cluster.types import Cluster
from headrace.engine.sampling import constrained
from headrace.engine.types import PolicyEngine
from headrace.engines import NamedModel, Placement, open_models, open_policy
from headrace.errors import UserError
from headrace.gateway.context import ContextPolicy
from headrace.gateway.gateway import Gateway
from headrace.gateway.history import ignore_lines
from headrace.gateway.server import GatewayServer
from headrace.http.server import ConnectionLimits
from headrace.recipe import AgenticRlStage, Recipe
from headrace.recipe.tables import GatewayTable
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.replicas.router import Router
from headrace.rollout.runner import RolloutRunner
from headrace.rollout.types import SessionLimits
from headrace.tasks.types import TaskService
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.thinking import Thinking, ThinkingMode, request_renderer


def placement(recipe: Recipe) -> Placement:
    """Cores as the recipe says, else halves of what this process may use.

    Raises:
        UserError: a named core is not available, or the engine has too few to divide.
    """
    cores = available_cores()
    half = max(1, len(cores) // 2)
    engine = recipe.cluster.engine_cores or cores[:half]
    trainer = recipe.cluster.trainer_cores or cores[half:] or cores
    # Models share the engine's cores unless they have some of their own.
    models = {name: table.cores or tuple(engine) for name, table in recipe.models.items()}
    for field, named in (
        ("cluster.engine_cores", engine),
        ("cluster.trainer_cores", trainer),
        *((f"models.{name}.cores", own) for name, own in models.items()),
    ):
        missing = sorted(set(named) - set(cores))
        if missing:
            raise UserError(
                f"{field}: core {missing[0]} is not available here; "
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
    return Placement(
        engine=tuple(engine[:sampling]),
        trainer=tuple(trainer),
        all=cores,
        prefill=tuple(engine[sampling:]),
        replicas=recipe.engine.replicas,
        models=models,
    )


class System:
    """A running engine behind a running gateway. Made by `open_system`."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cores: Placement,
        engine: PolicyEngine,
        models: Mapping[str, NamedModel],
        server: GatewayServer,
        runner: RolloutRunner,
        renderer: ChatRenderer,
    ) -> None:
        self.cluster = cluster
        self.cores = cores
        self.engine = engine
        self.models = models
        """Those beside it, by name."""
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
    report: Callable[[str], None] | None = None,
) -> AsyncIterator[System]:
    """Start engines and gateway over `checkpoint`, stamped `version`.

    Args:
        report: told, in words for people, when a replica fails and when it is back.

    Raises:
        UserError: a checkpoint or its tokenizer cannot be used, or the port is taken.
    """
    cores = placement(recipe)
    renderer = create_renderer(recipe.model.renderer, checkpoint)
    async with contextlib.AsyncExitStack() as stack:
        models = await stack.enter_async_context(
            open_models(recipe, cores, cluster=cluster, log_dir=log_dir)
        )
        engine = await stack.enter_async_context(
            open_policy(
                recipe,
                cores,
                cluster=cluster,
                checkpoint=checkpoint,
                version=version,
                log_dir=log_dir,
                report=report,
            )
        )
        yield await _serve(
            stack,
            recipe,
            cores,
            engine,
            models,
            renderer,
            cluster=cluster,
            tasks=tasks,
            ledger=ledger,
        )


def most_requests(recipe: Recipe) -> int:
    """Requests that the gateway has to take at once: twice as many as there are rollouts, as an
    agent may make several, and never fewer than 1024."""
    rollouts = [s.concurrency for s in recipe.stages if isinstance(s, AgenticRlStage)]
    if recipe.evaluation is not None:
        rollouts.append(recipe.evaluation.concurrency)
    return max(1024, 2 * max(rollouts, default=0))


@contextlib.asynccontextmanager
async def open_side_system(
    recipe: Recipe,
    system: System,
    *,
    cores: tuple[int, ...],
    concurrency: int,
    checkpoint: Path,
    version: int,
    tasks: Mapping[str, TaskService],
    ledger: Ledger,
    log_dir: Path,
) -> AsyncIterator[System]:
    """A second engine of the model that learns, with weights of its own, behind its own gateway.

    Models beside it are those of `system`. Calls are recorded as the other's are.

    Args:
        recipe: sizes of the engine, and limits of rollouts.
        system: runs already.
        cores: of the engine.
        concurrency: requests it decodes together.
        checkpoint, version: its first weights and their stamp.
        tasks: task services by name.
        ledger: where calls go.
        log_dir: of its log.

    Raises:
        UserError: the checkpoint cannot be used.
    """
    placed = msgspec.structs.replace(system.cores, engine=cores, prefill=(), replicas=1)
    table = recipe.engine.model_copy(
        update={"max_running": min(concurrency, recipe.engine.max_running), "cache_tokens": 0}
    )
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            open_policy(
                recipe.model_copy(update={"engine": table}),
                placed,
                cluster=system.cluster,
                checkpoint=checkpoint,
                version=version,
                log_dir=log_dir,
                name="evaluation",
            )
        )
        yield await _serve(
            stack,
            recipe.model_copy(update={"gateway": recipe.gateway.model_copy(update={"port": 0})}),
            placed,
            engine,
            system.models,
            system.renderer,
            cluster=system.cluster,
            tasks=tasks,
            ledger=ledger,
        )


async def _serve(
    stack: contextlib.AsyncExitStack,
    recipe: Recipe,
    cores: Placement,
    engine: PolicyEngine,
    models: Mapping[str, NamedModel],
    renderer: ChatRenderer,
    *,
    cluster: Cluster,
    tasks: Mapping[str, TaskService],
    ledger: Ledger,
) -> System:
    """A gateway in front of engines, until `stack` is left."""
    gateway = Gateway(
        engine,
        renderer,
        model=recipe.name,
        models={name: (model.engine, model.renderer) for name, model in models.items()},
        on_call=ledger.record_call,
        on_close=engine.release if isinstance(engine, Router) else None,
        request_timeout_s=recipe.rollout.timeout_s,
        default_max_tokens=recipe.rollout.max_tokens,
        max_running=most_requests(recipe),
        constrained=constrained.installed(),
        **_gateway_options(recipe.gateway, renderer),
    )
    server = await GatewayServer.start(
        gateway,
        host=recipe.gateway.host,
        port=recipe.gateway.port,
        address=recipe.gateway.address,
        limits=ConnectionLimits(connections=most_requests(recipe)),
    )
    stack.push_async_callback(server.stop)
    runner = RolloutRunner(
        tasks=tasks,
        gate=gateway,
        ledger=ledger,
        base_url=server.base_url,
        model=recipe.name,
        models=tuple(models),
        limits=SessionLimits(**recipe.session.model_dump()),
        max_tokens=recipe.rollout.max_tokens,
        max_turns=recipe.rollout.max_turns,
        timeout_s=recipe.rollout.timeout_s,
    )
    return System(
        cluster=cluster,
        cores=cores,
        engine=engine,
        models=models,
        server=server,
        runner=runner,
        renderer=renderer,
    )


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
