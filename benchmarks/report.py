"""What every benchmark has in common: its flags, sizes that `--quick` reduces, and its report.

The report is the last line of `--json`: {"name", "machine", "config", "metrics", "notes"}.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.observe.machine import describe_machine

SIGNIFICANT_DIGITS = 5


def new_parser(
    description: str | None, *, quick: str = "small enough for 50 s on two cores"
) -> argparse.ArgumentParser:
    """A parser that knows `--json` and `--quick`.

    Args:
        description: the benchmark's docstring.
        quick: what `--quick` does.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def fill_sizes(
    arguments: argparse.Namespace, sizes: Sequence[tuple[str, float, float]]
) -> argparse.Namespace:
    """Give every size that was not asked for its value: (name, with `--quick`, in full)."""
    for name, small, full in sizes:
        if getattr(arguments, name) is None:
            setattr(arguments, name, small if arguments.quick else full)
    return arguments


def rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Counts as they are, other numbers to five significant digits."""
    return {
        name: value if float(value).is_integer() else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        for name, value in metrics.items()
    }


def print_report(
    name: str,
    arguments: argparse.Namespace,
    metrics: Mapping[str, float],
    notes: str,
    **config: Any,
) -> None:
    """Print the report with `--json`, else a line per metric.

    Args:
        name: of the benchmark.
        arguments: all of them belong to the reported configuration.
        metrics: flat numbers.
        notes: what a reader must know to judge them.
        config: what else does.
    """
    numbers = rounded(metrics)
    if not arguments.json:
        for key, value in numbers.items():
            print(f"{key:36s} {value:g}")
        return
    report = {
        "name": name,
        "machine": describe_machine(),
        "config": {k: v for k, v in vars(arguments).items() if k != "json"} | config,
        "metrics": numbers,
        "notes": notes,
    }
    print(json.dumps(report, default=str))
