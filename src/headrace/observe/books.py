"""`headrace ledger`: a run's record, audited, with its books stage by stage.

Reads a ledger and prints to a rich console or as JSON; changes nothing, and is safe beside a run in
progress. What is counted and judged is `rollout.accounts`' and `rollout.audit`'s.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.observe.laws import LAWS
from headrace.observe.units import count, moment, percent, printable
from headrace.rollout.record.accounts import LedgerReport, StageAccount, ledger_report
from headrace.rollout.record.reading import LedgerReader, ledger_file

_BAR = 30
_PUBLICATIONS = 12


def audit_run(run_dir: Path, console: Console | None, stage: str | None = None) -> dict[str, Any]:
    """Audit a run, print the report unless there is no console, and return it as JSON.

    Args:
        run_dir: a run directory or a ledger file.
        console: where to print; None prints nothing.
        stage: only this one.

    Returns:
        {"ledger", "held", "laws": {law: {"held", "detail"}}, "stages": [`StageAccount`, ...]}.

    Raises:
        UserError: no ledger there, a damaged file, or no such stage.
    """
    with LedgerReader.open(run_dir) as ledger:
        report = ledger_report(ledger, stage)
    if console is not None:
        for account in report.stages:
            _print_stage(account, console)
        _print_laws(report, console)
    return {
        "ledger": str(ledger_file(run_dir)),
        "held": report.held,
        "laws": {
            law: {"held": finding.held, "detail": finding.detail}
            for law, finding in report.laws.items()
        },
        "stages": msgspec.to_builtins(report.stages, str_keys=True),
    }


def _print_stage(account: StageAccount, console: Console) -> None:
    state = {None: "measured", True: "finished", False: "not finished"}[account.finished]
    if not account.sessions and not account.batches.cut:
        console.print(Text.assemble((account.stage, "bold"), f"  {state}; no rollouts\n"))
        return
    console.print(Text.assemble((account.stage, "bold"), f"  {state}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("all", "trained", "dropped", "waiting", "open", "closes"):
        table.add_column(name, justify="right")
    groups, tokens = account.groups, account.tokens
    if groups.dispatched:
        table.add_row(
            "groups",
            count(groups.dispatched),
            count(groups.trained),
            count(sum(groups.dropped.values())),
            count(groups.waiting),
            count(groups.open),
            _yes(groups.closes),
        )
    table.add_row(
        "tokens",
        count(tokens.sampled),
        count(tokens.trained),
        count(sum(tokens.dropped.values())),
        count(tokens.pending),
        "",
        _yes(tokens.closes),
    )
    console.print(table)
    lines = []
    if groups.dropped:
        lines.append(("dropped", f"groups: {_reasons(groups.dropped)}"))
    if tokens.dropped:
        reasons = {reason.value: n for reason, n in tokens.dropped.items()}
        lines.append(("dropped", f"tokens: {_reasons(reasons)}"))
    lines.append(("sessions", _reasons(account.sessions)))
    batches = account.batches
    if batches.cut:
        again = f", {batches.replayed} again after a crash" if batches.replayed else ""
        lines.append(("batches", f"{batches.cut} cut, {batches.trained} trained{again}"))
    if account.recoveries:
        lines.append(("crashes", f"recovered from {account.recoveries} times"))
    if account.trained_digest:
        lines.append(("trained", f"digest {account.trained_digest}"))
    twice = _reasons(account.duplicates) if account.duplicates else "nothing"
    lines.append(("twice", twice))
    for name, text in lines:
        console.print(Text(f"{name:12s}{text}"), soft_wrap=True)
    if account.publications:
        console.print(Text(f"{'versions':12s}{_versions(account)}"), soft_wrap=True)
    if account.staleness:
        _print_staleness(account, console)
    console.print()


def _print_staleness(account: StageAccount, console: Console) -> None:
    total, tau = sum(account.staleness.values()), account.batches.tau
    bound = "no bound" if tau is None else f"bound {tau}"
    console.print(Text(f"{'lag':12s}most {max(account.staleness)}, {bound} (trained tokens)"))
    widest = max(account.staleness.values())
    for lag, tokens in account.staleness.items():
        bar = "█" * max(1, round(_BAR * tokens / widest))
        late = tau is not None and lag > tau
        line = f"{lag:>12d}  {bar:{_BAR}s} {count(tokens):>12s} {percent(tokens / total):>7s}"
        console.print(Text(line, style="bold red" if late else ""))


def _versions(account: StageAccount) -> str:
    """The newest publications in order, with the update that each came after and when."""
    shown = account.publications[-_PUBLICATIONS:]
    more = len(account.publications) - len(shown)
    parts = [f"{p.version} (update {p.step})" for p in shown]
    before = f"{more} earlier, " if more else ""
    times = f"; {moment(account.publications[0].published_at)} to {moment(shown[-1].published_at)}"
    return before + ", ".join(parts) + times


def _print_laws(report: LedgerReport, console: Console) -> None:
    for law, finding in report.laws.items():
        word = ("held", "green") if finding.held else ("BROKEN", "bold red")
        console.print(
            Text.assemble(f"{law}  ", word, f"  {LAWS[law]} ", (printable(finding.detail), "dim")),
            soft_wrap=True,
        )


def _yes(closes: bool) -> Text:
    return Text("yes") if closes else Text("NO", style="bold red")


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(name)} {count(n)}" for name, n in counts.items()) or "–"
