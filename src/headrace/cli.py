"""The commands. Thin: each one reads its arguments, calls one room and turns mistakes into a line.

Rooms are imported inside the commands, so that `headrace --help` needs neither torch nor an event
loop. A mistake of the user's (`UserError`, a wrong option) is one line on stderr and exit code 2;
anything else that goes wrong is a bug and keeps its traceback.
"""

import errno
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import TyperException

from headrace import __version__
from headrace.errors import RunPaused, UserError

app = typer.Typer(
    name="headrace",
    help="Train language-model agents with asynchronous reinforcement learning.",
    epilog="Start with: headrace doctor, then headrace run quickstart",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

tasks_app = typer.Typer(
    help="Task services.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(tasks_app, name="tasks")

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint directory, a run directory (its newest checkpoint), or "
        '"smollm2-135m-instruct".',
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
HostOption = Annotated[str, typer.Option(help="Address to bind.")]
ContextOption = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=16,
        help="Longest prompt + output; by default the model's limit, at most 2048.",
    ),
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        max=64,
        help="Engines that share the requests, each with its part of the cores.",
    ),
]
DtypeOption = Annotated[str, typer.Option(metavar="TYPE", help="float32 or bfloat16.")]
RendererOption = Annotated[
    str, typer.Option(metavar="NAME", help="How messages become tokens; see docs/recipes.md.")
]


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


@app.command()
def run(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help='A TOML file, or the name of one in recipes/, e.g. "quickstart".'
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write; runs/RECIPE-DATE-TIME by default."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Replaces the recipe's seed.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="TABLE.KEY=VALUE",
            help="Replaces one value, e.g. stages.rl.updates=10. May be repeated.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print the plan and stop.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue an interrupted run from its directory."),
    ] = None,
    acknowledge: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRIPWIRE", help="With --resume: go on although this tripwire paused the run."
        ),
    ] = None,
    no_isolation: Annotated[
        bool,
        typer.Option(
            "--no-isolation",
            help="Let model-written commands run unprotected where no sandbox works. Unsafe.",
        ),
    ] = False,
) -> int:
    """Run a recipe: prepare a model, train it, measure it and write a report.

    Everything lands in one run directory. Interrupt it with Ctrl-C (or lose the machine) and
    continue with --resume: nothing finished is lost and nothing is trained twice.
    """
    from headrace.recipe import load_recipe, parse_recipe

    if resume is not None:
        for option, given in {
            "RECIPE": recipe,
            "--run-dir": run_dir,
            "--seed": seed,
            "--set": overrides,
        }.items():
            if given is not None and given != []:
                raise UserError(
                    f"--resume {resume} continues with the recipe stored there; leave out {option}"
                )
        loaded = parse_recipe(_stored_recipe(resume), str(resume / "recipe.json"))
        target = resume
    elif acknowledge:
        raise UserError("--acknowledge goes on with a paused run; name it with --resume RUN")
    elif recipe is None:
        raise UserError('run: name a recipe, e.g. "headrace run quickstart", or give --resume RUN')
    else:
        loaded = load_recipe(recipe, overrides or (), seed)
        target = run_dir if run_dir is not None else _new_run_dir(Path("runs"), loaded.name)

    if loaded.sandbox.kind == "none" and not no_isolation:
        raise UserError(
            'sandbox.kind "none" lets model-written commands touch this machine; choose "auto", '
            "or confirm with --no-isolation"
        )
    if resume is None and not dry_run:
        _require_empty(target)
    from headrace.run import plan, run_recipe

    if dry_run:
        for line in plan(loaded):
            typer.echo(line)
        return 0
    code = run_recipe(
        loaded,
        target,
        resume=resume is not None,
        no_isolation=no_isolation,
        acknowledged=acknowledge or (),
    )
    report_file = target / "report.html"
    if report_file.is_file():
        typer.echo(f"Report: {report_file.resolve()}")
        typer.echo(f"Look closer: headrace show {target}")
    return code


@app.command()
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


@app.command()
def serve(
    checkpoint: CheckpointArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key clients must send; a random one by default."),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key that opens and closes sessions over HTTP."),
    ] = None,
    max_running: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests decoded together.")
    ] = 16,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests queued before new ones are refused.")
    ] = 256,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compute threads; all cores by default.")
    ] = None,
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
        checkpoint, options, host=host, port=port, api_key=api_key, console=Console()
    )


@app.command()
def engine(
    checkpoint: CheckpointArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = 8001,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key clients must send; needed beyond loopback."),
    ] = None,
    max_running: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests decoded together.")
    ] = 16,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests queued before new ones are refused.")
    ] = 256,
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
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compute threads; all cores by default.")
    ] = None,
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


@tasks_app.command("serve")
def tasks_serve(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A task headrace has, or package.module:Class of your own."
        ),
    ],
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = 8700,
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
    no_isolation: Annotated[
        bool,
        typer.Option(
            "--no-isolation",
            help="Let model-written commands run unprotected where no sandbox works. Unsafe.",
        ),
    ] = False,
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def report(run_dir: RunArgument) -> int:
    """Write a run's report.html again, from what the run directory holds."""
    from headrace.observe.report import write_report

    typer.echo(f"Report: {write_report(run_dir).resolve()}")
    return 0


@app.command()
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


@app.command()
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


def _stored_recipe(run_dir: Path) -> dict[str, object]:
    """The resolved recipe a run wrote when it began.

    Raises:
        UserError: `run_dir` is no run, or its recipe.json cannot be read.
    """
    import json

    file = run_dir / "recipe.json"
    if not run_dir.is_dir():
        raise UserError(f"run {run_dir}: no such directory")
    if not file.is_file():
        raise UserError(f"run {run_dir}: not a run directory (it holds no recipe.json)")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds no recipe; it must be a JSON object")
    return data


def _new_run_dir(parent: Path, name: str) -> Path:
    """A run directory that does not exist yet; two runs of one second get different ones."""
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidate, n = parent / base, 1
    while candidate.exists():
        n += 1
        candidate = parent / f"{base}-{n}"
    return candidate


def _require_empty(run_dir: Path) -> None:
    """Raises UserError when starting a run in `run_dir` would overwrite something."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir {run_dir}: a file of that name exists; choose another")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise UserError(
            f"--run-dir {run_dir}: not empty; continue that run with --resume {run_dir}, "
            "or choose another directory"
        )


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


if __name__ == "__main__":
    sys.exit(main())
