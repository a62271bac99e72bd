"""The engines that a recipe asks for: the one that learns, alone, in two roles or as replicas, and
the models beside it.

It knows recipes and processes, and nothing of gateways, tasks or training.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from headrace.cluster.types import Cluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.split import SplitEngine
from headrace.engine.types import EngineClient, EngineError, PolicyEngine
from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.recipe import NamedModelTable, Recipe
from headrace.rollout.replicas.health import HealthPolicy
from headrace.rollout.replicas.replica import Weights
from headrace.rollout.replicas.router import Router
from headrace.tokens.renderer import ChatRenderer, create_renderer

HEALTH = HealthPolicy(beat_timeout_s=10.0, stuck_s=120.0)
"""An engine answers between two steps, which take seconds when a long prompt meets few cores."""


class Placement(msgspec.Struct, frozen=True):
    """Which cores belong to whom. Engine and trainer never share one when there are two.

    Attributes:
        engine: of the engine, all its replicas together.
        trainer: of the trainer.
        all: that this process may use.
        prefill: of an engine that only computes prompts; none if there is no such engine.
        replicas: engines that divide `engine` among them.
        models: of further models, by name.
    """

    engine: tuple[int, ...]
    trainer: tuple[int, ...]
    all: tuple[int, ...]
    prefill: tuple[int, ...] = ()
    replicas: int = 1
    models: dict[str, tuple[int, ...]] = {}

    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Cores of each replica; with fewer cores than replicas, several have the same one."""
        return divide(self.engine, self.replicas)


