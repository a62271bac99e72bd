"""`headrace tasks ...`: task services that run on their own, for runs elsewhere."""

from typing import Annotated

import typer

from headrace.cli.options import HELP_SETTINGS, HostOption, NoIsolationOption, PortOption

app = typer.Typer(
    name="tasks", help="Task services.", no_args_is_help=True, context_settings=HELP_SETTINGS
)


@app.command()
def serve(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A task headrace has, or package.module:Class of your own."
        ),
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = 8700,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with the token clients must send; needed beyond loopback.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUE",
            help="An option of the task, or of its sandboxes (sandbox.wall_s=10). May be repeated.",
        ),
    ] = None,
    register: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help='Announce it to the run that waits for it there (service = "registers").',
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where that run reaches it, if not at --host and --port."),
    ] = None,
    rollouts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rollouts in flight before more are refused.")
    ] = 1024,
    no_isolation: NoIsolationOption = False,
) -> int:
    """Serve a task over HTTP until Ctrl-C, for runs on this machine or others.

    A recipe names it with `service = "http://..."` in [tasks.NAME], or waits for it to register;
    docs/task-services.md describes the protocol.
    """
    from headrace.task_serving import ServeTaskOptions, serve_task

    options = ServeTaskOptions(
        host=host,
        port=port,
        token_env=token_env,
        overrides=tuple(overrides or ()),
        rollouts=rollouts,
        no_isolation=no_isolation,
        register=register,
        url=url,
    )
    return serve_task(name, options)
