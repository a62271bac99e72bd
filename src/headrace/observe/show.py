"""`headrace show`: a run's summary, its trajectories, and one of them token by token.

Reads a run directory, prints to a rich console, changes nothing; safe beside a run in progress.
"""

from collections import Counter
from itertools import islice
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from headrace.errors import UserError
from headrace.observe.calls import call_nodes
from headrace.observe.conversation import conversation
from headrace.observe.fates import (
    failure_of,
    fate_words,
    short_fate,
    version_words,
)
from headrace.observe.laws import laws_of
from headrace.observe.measurements import Measure, aspects, latest, tabulate
from headrace.observe.runs import Run, find_session, open_run
from headrace.observe.show_failures import print_failures
from headrace.observe.units import (
    after_words,
    count,
    duration,
    interval,
    moment,
    percent,
    points,
    printable,
    short,
    supervised_numbers,
)
from headrace.observe.vocabulary import Vocabulary
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.rows import TRAIN, SessionSummary
from headrace.rollout.segments import segments
from headrace.rollout.types import ParseState, Segment, Session

LISTED = 200
"""Trajectories that `show RUN trajectories` prints, newest first."""
_TRAJECTORY_WORDS = ("trajectories", "trajectory ID")


def show_run(run_dir: Path, console: Console) -> None:
    """Print what a run is, how far it came and what it measured.

    Raises:
        UserError: no run there, or damaged files.
    """
    with open_run(run_dir) as run:
        _print_head(run, console)
        _print_stages(run, console)
        _print_measurements(run, console)
        _print_evaluations(run, console)
        _print_accounts(run, console)
        print_failures(run, console)
        _print_laws(run, console)
        more = [f"headrace report {run.path}"]
        if run.has_rollouts:
            more = [f"headrace show {run.path} {what}" for what in _TRAJECTORY_WORDS] + more
        console.print(
            Text.assemble(("More: ", "bold"), "; ".join(more), style="dim"), soft_wrap=True
        )


def list_trajectories(run_dir: Path, console: Console, limit: int = LISTED) -> None:
    """Print ids, outcomes and rewards of the newest trajectories.

    Raises:
        UserError: no run there, or it has no ledger.
    """
    with open_run(run_dir) as run:
        ledger = _require_ledger(run)
        total = sum(ledger.outcome_counts().values())
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        table.add_column("trajectory", no_wrap=True)
        for name in ("for", "family", "outcome"):
            table.add_column(name, overflow="fold")
        for name in ("reward", "tokens", "version"):
            table.add_column(name, justify="right")
        table.add_column("fate")
        for session in islice(ledger.sessions(newest_first=True), limit):
            table.add_row(
                Text(session.id),
                Text(session.stage if session.purpose == TRAIN else session.purpose),
                Text(str(session.instance.get("family", "–"))),
                Text(_outcome(session)),
                _reward(session),
                count(session.tokens),
                "–" if session.oldest_version is None else str(session.oldest_version),
                Text(short_fate(session)),
            )
        console.print(table)
        if total > limit:
            console.print(f"The newest {limit} of {count(total)} trajectories.", style="dim")


def show_trajectory(run_dir: Path, session_id: str, console: Console) -> None:
    """Print one trajectory token by token: position, id, text, mask, logprob and weight version.

    Args:
        run_dir: the run.
        session_id: an id, or the beginning of one that no other id shares.
        console: where to print.

    Raises:
        UserError: no run there, no ledger, or no such trajectory.
    """
    with open_run(run_dir) as run:
        ledger = _require_ledger(run)
        summary = find_session(ledger, session_id)
        session = ledger.session(summary.id)
        vocabulary = Vocabulary.of_run(run.path)
    _print_session_head(summary, session, console)
    for turn in conversation(session):
        note = f" ({turn.note})" if turn.note else ""
        console.print(Text(f"{turn.role}{note}", style=f"bold {_ROLE_STYLES.get(turn.role, '')}"))
        if turn.reasoning:
            console.print(Text(turn.reasoning, style="italic dim"))
        console.print(Text(turn.text), soft_wrap=True)
    found = segments(session)
    if vocabulary is None:
        console.print("No tokenizer in checkpoints/: ids are shown without text.", style="yellow")
    for index, segment in enumerate(found, start=1):
        console.print()
        console.rule(f"segment {index} of {len(found)}: {_segment_words(segment)}", align="left")
        if vocabulary is not None:
            console.print(_inline(segment, vocabulary), soft_wrap=True)
        console.print(_token_table(segment, vocabulary, summary))
    if not found:
        console.print("No token was sampled in this session.", style="dim")


