"""Arguments and options that several commands have in common, each described once.

A command adds its default; an option that only one command has stands with that command.
"""

from pathlib import Path
from typing import Annotated

import typer

HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""How every command shows its help."""

# What a command works on.
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint directory, a run directory (its newest checkpoint), or "
        '"smollm2-135m-instruct".',
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]

# Where it serves.
HostOption = Annotated[str, typer.Option(help="Address to bind.")]
PortOption = Annotated[
    int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 picks a free one.")
]

# How a checkpoint generates.
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
MaxRunningOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Requests decoded together.")
]
MaxWaitingOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Requests queued before new ones are refused.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Compute threads; all cores by default.")
]

# How what a model writes is run.
NoIsolationOption = Annotated[
    bool,
    typer.Option(
        "--no-isolation",
        help="Let model-written commands run unprotected where no sandbox works. Unsafe.",
    ),
]
