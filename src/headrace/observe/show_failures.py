"""What `headrace show RUN` says about failed rollouts, and about a run that waits at a tripwire."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.observe.fates import rule_words, rules_of
from headrace.observe.runs import Run
from headrace.observe.units import count
from headrace.rollout.failures.trips import paused, tripped


def print_failures(run: Run, console: Console) -> None:
    """Print, for each RL stage, its rollouts that are no clean samples: how many of each reason,
    whose business it is, and what the recipe does about it."""
    if run.ledger is None or not run.has_rollouts:
        return
    for stage in run.recipe.get("stages") or ():
        if stage.get("kind") != "agentic_rl":
            continue
        counts = run.ledger.failure_counts(str(stage["name"]))
        if not counts:
            continue
        rules = rules_of(stage)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        table.add_column(Text(f"failed or not trained: {stage['name']}"))
        table.add_column("rollouts", justify="right")
        for name in ("whose", "rule"):
            table.add_column(name)
        for reason, number in counts.items():
            words = rule_words(reason, rules)
            table.add_row(reason.value, count(number), reason.fault.value, words or "–")
        console.print(table)
    trip = tripped(run.ledger)
    if trip is not None:
        console.print(Text(f"Run {paused(trip, run.path)}", style="bold yellow"), soft_wrap=True)