def show_session(run_dir: Path, session_id: str, console: Console) -> None:
    """Print a session's calls as the tree they form: who continues whom, and why others fork.

    Args:
        run_dir: the run.
        session_id: an id, or the beginning of one that no other id shares.
        console: where to print.

    Raises:
        UserError: no run there, no ledger, or no such session.
    """
    with open_run(run_dir) as run:
        ledger = _require_ledger(run)
        summary = find_session(ledger, session_id)
        session = ledger.session(summary.id)
    _print_session_head(summary, session, console)
    console.print(call_tree(session))
    forks = Counter(call.fork_reason for call in session.calls if call.fork_reason)
    for reason, times in forks.most_common():
        console.print(f"{times} x {reason}", style="yellow", highlight=False)


def call_tree(session: Session) -> Tree:
    """The calls of a session under the calls they continue, in order."""
    root = Tree(Text(session.id, style="bold"))
    branches: dict[str, Tree] = {}
    for node in call_nodes(session):
        words = Text(f"call {node.index}  ")
        if node.model is not None:
            words.append(f"{printable(node.model)}: ", style="magenta")
        words.append(f"{node.held} held + {node.read} read, {node.sampled} sampled")
        words.append(f"  {node.finish_reason}", style="dim")
        if node.parse_state is not ParseState.OK:
            words.append(f"  {node.parse_state}", style="red")
        if node.fork_reason is not None:
            words.append(f"  fork: {node.fork_reason}", style="yellow")
        if node.versions:
            words.append("  " + ", ".join(f"v{version}" for version in node.versions), style="dim")
        branches[node.id] = branches.get(node.parent_id or "", root).add(words)
    return root


_ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def _require_ledger(run: Run) -> LedgerReader:
    if run.ledger is None:
        raise UserError(f"run {run.path}: no trajectories: {run.ledger_problem}")
    return run.ledger


# -- summary -------------------------------------------------------------------------------------


def _print_head(run: Run, console: Console) -> None:
    style = "green" if run.status in ("finished", "completed", "ok", "done") else "yellow"
    title = Text.assemble((run.name, "bold"), "  ", (run.status, f"bold {style}"))
    facts = [f"directory {run.path}"]
    seed = run.summary.get("seed", run.recipe.get("seed"))
    if seed is not None:
        facts.append(f"seed {seed}")
    if run.summary.get("wall_s") is not None:
        facts.append(f"wall clock {duration(float(run.summary['wall_s']))}")
    if run.summary.get("ended"):
        word = "as of" if run.status == "running" else "ended"
        facts.append(f"{word} {run.summary['ended']}")
    elif run.rows:
        facts.append(f"last metrics {moment(run.rows[-1].time)}")
    console.print(title)
    console.print(Text(" · ".join(facts), style="dim"), soft_wrap=True)


def _print_stages(run: Run, console: Console) -> None:
    table = _table("stage", "kind", right=("took", "step"), last=("last metrics",))
    for stage in run.stages():
        rows = run.rows_of(stage["name"])
        kind = str(stage.get("kind", "–"))
        newest = rows[-1].metrics if rows else {}
        if kind == "agentic_rl":
            names = ("reward_mean", "success_rate", "lag_mean", "trainer_busy", "engine_busy")
            words = ", ".join(f"{n} {short(newest[n])}" for n in names if n in newest)
        else:
            words = ", ".join(supervised_numbers(kind, newest, brief=True))
            skipped = sum(row.metrics.get("skipped", 0.0) for row in rows)
            words += f", skipped {count(skipped)}" if skipped else ""
        table.add_row(
            Text(str(stage["name"])),
            Text(kind),
            duration(stage["wall_s"]),
            count(rows[-1].step) if rows else "–",
            Text(words or ("not started" if stage["wall_s"] is None else "no step finished")),
        )
    console.print(table)


