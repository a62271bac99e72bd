"""The commands. Thin: each one reads its arguments, calls one room and turns mistakes into a line.

The modules here hold a family of commands each, `options` what they share. Rooms are imported
inside the commands, so that `headrace --help` needs neither torch nor an event loop. A mistake of
the user's (`UserError`, a wrong option) is one line on stderr and exit code 2; anything else that
goes wrong is a bug and keeps its traceback.
"""

import errno
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from headrace import __version__
from headrace.cli import about, looking, running, serving, tasks
from headrace.cli.options import HELP_SETTINGS
from headrace.errors import RunPaused, UserError

app = typer.Typer(
    name="headrace",
    help="Train language-model agents with asynchronous reinforcement learning.",
    epilog="Start with: headrace doctor, then headrace run quickstart",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings=HELP_SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


# In the order in which help lists them.
for _command in (
    running.run,
    serving.chat,
    serving.serve,
    serving.engine,
    looking.show,
    looking.dashboard,
    looking.ledger,
    looking.report,
    about.doctor,
    about.model,
):
    app.command()(_command)
app.add_typer(tasks.app)


def _explain_os_error(error: OSError) -> str | None:
    """One line for what a person can mend outside the program, None for anything else."""
    remedies = {
        errno.ENOSPC: "no space left on the device; free some, then continue with --resume RUN",
        errno.EDQUOT: "disk quota used up; free some space, then continue with --resume RUN",
        errno.EROFS: "the file system is read-only; choose another directory",
        errno.EACCES: "permission denied; choose another directory or change its mode",
    }
    remedy = remedies.get(error.errno or 0)
    if remedy is None:
        return None
    return f"{error.filename}: {remedy}" if error.filename else remedy


def _fail(message: str) -> int:
    """Print one line to stderr; returns the exit code of a user's mistake."""
    sys.stderr.write(f"headrace: {' '.join(message.split())}\n")
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; sys.argv by default.

    Returns:
        The exit code: 0 done, 1 the command's own failure, 2 a mistake of the user's, 3 a tripwire
        paused the run, 130 Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        code = command.main(given or ["--help"], prog_name="headrace", standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except RunPaused as pause:
        sys.stderr.write(f"headrace: {pause}\n")
        return 3
    except TyperException as error:
        return _fail(f"{error.format_message().rstrip('.')}; see headrace --help")
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:
        line = _explain_os_error(error)
        if line is None:
            raise
        return _fail(line)
    return code if isinstance(code, int) else 0
