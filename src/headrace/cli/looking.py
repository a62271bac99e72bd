"""Commands that read a run: show, dashboard, ledger and report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.options import RunArgument
from headrace.errors import UserError


def show(
    run_dir: RunArgument,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[trajectory|trajectories|session]",
            help="Leave out for a summary of the run.",
        ),
    ] = None,
    trajectory_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="With trajectory or session: its id or a prefix."),
    ] = None,
) -> int:
    """Look at a run: a summary, a list of trajectories, or one of them token by token.

    `headrace show RUN trajectory ID` prints every token with its mask, logprob and weight version,
    `headrace show RUN session ID` the tree of its calls with their forks and reasons.
    """
    from headrace.observe.show import (
        list_trajectories,
        show_run,
        show_session,
        show_trajectory,
    )

    console = Console()
    if what is None:
        show_run(run_dir, console)
    elif what == "trajectories" and trajectory_id is None:
        list_trajectories(run_dir, console)
    elif what == "trajectory" and trajectory_id is not None:
        show_trajectory(run_dir, trajectory_id, console)
    elif what == "session" and trajectory_id is not None:
        show_session(run_dir, trajectory_id, console)
    elif what in ("trajectory", "session"):
        raise UserError(
            f"show {run_dir} {what}: give an id; headrace show {run_dir} trajectories lists them"
        )
    else:
        raise UserError(
            f'show: "{what}" is unknown; use "trajectories", "trajectory ID" or "session ID"'
        )
    return 0


def dashboard(
    run_dir: RunArgument,
    port: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one."),
    ] = 8400,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write the page as one file instead, and stop."),
    ] = None,
    trajectories: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=2000, help="With --export: how many go in at most."),
    ] = 200,
) -> int:
    """Look at a run in a browser: curves, who waited for whom, failures, every trajectory.

    Works while the run goes on, when it is finished and when it crashed. Reads only; serves this
    machine alone. docs/dashboard.md says what each view answers.
    """
    if export is not None:
        from headrace.observe.dashboard.export import export_page

        typer.echo(export_page(run_dir, export, trajectories=trajectories))
        return 0
    from headrace.dashboard_serving import dashboard_forever

    return dashboard_forever(run_dir, port=port, console=Console())


def ledger(
    run_dir: RunArgument,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this stage of the recipe.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line instead.")
    ] = False,
) -> int:
    """Audit a run's record: where every group and token went, how old what trained was.

    Works while the run goes on, when it is finished and when it crashed; reads only. Exit code 0
    when every law held, 1 when one is broken. docs/ledger.md explains the report.
    """
    import json

    from headrace.observe.books import audit_run

    found = audit_run(run_dir, None if as_json else Console(), stage)
    if as_json:
        typer.echo(json.dumps(found))
    return 0 if found["held"] else 1


def report(run_dir: RunArgument) -> int:
    """Write a run's report.html again, from what the run directory holds."""
    from headrace.observe.report import write_report

    typer.echo(f"Report: {write_report(run_dir).resolve()}")
    return 0