def _print_measurements(run: Run, console: Console) -> None:
    found = tabulate(run.measurements)
    if not found.rows:
        return
    table = _table("measured", right=(*found.stages, "95% (n)"))
    for row in found.rows:
        newest = latest(row)
        cells = [Text(row[stage].words if stage in row else "–") for stage in found.stages]
        sure = "" if newest.bounds is None else f"{interval(*newest.bounds)} "
        task = newest.task
        if newest.kind is Measure.RETRIEVAL:
            task = f"retrieval {newest.length}, {newest.short_task}"
        table.add_row(Text(task), *cells, Text(f"{sure}({count(newest.n)})"))
    console.print(table)
    for row in found.of_kind(Measure.CHAT):
        newest = latest(row)
        rates = ", ".join(f"{name} {percent(rate, 0)}" for name, rate in aspects(newest))
        if rates:
            words = f"chat format {after_words(newest.after)}: {rates}"
            console.print(words, style="dim", soft_wrap=True, highlight=False, markup=False)


def _print_evaluations(run: Run, console: Console) -> None:
    if not run.evaluations:
        if not run.measurements:
            console.print("No evaluation has finished.", style="dim")
        return
    table = _table("held-out success", right=("rate", "95% interval", "n", "3+ turns", "took"))
    for e in run.evaluations:
        ok, n = e.get("multi_turn") or (0, 0)
        table.add_row(
            run.label(e),
            Text(percent(e.get("success")), style="bold"),
            interval(e.get("low", 0.0), e.get("high", 1.0)),
            str(e.get("n", "–")),
            percent(ok / n) if n else "–",
            duration(e.get("wall_s")),
        )
    console.print(table)
    for c in run.comparisons():
        against = f"stage {c.rival} (same start)" if c.rival else run.label(c.before)
        console.print(
            Text.assemble(
                f"after {c.stage} against {against}: ",
                (f"{points(c.change.difference)} points", "bold"),
                f" (95% {points(c.change.low)} to {points(c.change.high)}, paired, "
                f"n={c.change.n}; {c.change.gained} learned, {c.change.lost} lost)",
            ),
            soft_wrap=True,
        )


def _print_accounts(run: Run, console: Console) -> None:
    if run.ledger is None or not run.has_rollouts:
        if run.missing_rollouts:
            console.print(f"No ledger: {run.missing_rollouts}.", style="dim", soft_wrap=True)
        return
    with run.ledger.snapshot():
        tokens = run.ledger.conservation()
        outcomes = run.ledger.outcome_counts()
        forks = run.ledger.fork_counts()
    table = _table("sampled tokens", right=("count", "share"))
    entries = [("sampled", tokens.sampled), ("trained", tokens.trained)]
    entries += [(f"not trained: {r.value}", n) for r, n in sorted(tokens.dropped.items())]
    if tokens.pending:
        entries.append(("pending", tokens.pending))
    for label, number in entries:
        share = percent(number / tokens.sampled) if tokens.sampled else "–"
        table.add_row(label, count(number), share)
    console.print(table)
    verdict = "closes" if tokens.closes else "DOES NOT CLOSE"
    words = ", ".join(f"{count(n)} {o}" for o, n in sorted(outcomes.items()))
    console.print(f"The ledger {verdict}. Sessions: {words or 'none'}.", soft_wrap=True)
    if forks:
        forked = ", ".join(f"{count(n)} {r}" for r, n in sorted(forks.items()))
        console.print(f"Forked calls: {forked}.", style="dim", soft_wrap=True)


def _print_laws(run: Run, console: Console) -> None:
    laws = laws_of(run.summary)
    if not run.has_rollouts and not run.missing_rollouts:
        # The audit is about rollouts; where none was meant to be, a law that holds says nothing.
        laws = [law for law in laws if not law[1]]
    if not laws:
        return
    line = Text("Laws: ")
    for law, held, detail in laws:
        line.append(f"{law} ", style="green" if held else "bold red")
        line.append("held  " if held else f"broken ({detail})  ", style="dim" if held else "red")
    console.print(line, soft_wrap=True)


