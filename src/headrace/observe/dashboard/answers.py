"""The dashboard's questions by name, for the server and for the export alike.

Aggregates are kept by the source until the run changes; trajectories are read when asked for.
Everything returned is JSON-compatible, finite and bounded.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import UserError
from headrace.observe.dashboard import curves, timeline, trajectories
from headrace.observe.dashboard.overview import overview
from headrace.observe.dashboard.source import RunSource
from headrace.observe.runs import Run
from headrace.rollout.record.browsing import BrowsingReader, SessionFilter

MAX_TEXT = 200
"""Longest text that can be searched for, in letters."""

Answer = Callable[[RunSource, Run], dict[str, Any]]

AGGREGATES: Mapping[str, Answer] = {
    "overview": lambda source, run: overview(run, source.last_change()),
    "learning": lambda _, run: curves.learning(run),
    "timeline": lambda _, run: timeline.timeline(run),
    "distributions": lambda _, run: curves.distributions(run),
    "failures": lambda _, run: curves.failures(run),
    "choices": lambda _, run: (
        run.ledger.choices() if isinstance(run.ledger, BrowsingReader) else {}
    ),
}
"""Questions about the whole run."""


def aggregate(source: RunSource, name: str) -> tuple[str, bytes]:
    """The version an answer is of, and the answer as JSON text.

    Raises:
        KeyError: no such question.
        UserError: a file of the run is damaged.
    """
    compute = AGGREGATES[name]
    return source.kept(name, lambda run: encode(compute(source, run)))


def page(
    source: RunSource, wanted: SessionFilter, before: int | None, limit: int
) -> dict[str, Any]:
    """A page of trajectories, newest first.

    Raises:
        UserError: text too long, or the ledger is damaged.
    """
    if len(wanted.text) > MAX_TEXT:
        raise UserError(f"text: {len(wanted.text)} letters; search for at most {MAX_TEXT}")
    ledger = source.ledger()
    if ledger is None:
        return {"rows": [], "next": None, "complete": True}
    found = ledger.page(wanted, before=before, limit=limit)
    return {
        "rows": [trajectories.row(summary) for summary in found.sessions],
        "next": found.next,
        "complete": found.complete,
    }


def trajectory(source: RunSource, session_id: str) -> dict[str, Any] | None:
    """One trajectory without its tokens; None when there is none of that id."""
    session = source.session(session_id)
    ledger = source.ledger()
    summary = None if ledger is None else ledger.find(session_id)
    if session is None or summary is None or ledger is None:
        return None
    return trajectories.detail(summary, session, ledger.call_fates(session_id))


def tokens(source: RunSource, session_id: str, segment: int, offset: int) -> dict[str, Any] | None:
    """Tokens of one segment; None when there are none."""
    session = source.session(session_id)
    ledger = source.ledger()
    summary = None if ledger is None else ledger.find(session_id)
    if session is None or summary is None or ledger is None:
        return None
    fates = ledger.call_fates(session_id)
    return trajectories.tokens(summary, session, fates, source.vocabulary(), segment, offset)


def encode(value: Any) -> bytes:
    """JSON text in ASCII, so that lone surrogates survive; numbers that are not finite are null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
