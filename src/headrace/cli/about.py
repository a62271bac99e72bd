"""Commands that tell facts: what this machine can do, and what a model is."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    ops: Annotated[
        bool,
        typer.Option("--ops", help="Check and time every op backend instead (about 10 s)."),
    ] = False,
) -> int:
    """Say what this machine can do and how to get what it lacks.

    Exit code 0 when headrace can run here, 1 when something it needs is missing (with --ops: when
    a backend fails a check).
    """
    from headrace.doctor import examine, examine_ops, exit_code, render, render_ops

    console = Console()
    if ops:
        report, native = examine_ops()
        console.print(render_ops(report, native))
        return int(not report.passed)
    checks = examine(Path.cwd())
    console.print(render(checks))
    return exit_code(checks)


def model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="glm5-tiny, glm5-mini, glm5, or a checkpoint directory."
        ),
    ],
) -> int:
    """Print a model's shape, parameters (total and active) and cache size. Loads no weights."""
    from headrace.model_info import model_table

    Console().print(model_table(name))
    return 0