def _table(*left: str, right: tuple[str, ...] = (), last: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(Text(name))
    for name in right:
        table.add_column(Text(name), justify="right")
    for name in last:
        table.add_column(Text(name))
    return table


# -- one trajectory ------------------------------------------------------------------------------


def _print_session_head(summary: SessionSummary, session: Session, console: Console) -> None:
    console.print(Text.assemble(("trajectory ", "dim"), (summary.id, "bold")))
    facts = [
        f"stage {summary.stage}",
        f"purpose {summary.purpose}",
        f"group {summary.group_id}",
        f"instance {printable(str(summary.instance))}",
    ]
    console.print(Text(" · ".join(facts), style="dim"), soft_wrap=True)
    verdict = [
        f"outcome {'open' if summary.outcome is None else summary.outcome.value}",
        *(f"{name} {value:g}" for name, value in sorted(summary.rewards.items())),
        f"{len(session.calls)} calls",
        f"{summary.tokens} tokens sampled",
        fate_words(summary),
    ]
    failure = failure_of(summary)
    if failure is not None and failure.value != summary.outcome:
        verdict.insert(1, f"failed: {failure}")
    if summary.reason:
        verdict.insert(1, f"({printable(summary.reason)})")
    console.print(Text(" · ".join(verdict)), soft_wrap=True)
    forks = [f"call {c.index}: {c.fork_reason}" for c in session.calls if c.fork_reason]
    if forks:
        console.print(Text("forked at " + "; ".join(forks), style="yellow"), soft_wrap=True)
    console.print()


def _segment_words(segment: Segment) -> str:
    trained = [i for i, masked in enumerate(segment.train_mask) if masked]
    newest = segment.newest_versions or segment.versions
    oldest = min(segment.versions[i] for i in trained)
    last = max(newest[i] for i in trained)
    spread = f"v{oldest}" if last == oldest else f"v{oldest} to v{last}"
    return f"{len(segment.ids)} tokens, {len(trained)} sampled, weights {spread}"


def _inline(segment: Segment, vocabulary: Vocabulary) -> Text:
    """The segment as running text: prompt dim, sampled tokens coloured by how likely they were.

    A character whose bytes span tokens appears with the token that completes it.
    """
    line = Text()
    texts = vocabulary.running(segment.ids)
    columns = zip(texts, segment.train_mask, segment.logprobs, segment.versions, strict=True)
    for text, masked, logprob, version in columns:
        style = _logprob_style(logprob) if version >= 0 else "dim"
        line.append(printable(text), style=f"underline {style}" if masked else style)
    return line


def _token_table(segment: Segment, vocabulary: Vocabulary | None, summary: SessionSummary) -> Table:
    # The mask says what would train; tokens of a session that was dropped never do.
    mask_word, mask_style = (
        ("train", "green") if summary.drop_reason is None else ("dropped", "red")
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right", style="dim")
    table.add_column("id", justify="right")
    table.add_column("text", no_wrap=True)
    table.add_column("mask")
    table.add_column("logprob", justify="right")
    table.add_column("version", justify="right")
    columns = zip(
        segment.ids,
        segment.train_mask,
        segment.logprobs,
        segment.versions,
        segment.newest_versions or segment.versions,
        strict=True,
    )
    for position, (token_id, masked, logprob, version, newest) in enumerate(columns):
        sampled = version >= 0
        words = "" if vocabulary is None else vocabulary.text(token_id)
        special = vocabulary is not None and vocabulary.is_special(token_id)
        style = _logprob_style(logprob) if sampled else "dim"
        table.add_row(
            str(position),
            str(token_id),
            Text(words if special else f"'{words}'", style="bold magenta" if special else style),
            Text(mask_word if masked else "–", style=mask_style if masked else "dim"),
            Text(f"{logprob:.4f}" if sampled else "–", style=style),
            version_words(version, newest) if sampled else "–",
        )
    return table


def _logprob_style(logprob: float) -> str:
    """Green for expected tokens, yellow for surprising ones, red for rare ones."""
    if logprob > -0.7:
        return "green"
    return "yellow" if logprob > -2.3 else "red"


def _outcome(session: SessionSummary) -> str:
    if session.outcome is None:
        return "open"
    failure = failure_of(session)
    return session.outcome.value if failure is None else failure.value


def _reward(session: SessionSummary) -> Text:
    if session.reward is None:
        return Text("–", style="dim")
    return Text(f"{session.reward:g}", style="green" if session.reward >= 1 else "red")
