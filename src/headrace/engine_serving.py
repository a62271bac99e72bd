"""An engine behind its own HTTP surface, without a gateway: what `headrace engine` stands on.

Finds the checkpoint, starts the engine in its own process and serves token ids from this one, which
never imports torch unless a checkpoint has to be converted first.
"""

import asyncio
import contextlib
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from headrace.cluster.local import available_cores
from headrace.engine.config import EngineConfig
from headrace.engine.serving.app import create_engine_app
from headrace.engine.serving.doorway import Limits
from headrace.errors import UserError
from headrace.http.server import HttpServer, is_loopback
from headrace.model.config import ModelConfig
from headrace.replicas import ReplicatedEngine, open_embedded, share_cores
from headrace.served_engine import DECODE_SLOWDOWN
from headrace.serving import cancel_on_signals, find_checkpoint

_DEFAULT_CONTEXT = 2048
"""Tokens per request unless asked for more: the cache is sized by it."""


class EngineOptions(msgspec.Struct, frozen=True):
    """How to run the engine; see `EngineConfig`.

    Attributes:
        max_context: tokens of prompt + output; None takes the model's limit, at most 2048.
        threads: compute threads; None uses every core. Replicas divide them.
        replicas: engines that share the requests; all else but threads is of each.
    """

    dtype: str = "float32"
    weights: str = "same"
    max_context: int | None = None
    max_running: int = 16
    max_waiting: int = 256
    cache_tokens: int = 0
    draft_tokens: int = 0
    threads: int | None = None
    replicas: int = 1


def engine_config(checkpoint: Path, options: EngineOptions) -> EngineConfig:
    """Sizes of an engine that fits the checkpoint.

    Raises:
        UserError: the model cannot be read or is not supported, or an option does not fit it.
    """
    limit = ModelConfig.from_file(checkpoint).max_positions
    context = options.max_context or min(limit, _DEFAULT_CONTEXT)
    if context > limit:
        raise UserError(f"--max-context {context}: the model was made for at most {limit} tokens")
    for option, value, known in (
        ("dtype", options.dtype, ("float32", "bfloat16")),
        ("weights", options.weights, ("same", "int8")),
    ):
        if value not in known:
            raise UserError(f'--{option} "{value}": use {" or ".join(known)}')
    return EngineConfig(
        max_running=options.max_running,
        max_context=context,
        max_waiting=options.max_waiting,
        cache_tokens=options.cache_tokens,
        dtype=options.dtype,
        decode_slowdown=DECODE_SLOWDOWN,
        weights=options.weights,
        draft_tokens=options.draft_tokens,
    )


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse keys that no client could send, and to be open to others without one.

    Whoever reaches the port can abort requests and load weights.

    Raises:
        UserError: see above.
    """
    if api_key is not None and (
        not api_key.isascii() or not api_key.isprintable() or " " in api_key
    ):
        raise UserError("--api-key: use visible ASCII characters")
    if api_key == "":
        raise UserError("--api-key: is empty; leave it out, or choose one")
    if api_key is None and not is_loopback(host):
        raise UserError(f"--host {host}: others can reach that address; set --api-key too")


def engine_forever(
    checkpoint: str,
    options: EngineOptions,
    *,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        checkpoint: see `find_checkpoint`.
        options: how to run the engine.
        host: address to bind.
        port: TCP port; 0 picks a free one.
        api_key: what clients must send; None lets everybody in who reaches a loopback address.
        console: where the address is printed.

    Raises:
        UserError: the checkpoint cannot be used, the port is taken, or an option makes no sense.
    """
    check_exposure(host, api_key)
    asyncio.run(_serve(find_checkpoint(checkpoint), options, host, port, api_key, console))
    return 0


async def _serve(
    checkpoint: Path,
    options: EngineOptions,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
) -> None:
    cancel_on_signals()
    config = engine_config(checkpoint, options)
    shares = share_cores(available_cores(), options.threads, options.replicas)

    def report(words: str) -> None:
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)

    with contextlib.suppress(asyncio.CancelledError):
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(
                open_embedded(checkpoint, config, shares, report=report)
            )
            # As many as the engine takes, and as many again whose answers are on their way.
            limits = Limits(open=2 * (config.max_running + config.max_waiting) * options.replicas)
            app = create_engine_app(engine, api_key=api_key, limits=limits)
            # The port comes first: when it is taken, nobody waits for weights to load.
            server = await HttpServer.start(app, host=host, port=port, name="engine")
            stack.push_async_callback(server.stop)
            console.print(f"Loading {escape(str(checkpoint))} ...", soft_wrap=True)
            await engine.start()
            shown = {
                "URL": server.url,
                "API key": api_key or "none",
                "context": f"{config.max_context} tokens",
                "document": f"{server.url}/openapi.json",
            }
            if isinstance(engine, ReplicatedEngine):
                shown["replicas"] = engine.words
            for name, value in shown.items():
                console.print(f"{name:>9}  {escape(value)}", highlight=False, soft_wrap=True)
            console.print("Ctrl-C stops it.")
            await asyncio.Event().wait()
    console.print("Stopped.")
