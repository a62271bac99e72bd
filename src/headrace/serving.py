"""A checkpoint behind the gateway, without training: what `headrace serve` and `chat` stand on.

Finds the checkpoint, starts an engine in its own process (or an inference server of another make,
or connects to one) and a gateway in this one. Nothing is recorded on disk. This process never
imports torch unless a checkpoint has to be converted first.
"""

import asyncio
import contextlib
import importlib.util
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.markup import escape

from headrace.cluster.local import LocalCluster, available_cores
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.http_engine import HttpEngine
from headrace.engine.server_commands import sglang_command, vllm_command, vllm_environment
from headrace.engine.server_process import ServerProcess, free_port
from headrace.engine.sglang import SglangEngine
from headrace.engine.types import EngineClient
from headrace.engine.vllm import VllmEngine
from headrace.errors import UserError
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.gateway.sessions import Credentials, Session
from headrace.gateway.turn import ApiError
from headrace.model.config import ModelConfig
from headrace.tokens.renderer import create_renderer

DECODE_SLOWDOWN = 4.0
"""Times that a step may take longer because of somebody else's long prompt."""
_DEFAULT_CONTEXT = 2048
"""Tokens per request unless asked for more: the cache is sized by it."""

_DEFAULT_ANSWER = 4096
"""Tokens of an answer when a client does not say, as coding agents do not: files are long. The
context may end it before."""


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
        engine: "embedded", or "vllm" or "sglang": an inference server.
        engine_url: of such a server that runs already, and decides dtype, max_running and threads.
        engine_python: interpreter that has it, to start one; None takes this one.
        engine_options: further ones of the server to start, each as it takes them.
        engine_key: API key of a server that runs already.
    """

    renderer: str = "auto"
    dtype: str = "float32"
    max_context: int | None = None
    max_running: int = 16
    max_waiting: int = 256
    threads: int | None = None
    request_timeout_s: float = 600.0
    engine: str = "embedded"
    engine_url: str | None = None
    engine_python: str | None = None
    engine_options: tuple[str, ...] = ()
    engine_key: str | None = None


class ServedEngine(EngineClient, Protocol):
    """An engine that has to be started."""

    async def start(self) -> None:
        """Returns once it answers.

        Raises:
            UserError: the checkpoint or the server cannot be used.
        """
        ...


class KeyedGateway(Gateway):
    """A plain model server: every client shows one key, and no request belongs to a session."""

    def __init__(self, api_key: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, require_key=False, **kwargs)
        self._api_key = api_key.encode()

    def admit(self, credentials: Credentials) -> Session | None:
        """See `Gateway.admit`; the key of a session is let in, any other wrong one refused."""
        session = self._sessions.find(credentials)
        if session is not None:
            return session
        if not secrets.compare_digest((credentials.api_key or "").encode(), self._api_key):
            raise ApiError(
                401, "invalid_api_key", "the API key is not the one headrace serve printed"
            )
        return super().admit(credentials)


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
        decode_slowdown=DECODE_SLOWDOWN,
    )


@contextlib.asynccontextmanager
async def open_engine(checkpoint: Path, options: ServeOptions) -> AsyncIterator[ServedEngine]:
    """An engine over the checkpoint, not started yet; its process ends with the context.

    Raises:
        UserError: the model is not supported, or an option does not fit it.
    """
    cores = available_cores()
    threads = options.threads or len(cores)
    if threads > len(cores):
        raise UserError(f"--threads {threads}: only {len(cores)} cores are usable here")
    if options.engine != "embedded":
        async with _open_server(checkpoint, options, threads) as engine:
            yield engine
        return
    for name, given in {
        "--engine-url": options.engine_url,
        "--engine-python": options.engine_python,
        "--engine-option": " ".join(options.engine_options) or None,
        "--engine-key": options.engine_key,
    }.items():
        if given is not None:
            raise UserError(f"{name} {given}: choose the server's kind, --engine vllm or sglang")
    config = engine_config(checkpoint, options)
    async with contextlib.AsyncExitStack() as stack:
        cluster = LocalCluster()
        stack.push_async_callback(cluster.close)
        engine = ProcessEngine(
            cluster, config, checkpoint=str(checkpoint), cores=cores[:threads], threads=threads
        )
        stack.push_async_callback(engine.close)
        yield engine


@contextlib.asynccontextmanager
async def _open_server(
    checkpoint: Path, options: ServeOptions, threads: int
) -> AsyncIterator[HttpEngine]:
    """An inference server as an engine: one that runs, or one that is to be started."""
    kinds = {"vllm": VllmEngine, "sglang": SglangEngine}
    if options.engine not in kinds:
        raise UserError(f'--engine "{options.engine}": use embedded, vllm or sglang')
    if options.dtype not in ("float32", "bfloat16"):
        raise UserError(f'--dtype "{options.dtype}": use float32 or bfloat16')
    folder = None
    server = None
    if options.engine_url is not None:
        if options.engine_python is not None or options.engine_options:
            raise UserError(
                "--engine-url names a server that runs: leave out --engine-python and "
                "--engine-option"
            )
        url = options.engine_url
    else:
        python = options.engine_python or _own_python(options.engine)
        folder = Path(tempfile.mkdtemp(prefix=f"headrace-{options.engine}-"))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = vllm_command if options.engine == "vllm" else sglang_command
        server = ServerProcess(
            options.engine,
            command(
                python,
                checkpoint,
                port,
                dtype=options.dtype,
                max_context=options.max_context,
                max_running=options.max_running,
                options=options.engine_options,
            ),
            environment=vllm_environment(threads) if options.engine == "vllm" else {},
            log_path=folder / "server.log",
        )
    engine = kinds[options.engine](
        url,
        checkpoint,
        max_open=options.max_running + options.max_waiting,
        max_context=options.max_context,
        api_key=options.engine_key,
        server=server,
    )
    try:
        yield engine
    except UserError:
        folder = None  # the message may name the log
        raise
    finally:
        await engine.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _own_python(engine: str) -> str:
    if importlib.util.find_spec(engine) is None:
        raise UserError(
            f"--engine {engine}: it is not installed beside headrace; name the interpreter that "
            "has it with --engine-python, or a running server with --engine-url"
        )
    return sys.executable


def serve_forever(
    checkpoint: str,
    options: ServeOptions,
    *,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
    admin_key: str | None = None,
) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        checkpoint: see `find_checkpoint`.
        options: how to serve.
        host: address to bind.
        port: TCP port; 0 picks a free one.
        api_key: what clients must send; None makes one up.
        admin_key: what opens and closes sessions over HTTP; None: nothing does.
        console: where the address and the key are printed.

    Raises:
        UserError: the checkpoint cannot be used or the port is taken.
    """
    if api_key is not None and (not api_key.isascii() or not api_key.strip()):
        raise UserError("--api-key: use ASCII characters, at least one of them visible")
    if admin_key is not None and (not admin_key.isascii() or not admin_key.strip()):
        raise UserError("--admin-key: use ASCII characters, at least one of them visible")
    if admin_key is not None and admin_key == api_key:
        raise UserError("--admin-key: is the same as --api-key; choose another")
    asyncio.run(
        _serve(find_checkpoint(checkpoint), options, host, port, api_key, console, admin_key)
    )
    return 0


