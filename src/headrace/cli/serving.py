"""Commands that put a checkpoint to use without training it: chat, serve and engine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.options import (
    CheckpointArgument,
    ContextOption,
    DtypeOption,
    HostOption,
    MaxRunningOption,
    MaxWaitingOption,
    PortOption,
    RendererOption,
    ReplicasOption,
    ThreadsOption,
)


def chat(
    checkpoint: CheckpointArgument,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", metavar="TEXT", help="Say this, print the answer, stop."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message that opens the conversation.")
    ] = None,
    bash: Annotated[
        bool,
        typer.Option("--bash", help="Give the model a bash tool in an isolated sandbox."),
    ] = False,
    files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy DIR into that sandbox (implies --bash)."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.7,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens per answer.")
    ] = 256,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Makes sampling repeatable.")
    ] = None,
    renderer: RendererOption = "auto",
    dtype: DtypeOption = "float32",
    max_context: ContextOption = None,
) -> int:
    """Talk to a checkpoint. Tool calls are shown; Ctrl-D ends the conversation."""
    from headrace.chat import ChatOptions, chat_loop
    from headrace.served_engine import ServeOptions

    return chat_loop(
        checkpoint,
        ServeOptions(renderer=renderer, dtype=dtype, max_context=max_context, max_running=1),
        ChatOptions(
            system=system,
            bash=bash,
            files=files,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        ),
        message=message,
        console=Console(),
    )


def serve(
    checkpoint: CheckpointArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key clients must send; a random one by default."),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key that opens and closes sessions over HTTP."),
    ] = None,
    max_running: MaxRunningOption = 16,
    max_waiting: MaxWaitingOption = 256,
    threads: ThreadsOption = None,
    replicas: ReplicasOption = 1,
    renderer: RendererOption = "auto",
    dtype: DtypeOption = "float32",
    max_context: ContextOption = None,
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="embedded, or a server: vllm or sglang.")
    ] = "embedded",
    engine_urls: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-url",
            metavar="URL",
            help="A vLLM or SGLang server that runs with this checkpoint; several share requests.",
        ),
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Python that has vLLM or SGLang, to start a server."),
    ] = None,
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option",
            metavar="OPTION",
            help="Further option of the server to start, e.g. --engine-option=--enforce-eager.",
        ),
    ] = None,
    engine_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="API key of the server at --engine-url.")
    ] = None,
) -> int:
    """Serve a checkpoint through OpenAI's and Anthropic's APIs until Ctrl-C.

    Prints the base URL, an API key, and how to point clients and agents at them. Nothing is
    recorded and nothing is trained; `headrace run` does that. The engine is headrace's own, or vLLM
    or SGLang, started for this or running already; see docs/adapters.md.
    """
    from headrace.served_engine import ServeOptions
    from headrace.serving import serve_forever

    options = ServeOptions(
        renderer=renderer,
        dtype=dtype,
        max_context=max_context,
        max_running=max_running,
        max_waiting=max_waiting,
        threads=threads,
        replicas=replicas,
        engine=engine,
        engine_urls=tuple(engine_urls or ()),
        engine_python=engine_python,
        engine_options=tuple(engine_options or ()),
        engine_key=engine_key,
    )
    return serve_forever(
        checkpoint,
        options,
        host=host,
        port=port,
        api_key=api_key,
        admin_key=admin_key,
        console=Console(),
    )


def engine(
    checkpoint: CheckpointArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8001,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key clients must send; needed beyond loopback."),
    ] = None,
    max_running: MaxRunningOption = 16,
    max_waiting: MaxWaitingOption = 256,
    max_context: ContextOption = None,
    dtype: DtypeOption = "float32",
    weights: Annotated[
        str, typer.Option(metavar="KIND", help="same (as --dtype) or int8.")
    ] = "same",
    cache_tokens: Annotated[
        int,
        typer.Option(metavar="TOKENS", min=0, help="Size of the cache; 0 fits every request."),
    ] = 0,
    draft_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens the model's drafts guess per step.")
    ] = 0,
    threads: ThreadsOption = None,
    replicas: ReplicasOption = 1,
) -> int:
    """Serve a checkpoint token-in token-out until Ctrl-C: /generate, /weights, /metrics, ...

    For programs that hold token ids: trainers, evaluations, other gateways. docs/serving.md shows
    every route. For chat clients use `headrace serve`.
    """
    from headrace.engine_serving import EngineOptions, engine_forever

    options = EngineOptions(
        dtype=dtype,
        weights=weights,
        max_context=max_context,
        max_running=max_running,
        max_waiting=max_waiting,
        cache_tokens=cache_tokens,
        draft_tokens=draft_tokens,
        threads=threads,
        replicas=replicas,
    )
    return engine_forever(
        checkpoint, options, host=host, port=port, api_key=api_key, console=Console()
    )
