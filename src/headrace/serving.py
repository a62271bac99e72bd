"""A checkpoint behind the gateway, without training: what `headrace serve` and `chat` stand on.

Finds the checkpoint, starts what answers (`served_engine`) and a gateway in this process. Nothing
is recorded on disk. This process never imports torch unless a checkpoint has to be converted first.
"""

import asyncio
import contextlib
import secrets
import signal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from headrace.engine.sampling import constrained
from headrace.engine.servers.engine import HttpEngine
from headrace.errors import UserError
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.gateway.sessions import Credentials, Session
from headrace.gateway.turn import ApiError
from headrace.replicas import ReplicatedEngine
from headrace.served_engine import ServeOptions, open_engine
from headrace.tokens.renderer import create_renderer

_DEFAULT_ANSWER = 4096
"""Tokens of an answer when a client does not say, as coding agents do not: files are long. The
context may end it before."""


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

    def report(words: str) -> None:
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)

    renderer = create_renderer(options.renderer, checkpoint)
    key = api_key or f"sk-headrace-{secrets.token_urlsafe(18)}"
    with contextlib.suppress(asyncio.CancelledError):
        async with open_engine(checkpoint, options, report=report) as engine:
            several = engine if isinstance(engine, ReplicatedEngine) else None
            gateway = KeyedGateway(
                key,
                engine,
                renderer,
                model="headrace",
                request_timeout_s=options.request_timeout_s,
                default_max_tokens=_DEFAULT_ANSWER,
                on_close=several.release if several else None,
                replicas=several.replicas if several else None,
                constrained=options.engine == "embedded" and constrained.installed(),
            )
            # The port comes first: when it is taken, nobody waits for weights to load.
            server = await GatewayServer.start(gateway, host=host, port=port, admin_key=admin_key)
            try:
                console.print(f"Loading {escape(str(checkpoint))} ...", soft_wrap=True)
                await engine.start()
                shown = {
                    "base URL": server.base_url,
                    "API key": key,
                    "model": gateway.model,
                    "context": f"{engine.max_context} tokens",
                }
                if several is not None:
                    shown["replicas"] = several.words
                for name, value in shown.items():
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
