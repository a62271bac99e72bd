"""A checkpoint behind the gateway, without training: what `headrace serve` and `chat` stand on.

Finds the checkpoint, starts an engine in its own process and a gateway in this one. Nothing is
recorded on disk. This process never imports torch unless a checkpoint has to be converted first.
"""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from headrace.cluster.local import LocalCluster, available_cores
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.errors import UserError
from headrace.gateway.protocol import ApiError, ChatRequest
from headrace.gateway.server import GatewayServer
from headrace.gateway.sessions import Gateway
from headrace.model.config import ModelConfig
from headrace.tokens.renderer import create_renderer

_DEFAULT_CONTEXT = 2048
"""Tokens per request unless asked for more: the cache is sized by it."""

_DEFAULT_ANSWER = 256
"""Tokens of an answer when a client does not say."""


class ServeOptions(msgspec.Struct, frozen=True):
    """How to serve.

    Attributes:
        renderer: as in a recipe's model.renderer.
        dtype: "float32" or "bfloat16".
        max_context: tokens of prompt + output; None takes the model's limit, at most 2048.
        max_running: requests decoded together.
        max_waiting: requests queued before new ones are refused.
        threads: compute threads; None uses every core.
        request_timeout_s: deadline of one answer.
    """

    renderer: str = "auto"
    dtype: str = "float32"
    max_context: int | None = None
    max_running: int = 16
    max_waiting: int = 256
    threads: int | None = None
    request_timeout_s: float = 600.0


class KeyedGateway(Gateway):
    """A plain model server: every client shows one key, and no request belongs to a session."""

    def __init__(self, api_key: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, require_key=False, **kwargs)
        self._api_key = api_key.encode()

    async def chat(
        self,
        key: str | None,
        body: ChatRequest | dict[str, Any],
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """See `Gateway.chat`; a wrong key is refused before anything else is looked at."""
        if not secrets.compare_digest((key or "").encode(), self._api_key):
            raise ApiError(
                401, "invalid_api_key", "the API key is not the one headrace serve printed"
            )
        return await super().chat(None, body, idempotency_key)


def find_checkpoint(name: str) -> Path:
    """The checkpoint directory `name` stands for.

    Args:
        name: a checkpoint directory, a run directory (its newest checkpoint), or a known model.

    Raises:
        UserError: there is no such checkpoint.
    """
    path = Path(name)
    if not path.is_dir():
        from headrace.model.gguf_import import resolve_model

        return resolve_model(name)
    if (path / "config.json").is_file():
        return path
    configs = list(path.glob("checkpoints/**/config.json"))
    if configs:
        return max(configs, key=lambda file: file.stat().st_mtime).parent
    if (path / "recipe.json").is_file():
        raise UserError(f"run {path}: holds no checkpoint yet; wait for its first stage to end")
    raise UserError(f"checkpoint {path}: holds no config.json; name a checkpoint or run directory")


def engine_config(checkpoint: Path, options: ServeOptions) -> EngineConfig:
    """Sizes of an engine that fits the checkpoint.

    Raises:
        UserError: the model cannot be read or is not supported, or an option does not fit it.
    """
    limit = ModelConfig.from_file(checkpoint).max_positions
    context = options.max_context or min(limit, _DEFAULT_CONTEXT)
    if context > limit:
        raise UserError(f"--max-context {context}: the model was made for at most {limit} tokens")
    if options.dtype not in ("float32", "bfloat16"):
        raise UserError(f'--dtype "{options.dtype}": use float32 or bfloat16')
    return EngineConfig(
        max_running=options.max_running,
        max_context=context,
        max_waiting=options.max_waiting,
        dtype=options.dtype,
    )


@contextlib.asynccontextmanager
async def open_engine(checkpoint: Path, options: ServeOptions) -> AsyncIterator[ProcessEngine]:
    """An engine over the checkpoint, not started yet; its process ends with the context.

    Raises:
        UserError: the model is not supported, or an option does not fit it.
    """
    cores = available_cores()
    threads = options.threads or len(cores)
    if threads > len(cores):
        raise UserError(f"--threads {threads}: only {len(cores)} cores are usable here")
    config = engine_config(checkpoint, options)
    async with contextlib.AsyncExitStack() as stack:
        cluster = LocalCluster()
        stack.push_async_callback(cluster.close)
        engine = ProcessEngine(
            cluster, config, checkpoint=str(checkpoint), cores=cores[:threads], threads=threads
        )
        stack.push_async_callback(engine.close)
        yield engine


def serve_forever(
    checkpoint: str,
    options: ServeOptions,
    *,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        checkpoint: see `find_checkpoint`.
        options: how to serve.
        host: address to bind.
        port: TCP port; 0 picks a free one.
        api_key: what clients must send; None makes one up.
        console: where the address and the key are printed.

    Raises:
        UserError: the checkpoint cannot be used or the port is taken.
    """
    if api_key is not None and (not api_key.isascii() or not api_key.strip()):
        raise UserError("--api-key: use ASCII characters, at least one of them visible")
    asyncio.run(_serve(find_checkpoint(checkpoint), options, host, port, api_key, console))
    return 0


async def _serve(
    checkpoint: Path,
    options: ServeOptions,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
) -> None:
    serving = asyncio.current_task()
    assert serving is not None, "runs as a task"

    def interrupt() -> None:
        if not serving.cancelling():  # a second Ctrl-C must not cut the cleaning up short
            serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    renderer = create_renderer(options.renderer, checkpoint)
    key = api_key or f"sk-headrace-{secrets.token_urlsafe(18)}"
    with contextlib.suppress(asyncio.CancelledError):
        async with open_engine(checkpoint, options) as engine:
            gateway = KeyedGateway(
                key,
                engine,
                renderer,
                model="headrace",
                request_timeout_s=options.request_timeout_s,
                default_max_tokens=_DEFAULT_ANSWER,
            )
            # The port comes first: when it is taken, nobody waits for weights to load.
            server = await GatewayServer.start(gateway, host=host, port=port)
            try:
                console.print(f"Loading {escape(str(checkpoint))} ...", soft_wrap=True)
                await engine.start()
                for name, value in {
                    "base URL": server.base_url,
                    "API key": key,
                    "model": gateway.model,
                    "context": f"{engine.max_context} tokens",
                }.items():
                    console.print(f"{name:>9}  {escape(value)}", highlight=False, soft_wrap=True)
                console.print("Ctrl-C stops it.")
                await asyncio.Event().wait()
            finally:
                await server.stop()
    console.print("Stopped.")
