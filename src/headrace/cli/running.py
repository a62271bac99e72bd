"""`headrace run`: which recipe runs, with what changes, in which directory."""

import time
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import NoIsolationOption
from headrace.errors import UserError


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
    no_isolation: NoIsolationOption = False,
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
