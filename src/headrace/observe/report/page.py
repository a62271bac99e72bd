"""Puts the report together from its sections and writes it. Works for runs in any state."""

import os
from html import escape
from importlib.resources import files
from pathlib import Path

from headrace.observe.disk import full_disk
from headrace.observe.report.chat_examples import chat_section
from headrace.observe.report.evidence import (
    configuration_section,
    ledger_section,
    trajectory_section,
)
from headrace.observe.report.language import measurement_section
from headrace.observe.report.results import headline_section, results_section
from headrace.observe.report.supervised import supervised_section
from headrace.observe.report.training import rl_section, time_section
from headrace.observe.runs import Run, open_run
from headrace.observe.units import duration

FILE_NAME = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory from what is there, and return its path.

    Raises:
        UserError: no run there, damaged files, or the disk is full.
    """
    with open_run(run_dir) as run:
        page = render_report(run)
        target = run.path / FILE_NAME
    staged = target.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        # A recipe may quote what is no Unicode, e.g. a file name.
        staged.write_text(page, encoding="utf-8", errors="backslashreplace")
        staged.replace(target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise full_disk(error, target) from error
    return target


def render_report(run: Run) -> str:
    """The whole page as HTML."""
    sections = [
        headline_section(run),
        results_section(run),
        measurement_section(run),
        chat_section(run),
        supervised_section(run),
        rl_section(run),
        time_section(run),
        ledger_section(run),
        trajectory_section(run),
        configuration_section(run),
    ]
    style = files("headrace.observe.report").joinpath("page.css").read_text(encoding="utf-8")
    title = f"{run.name} · headrace report"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"{_header(run)}<main>{''.join(sections)}</main>"
        "<footer>Written by headrace from the run directory alone. Intervals are 95%: Wilson for "
        "rates, Newcombe&rsquo;s paired method for differences.</footer></body></html>\n"
    )


def _header(run: Run) -> str:
    facts = [f"<b class='status {_tone(run.status)}'>{escape(run.status)}</b>"]
    if run.summary.get("ended"):
        word = "as of" if run.status == "running" else "ended"
        facts.append(f"{word} {escape(str(run.summary['ended']))}")
    if run.summary.get("wall_s") is not None:
        facts.append(f"{duration(float(run.summary['wall_s']))} wall clock")
    seed = run.summary.get("seed", run.recipe.get("seed"))
    if seed is not None:
        facts.append(f"seed {escape(str(seed))}")
    facts.append(f"<code>{escape(run.path.name)}</code>")
    about = str(run.recipe.get("description") or "")
    lead = f"<p class='about'>{escape(about)}</p>" if about else ""
    return (
        f"<header><p class='brand'>headrace</p><h1>{escape(run.name)}</h1>{lead}"
        f"<p class='facts'>{' · '.join(facts)}</p></header>"
    )


def _tone(status: str) -> str:
    words = status.lower()
    if any(word in words for word in ("fail", "crash", "broken", "error")):
        return "bad"
    return "good" if words in ("finished", "completed", "complete", "done", "ok") else "open"