def divide(cores: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring cores for each part, as evenly as can be; one core each, shared, if too few.

    | cores      | parts | shares               |
    |------------|-------|----------------------|
    | 0, 1, 2, 3 | 2     | (0, 1), (2, 3)       |
    | 0, 1, 2    | 2     | (0, 1), (2)          |
    | 0, 1       | 3     | (0), (1), (0)        |
    """
    if len(cores) < parts:
        return tuple((cores[i % len(cores)],) for i in range(parts))
    size, more = divmod(len(cores), parts)
    starts = [i * size + min(i, more) for i in range(parts + 1)]
    return tuple(cores[a:b] for a, b in itertools.pairwise(starts))


def engine_words(cores: Placement) -> str:
    """Where engines run, for people."""
    if cores.prefill:
        sampling, prompts = core_list(cores.engine), core_list(cores.prefill)
        return f"engine on cores {sampling}, prompts on cores {prompts}"
    if cores.replicas == 1:
        return f"engine on cores {core_list(cores.engine)}"
    if len(cores.engine) < cores.replicas:
        shared = "core" if len(cores.engine) == 1 else "cores"
        return (
            f"{cores.replicas} engine replicas share {shared} {core_list(cores.engine)}, one "
            "thread each: fewer cores than replicas, so they slow each other down"
        )
    shares = " | ".join(map(core_list, cores.shares()))
    return f"{cores.replicas} engine replicas on cores {shares}"


def core_list(cores: tuple[int, ...]) -> str:
    """Core numbers, for people."""
    return ", ".join(map(str, cores))


class NamedModel(msgspec.Struct, frozen=True):
    """A model beside the one that learns.

    Attributes:
        engine: it alone; its weights stay as they are, stamped 0.
        renderer: of its checkpoint.
    """

    engine: EngineClient
    renderer: ChatRenderer


@contextlib.asynccontextmanager
async def open_policy(
    recipe: Recipe,
    cores: Placement,
    *,
    cluster: Cluster,
    checkpoint: Path,
    version: int,
    log_dir: Path,
    report: Callable[[str], None] | None = None,
    name: str = "engine",
) -> AsyncIterator[PolicyEngine]:
    """The engine of the model that learns, started.

    Args:
        name: of the engine in logs and stamps.
        report: told, in words for people, when a replica fails and when it is back.

    Raises:
        UserError: the checkpoint cannot be used, or the processes do not come up.
    """
    engine = new_policy(
        recipe,
        cores,
        cluster=cluster,
        checkpoint=checkpoint,
        version=version,
        log_dir=log_dir,
        report=report,
        name=name,
    )
    try:
        with _explained("engine", log_dir):
            if isinstance(engine, Router):
                await engine.ready(cores.replicas)
            else:
                await engine.start()
        yield engine
    finally:
        await engine.close()


def new_policy(
    recipe: Recipe,
    cores: Placement,
    *,
    cluster: Cluster,
    checkpoint: Path,
    version: int,
    log_dir: Path,
    report: Callable[[str], None] | None = None,
    name: str = "engine",
) -> ProcessEngine | SplitEngine | Router:
    """The same, not started. A router starts its replicas as soon as the event loop runs."""

    def of(
        engine_id: str,
        owned: tuple[int, ...],
        log: str,
        path: str = str(checkpoint),
        stamp: int = version,
        one_life: bool = False,
    ) -> ProcessEngine:
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
            checkpoint=path,
            version=stamp,
            # Published weights may come without one.
            tokenizer=str(checkpoint),
            cores=owned,
            threads=len(owned),
            log_path=str(log_dir / log),
            retries=0 if one_life else 3,
            one_life=one_life,
        )

    if cores.prefill:
        return SplitEngine(
            of("prefill-0", cores.prefill, "prefill.log"),
            of(f"{name}-0", cores.engine, f"{name}.log"),
        )
    if cores.replicas == 1:
        return of(f"{name}-0", cores.engine, f"{name}.log")

    async def start(one: str, owned: tuple[int, ...], path: str, stamp: int) -> EngineClient:
        engine = of(one, owned, f"{one}.log", path, stamp, one_life=True)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    router = Router(Weights(str(checkpoint), version), policy=HEALTH, report=report)
    for i, owned in enumerate(cores.shares()):
        one = f"{name}-{i}"
        router.add(one, lambda path, stamp, one=one, owned=owned: start(one, owned, path, stamp))
    return router


@contextlib.asynccontextmanager
async def open_models(
    recipe: Recipe, cores: Placement, *, cluster: Cluster, log_dir: Path
) -> AsyncIterator[Mapping[str, NamedModel]]:
    """The models beside the one that learns, by name, started.

    Raises:
        UserError: one of them cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        models: dict[str, NamedModel] = {}
        starting: list[ProcessEngine] = []
        for name, table in recipe.models.items():
            path = await asyncio.to_thread(_resolve, name, table.path)
            engine = ProcessEngine(
                cluster,
                _named_config(recipe, name, table, path),
                checkpoint=str(path),
                cores=cores.models[name],
                threads=len(cores.models[name]),
                log_path=str(log_dir / f"model-{name}.log"),
            )
            stack.push_async_callback(engine.close)
            models[name] = NamedModel(engine, create_renderer(table.renderer, path))
            starting.append(engine)
        with _explained("models", log_dir):
            await asyncio.gather(*(engine.start() for engine in starting))
        yield models


def _resolve(name: str, path: str) -> Path:
    from headrace.model.gguf_import import resolve_model  # torch, for files of another format

    try:
        return resolve_model(path)
    except UserError as error:
        raise UserError(f"models.{name}.path: {error}") from error


def _named_config(recipe: Recipe, name: str, table: NamedModelTable, path: Path) -> EngineConfig:
    limit = ModelConfig.from_file(path).max_positions
    context = table.max_context or min(limit, recipe.engine.max_context)
    if context > limit:
        raise UserError(
            f"models.{name}.max_context {context}: the model was made for at most {limit} tokens"
        )
    return EngineConfig(
        engine_id=name,
        max_running=table.max_running,
        max_context=context,
        max_waiting=table.max_waiting,
        dtype=table.dtype,
        weights=table.weights,
        seed=recipe.seed,
    )


@contextlib.contextmanager
def _explained(what: str, log_dir: Path) -> Iterator[None]:
    """A process that did not come up is the user's to look into."""
    try:
        yield
    except EngineError as error:
        raise UserError(f"{what}: {error}; see {log_dir}") from error
