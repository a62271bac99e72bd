"""The engine that `headrace serve` and `chat` put behind a gateway: from a checkpoint and options.

One of headrace's own, several of them as one, or inference servers of another make, which are
started here or run already. Knows nothing of gateways and keys.
"""

import contextlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec

from headrace.cluster.local import available_cores
from headrace.engine.config import EngineConfig
from headrace.engine.servers.commands import sglang_command, vllm_command, vllm_environment
from headrace.engine.servers.engine import HttpEngine
from headrace.engine.servers.process import ServerProcess, free_port
from headrace.engine.servers.sglang import SglangEngine
from headrace.engine.servers.vllm import VllmEngine
from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.replicas import ServedEngine, open_embedded, open_servers, share_cores

DECODE_SLOWDOWN = 4.0
"""Times that a step may take longer because of somebody else's long prompt."""
_KINDS: dict[str, type[VllmEngine | SglangEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
_DEFAULT_CONTEXT = 2048
"""Tokens per request unless asked for more: the cache is sized by it."""


class ServeOptions(msgspec.Struct, frozen=True):
    """How to serve.

    Attributes:
        renderer: as in a recipe's model.renderer.
        dtype: "float32" or "bfloat16".
        max_context: tokens of prompt + output; None takes the model's limit, at most 2048.
        max_running: requests decoded together.
        max_waiting: requests queued before new ones are refused.
        threads: compute threads; None uses every core. Replicas divide them.
        replicas: engines of headrace's own that share the requests; max_running and max_waiting are
            of each.
        request_timeout_s: deadline of one answer.
        engine: "embedded", or "vllm" or "sglang": an inference server.
        engine_urls: of such servers that run already, and decide dtype, max_running and threads;
            several share the requests.
        engine_python: interpreter that has it, to start one; None takes this one.
        engine_options: further ones of the server to start, each as it takes them.
        engine_key: API key of servers that run already.
    """

    renderer: str = "auto"
    dtype: str = "float32"
    max_context: int | None = None
    max_running: int = 16
    max_waiting: int = 256
    threads: int | None = None
    replicas: int = 1
    request_timeout_s: float = 600.0
    engine: str = "embedded"
    engine_urls: tuple[str, ...] = ()
    engine_python: str | None = None
    engine_options: tuple[str, ...] = ()
    engine_key: str | None = None


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
async def open_engine(
    checkpoint: Path, options: ServeOptions, *, report: Callable[[str], None] | None = None
) -> AsyncIterator[ServedEngine]:
    """An engine over the checkpoint, not started yet; its processes end with the context.

    Args:
        report: told, in words for people, when one of several replicas fails and when it is back.

    Raises:
        UserError: the model is not supported, or an option does not fit it.
    """
    shares = share_cores(available_cores(), options.threads, options.replicas)
    if options.engine != "embedded":
        async with _open_server(checkpoint, options, report) as engine:
            yield engine
        return
    for name, given in {
        "--engine-url": " ".join(options.engine_urls) or None,
        "--engine-python": options.engine_python,
        "--engine-option": " ".join(options.engine_options) or None,
        "--engine-key": options.engine_key,
    }.items():
        if given is not None:
            raise UserError(f"{name} {given}: choose the server's kind, --engine vllm or sglang")
    async with open_embedded(
        checkpoint, engine_config(checkpoint, options), shares, report=report
    ) as engine:
        yield engine


@contextlib.asynccontextmanager
async def _open_server(
    checkpoint: Path, options: ServeOptions, report: Callable[[str], None] | None
) -> AsyncIterator[ServedEngine]:
    """Inference servers as an engine: some that run, or one that is to be started."""
    if options.engine not in _KINDS:
        raise UserError(f'--engine "{options.engine}": use embedded, vllm or sglang')
    if options.dtype not in ("float32", "bfloat16"):
        raise UserError(f'--dtype "{options.dtype}": use float32 or bfloat16')
    if options.replicas > 1:
        raise UserError(
            f"--replicas {options.replicas}: starts engines of headrace's own; start servers "
            "yourself and name each with an --engine-url"
        )
    if not options.engine_urls:
        async with _started_server(checkpoint, options) as engine:
            yield engine
        return
    if options.engine_python is not None or options.engine_options:
        raise UserError(
            "--engine-url names a server that runs: leave out --engine-python and --engine-option"
        )
    if len(options.engine_urls) == 1:
        engine = _engine_of(options.engine_urls[0], checkpoint, options)
        try:
            yield engine
        finally:
            await engine.close()
        return
    same = {url.rstrip("/") for url in options.engine_urls}
    if len(same) < len(options.engine_urls):
        raise UserError(f"--engine-url {options.engine_urls[-1]}: name each server once")
    connect = {
        f"engine-{i}": partial(
            _engine_of, url, checkpoint, options, engine_id=f"engine-{i}", version=0
        )
        for i, url in enumerate(options.engine_urls)
    }
    for make in connect.values():
        await make().close()  # a URL that is none is said before anybody waits for servers
    limit = ModelConfig.from_file(checkpoint).max_positions
    async with open_servers(
        connect,
        checkpoint,
        max_context=options.max_context or limit,
        running=options.max_running * len(connect),
        report=report,
    ) as replicas:
        yield replicas


def _engine_of(
    url: str,
    checkpoint: Path,
    options: ServeOptions,
    *,
    server: ServerProcess | None = None,
    engine_id: str = "engine-0",
    version: int | None = None,
) -> HttpEngine:
    return _KINDS[options.engine](
        url,
        checkpoint,
        engine_id=engine_id,
        version=version,
        max_open=options.max_running + options.max_waiting,
        max_context=options.max_context,
        api_key=options.engine_key,
        server=server,
    )


@contextlib.asynccontextmanager
async def _started_server(checkpoint: Path, options: ServeOptions) -> AsyncIterator[HttpEngine]:
    """A server that is to be started here; its log is kept if it does not come up."""
    python = options.engine_python or _own_python(options.engine)
    threads = options.threads or len(available_cores())
    folder = Path(tempfile.mkdtemp(prefix=f"headrace-{options.engine}-"))
    port = free_port()
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
    engine = _engine_of(f"http://127.0.0.1:{port}", checkpoint, options, server=server)
    kept = False
    try:
        yield engine
    except UserError:
        kept = True  # the message may name the log
        raise
    finally:
        await engine.close()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _own_python(engine: str) -> str:
    if importlib.util.find_spec(engine) is None:
        raise UserError(
            f"--engine {engine}: it is not installed beside headrace; name the interpreter that "
            "has it with --engine-python, or a running server with --engine-url"
        )
    return sys.executable
