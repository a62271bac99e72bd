"""What proves it: token accounting, laws, trajectories to read, and the recipe and machine."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from headrace.observe.conversation import Turn, conversation
from headrace.observe.laws import LAWS, laws_of
from headrace.observe.machine import describe_machine
from headrace.observe.report.markup import Cell, badge, details, number, section, table, text
from headrace.observe.runs import Run
from headrace.observe.samples import SamplePair, sample_pairs
from headrace.observe.units import count, percent, readable
from headrace.rollout.evaluation import STAGE as EVALUATION_STAGE
from headrace.rollout.record.rows import SessionSummary

_TEXT_LIMIT = 1600
"""Characters shown per message; the ledger has the rest."""


def ledger_section(run: Run) -> str:
    """Where every sampled token went, how sessions ended, and which laws were audited."""
    parts: list[str] = []
    if run.has_rollouts:
        assert run.ledger is not None
        with run.ledger.snapshot():
            parts += ["<h3>Sampled tokens</h3>", _conservation_table(run)]
            parts += ["<h3>How sessions ended</h3>", _outcome_table(run)]
    elif run.missing_rollouts:
        parts.append(f"<p class='intro'>No ledger: {escape(run.missing_rollouts)}.</p>")
    laws = laws_of(run.summary)
    # The audit is about rollouts; where none was meant to be, a law that holds says nothing.
    if laws and (parts or not all(held for _, held, _ in laws)):
        rows: list[list[Cell]] = [
            [
                text(law),
                (badge("held", "good") if held else badge("broken", "bad"), ""),
                text(LAWS.get(law, "")),
                text(detail, "dim"),
            ]
            for law, held, detail in laws
        ]
        head = [text("law"), text("audit"), text("says"), text("detail")]
        parts += ["<h3>Laws audited in this run</h3>", table(head, rows)]
    return section("Accounting", *parts)


def _conservation_table(run: Run) -> str:
    assert run.ledger is not None
    whole = run.ledger.conservation()
    names = [*(str(s["name"]) for s in run.stages()), EVALUATION_STAGE]
    columns = [("whole run", whole)]
    by_stage = [(name, run.ledger.conservation(name)) for name in names]
    columns += [(name, c) for name, c in by_stage if c.sampled]
    if len(columns) == 2 and columns[1][1].sampled == whole.sampled:
        columns = columns[1:]
    head = [text("tokens"), *(number(name) for name, _ in columns)]
    rows: list[list[Cell]] = [
        [("<b>sampled</b>", ""), *((f"<b>{count(c.sampled)}</b>", "n") for _, c in columns)],
        [text("trained"), *(number(_share(c.trained, c.sampled)) for _, c in columns)],
    ]
    for reason in sorted({r for _, c in columns for r in c.dropped}, key=lambda r: r.value):
        words = f"not trained: {reason.value.replace('_', ' ')}"
        cells = [number(_share(c.dropped.get(reason, 0), c.sampled)) for _, c in columns]
        rows.append([text(words), *cells])
    if any(c.pending for _, c in columns):
        rows.append([text("pending"), *(number(_share(c.pending, c.sampled)) for _, c in columns)])
    verdicts = [badge("closes", "good") if c.closes else badge("open", "bad") for _, c in columns]
    rows.append([text("sampled = trained + reasons + pending"), *((v, "n") for v in verdicts)])
    return table(head, rows)


def _share(part: int, whole: int) -> str:
    return f"{count(part)} ({percent(part / whole)})" if whole and part else count(part)


def _outcome_table(run: Run) -> str:
    assert run.ledger is not None
    counts = {
        "training": run.ledger.outcome_counts(purpose="train"),
        "whole run": run.ledger.outcome_counts(),
    }
    outcomes = sorted({o for c in counts.values() for o in c})
    head = [text("outcome"), number("training"), number("training and evaluation")]
    rows: list[list[Cell]] = [
        [text(o.replace("_", " ")), *(number(count(c.get(o, 0))) for c in counts.values())]
        for o in outcomes
    ]
    return table(head, rows, "narrow")


def trajectory_section(run: Run) -> str:
    """Three instances as the model attempted them before and after the last RL stage."""
    if run.ledger is None:
        return ""
    pairs = sample_pairs(run)
    if not pairs:
        return ""
    paired = any(p.before is not None for p in pairs)
    intro = (
        "The same held-out instances, before and after reinforcement learning. Chosen by rule, "
        "not by hand: two that were learned and one that still fails, where such exist."
        if paired
        else "Rollouts of this run; no instance was measured both before and after."
    )
    return section("Trajectories", *(_pair(run, pair) for pair in pairs), intro=intro)


def _pair(run: Run, pair: SamplePair) -> str:
    instance = pair.after.instance
    facts = [f"{k} {instance[k]}" for k in ("family", "level", "seed") if k in instance]
    if pair.before is None:
        columns = _attempt(run, pair.after, "")
    else:
        columns = _attempt(run, pair.before, "before") + _attempt(run, pair.after, "after")
    return (
        f"<article><h3>{escape(', '.join(facts) or 'instance')}</h3>"
        f"<div class='attempts'>{columns}</div></article>"
    )


def _attempt(run: Run, summary: SessionSummary, label: str) -> str:
    assert run.ledger is not None
    turns = conversation(run.ledger.session(summary.id))
    reward = "no reward" if summary.reward is None else f"reward {summary.reward:g}"
    tone = "good" if (summary.reward or 0) >= 1 else "bad" if summary.reward is not None else "open"
    outcome = "" if summary.outcome is None else summary.outcome.value.replace("_", " ")
    why = f" · {escape(readable(summary.reason))}" if summary.reason else ""
    title = f"<b>{escape(label)}</b> " if label else ""
    return (
        f"<div class='attempt'><p class='verdict'>{title}{badge(reward, tone)} "
        f"<span class='dim'>{escape(outcome)}{why} · {summary.tokens} tokens sampled · "
        f"<code>{escape(summary.id)}</code></span></p>{_turns(turns)}</div>"
    )


def _turns(turns: Sequence[Turn]) -> str:
    shown: list[str] = []
    for turn in turns:
        if turn.role == "system":
            shown.append(details("system prompt", f"<pre>{escape(_cut(turn.text))}</pre>"))
            continue
        note = f" <i>{escape(turn.note)}</i>" if turn.note else ""
        thinking = (
            details("thinking", f"<pre>{escape(_cut(turn.reasoning))}</pre>")
            if turn.reasoning
            else ""
        )
        body = escape(_cut(turn.text)) or "<span class='dim'>(empty)</span>"
        shown.append(
            f"<div class='turn {escape(turn.role)}'><span class='role'>{escape(turn.role)}{note}"
            f"</span>{thinking}<pre>{body}</pre></div>"
        )
    return "".join(shown) or "<p class='dim'>No call was made.</p>"


def _cut(words: str) -> str:
    if len(words) <= _TEXT_LIMIT:
        return words
    return f"{words[:_TEXT_LIMIT]}\n… {len(words) - _TEXT_LIMIT:,} more characters"


def configuration_section(run: Run) -> str:
    """The recipe as it was resolved, and the machine."""
    recorded = run.summary.get("machine")
    machine: dict[str, Any]
    if isinstance(recorded, dict):
        machine, whose = recorded, "Machine"
    elif recorded:
        machine, whose = {"machine": recorded}, "Machine"
    else:
        machine, whose = dict(describe_machine()), "Machine that wrote this report"
    rows: list[list[Cell]] = [[text(k.replace("_", " ")), text(v)] for k, v in machine.items()]
    parts = [f"<h3>{whose}</h3>", table([text("part"), text("what")], rows)]
    if run.recipe:
        body = json.dumps(run.recipe, indent=2, ensure_ascii=False)
        parts.append(details("The resolved recipe", f"<pre>{escape(body)}</pre>"))
    return section("Recipe and machine", *parts)