def cancel_on_signals() -> None:
    """Let Ctrl-C and SIGTERM cancel the task that calls this, once, so that it can clean up."""
    serving = asyncio.current_task()
    assert serving is not None, "runs as a task"

    def interrupt() -> None:
        if not serving.cancelling():  # a second Ctrl-C must not cut the cleaning up short
            serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)


async def _serve(
    checkpoint: Path,
    options: ServeOptions,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
    admin_key: str | None,
) -> None:
    cancel_on_signals()
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
            server = await GatewayServer.start(gateway, host=host, port=port, admin_key=admin_key)
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
                _print_clients(server.base_url, key, gateway.model, console)
                console.print("Ctrl-C stops it.")
                if isinstance(engine, HttpEngine) and engine.server is not None:
                    raise UserError(await engine.server.wait_ended())
                await asyncio.Event().wait()
            finally:
                await server.stop()
    console.print("Stopped.")


def client_settings(base_url: str, key: str, model: str) -> dict[str, str]:
    """How to point clients and some agents at a server, each as words for a shell.

    docs/agents.md says which versions of them were tried, and what the settings are for.

    Args:
        base_url: of its OpenAI APIs, ending in /v1.
        key: API key.
        model: name of the model.
    """
    root = base_url.removesuffix("/v1")
    openai = f"OPENAI_BASE_URL={base_url} OPENAI_API_KEY={key}"
    provider = (
        f'{{name="headrace",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    )
    return {
        "OpenAI": openai,
        "Anthropic": f"ANTHROPIC_BASE_URL={root} ANTHROPIC_API_KEY={key}",
        "mini-swe-agent": (
            f"{openai} MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors "
            f"mini -m openai/{model}"
        ),
        "Claude Code": (
            f"ANTHROPIC_BASE_URL={root} ANTHROPIC_AUTH_TOKEN={key} claude --model {model}"
        ),
        "Codex": (
            f"OPENAI_API_KEY={key} codex -m {model} -c model_provider=headrace "
            f"-c 'model_providers.headrace={provider}' -c web_search=disabled "
            "--disable multi_agent"
        ),
    }


def _print_clients(base_url: str, key: str, model: str, console: Console) -> None:
    for name, words in client_settings(base_url, key, model).items():
        console.print(f"{name:>14}  {escape(words)}", style="dim", highlight=False, soft_wrap=True)
