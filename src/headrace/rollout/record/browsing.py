"""Questions that a person asks a ledger while looking around: pages, search, counts over time.

Every answer is bounded: pages have a limit, a search has a time budget and says where to go on,
counts are grouped. Beside `reading.LedgerReader`, which answers whole questions of programs.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import reasons_of
from headrace.rollout.record.evidence import decode_messages
from headrace.rollout.record.reading import (
    SESSION_SQL,
    LedgerReader,
    failure_named,
    session_summary,
)
from headrace.rollout.record.rows import TRAIN, SessionSummary
from headrace.rollout.types import DropReason, Outcome

MAX_PAGE = 200
"""Most sessions of one page."""
_CHUNK = 256
_MAX_REASON = 160
"""Letters of a reason that are compared; what follows is often unique to the rollout."""


class SessionFilter(msgspec.Struct, frozen=True):
    """Which sessions to list; None and "" set no condition.

    Attributes:
        stage, purpose, task, group: equal to.
        outcome: an outcome's value, or "open".
        fate: "trained", "pending", or the value of a `DropReason`.
        failure: counted by `LedgerReader.failure_counts` for this reason.
        min_reward, max_reward: inclusive; unscored sessions meet neither.
        forked: only sessions with a call that started a new branch.
        text: in the id, the instance, the reason, the names of failure reasons or anything that was
            said, in any case.
    """

    stage: str | None = None
    purpose: str | None = None
    task: str | None = None
    group: str | None = None
    outcome: str | None = None
    fate: str | None = None
    failure: FailureReason | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    forked: bool = False
    text: str = ""


class SessionPage(msgspec.Struct, frozen=True):
    """Sessions, newest first.

    Attributes:
        sessions: at most the limit.
        next: where to go on, for `before`; None when nothing is left.
        complete: False when the time budget ended before the limit was reached.
    """

    sessions: list[SessionSummary]
    next: int | None
    complete: bool


class RewardBucket(msgspec.Struct, frozen=True):
    """Scored training rollouts of one task that finished in one stretch of time.

    Attributes:
        stage, task: which.
        start, end: unix time, seconds.
        n: rollouts.
        total, squares: sums of their rewards and of the rewards' squares.
    """

    stage: str
    task: str
    start: float
    end: float
    n: int
    total: float
    squares: float


class FailureCount(msgspec.Struct, frozen=True):
    """Sessions that ended alike: outcome, the beginning of the reason, how many, the newest."""

    stage: str
    task: str
    outcome: str
    reason: str
    count: int
    newest_id: str


class CallFate(msgspec.Struct, frozen=True):
    """What became of one call: why its tokens do not train, whether it came after the end."""

    drop_reason: DropReason | None
    late: bool


class BrowsingReader(LedgerReader):
    """A ledger as people look at it. Use from one thread."""

    def changes(self) -> int:
        """A number that changes when another connection has committed something."""
        return self._store.execute("PRAGMA data_version")[0][0]

    def page(
        self,
        wanted: SessionFilter,
        *,
        before: int | None = None,
        limit: int = 50,
        budget_s: float = 1.0,
    ) -> SessionPage:
        """A page of sessions, newest first.

        Args:
            wanted: conditions, all of which hold.
            before: `SessionPage.next` of the page before.
            limit: sessions, 1 to MAX_PAGE.
            budget_s: about how long a search for text may take, seconds.

        Raises:
            UserError: a stored call is damaged.
        """
        limit = max(1, min(limit, MAX_PAGE))
        where, values = _conditions(wanted)
        if wanted.failure is not None:
            failed, those = self._failed(wanted.failure)
            where, values = f"{where} AND ({failed})", [*values, *those]
        needle = wanted.text.strip().lower()
        chunk = _CHUNK if needle else limit + 1
        last = 2**62 if before is None else before
        deadline = time.monotonic() + budget_s
        found: list[SessionSummary] = []
        while True:
            rows = self._store.execute(
                f"{SESSION_SQL} WHERE {where} AND s.key < ? ORDER BY s.key DESC LIMIT ?",
                (*values, last, chunk),
            )
            said = self._said(rows, needle) if needle else set()
            for row in rows:
                if len(found) == limit:
                    return SessionPage(found, last, True)
                last = row[0]
                summary = session_summary(row)
                if not needle or last in said or _about(summary, needle):
                    found.append(summary)
            if len(rows) < chunk:
                return SessionPage(found, None, True)
            if time.monotonic() > deadline:
                return SessionPage(found, last, False)

    def find(self, session_id: str) -> SessionSummary | None:
        """The session of that very id, without its calls."""
        rows = self._store.execute(SESSION_SQL + " WHERE s.id = ?", (session_id,))
        return session_summary(rows[0]) if rows else None

    def call_fates(self, session_id: str) -> dict[str, CallFate]:
        """What became of a session's calls, by call id."""
        rows = self._store.execute(
            "SELECT c.id, c.drop_reason, c.late FROM calls c JOIN sessions s ON s.key = c.session "
            "WHERE s.id = ?",
            (session_id,),
        )
        return {
            name: CallFate(None if reason is None else DropReason(reason), bool(late))
            for name, reason, late in rows
        }

    def choices(self) -> dict[str, dict[str, int]]:
        """Values that conditions of `page` may take here, with the number of sessions of each.

        Keys: "stage", "purpose", "outcome", "task" and "fate", each of which every session has, and
        "failure", of which it may have none or several; evaluations are a purpose, no failure.
        """
        found: dict[str, dict[str, int]] = {"stage": {}, "purpose": {}, "outcome": {}}
        with self.snapshot():
            for stage, purpose, outcome, number in self._store.execute(
                "SELECT stage, purpose, COALESCE(outcome, 'open'), COUNT(*) FROM sessions "
                "GROUP BY 1, 2, 3"
            ):
                for name, value in (("stage", stage), ("purpose", purpose), ("outcome", outcome)):
                    found[name][value] = found[name].get(value, 0) + number
            found["task"] = dict(
                self._store.execute("SELECT task, SUM(size) FROM groups GROUP BY 1 ORDER BY 1")
            )
            found["fate"] = dict(
                self._store.execute(
                    "SELECT COALESCE(s.drop_reason, CASE WHEN b.step IS NULL THEN 'pending' "
                    "ELSE 'trained' END), COUNT(*) FROM sessions s LEFT JOIN batch_members m "
                    "ON m.session = s.key LEFT JOIN batches b ON b.stage = m.stage "
                    "AND b.idx = m.batch GROUP BY 1 ORDER BY 2 DESC"
                )
            )
            found["failure"] = {
                reason.value: number
                for reason, number in self.failure_counts().items()
                if reason is not FailureReason.EVALUATION
            }
        return found

    def reward_buckets(self, buckets: int = 60) -> list[RewardBucket]:
        """Scored training rollouts over time, each stage's time in `buckets` equal stretches."""
        result: list[RewardBucket] = []
        with self.snapshot():
            for stage, first, last in self._store.execute(
                "SELECT stage, MIN(finished_at), MAX(finished_at) FROM sessions "
                "WHERE purpose = ? AND reward IS NOT NULL GROUP BY stage",
                (TRAIN,),
            ):
                width = max((last - first) / buckets, 1e-3)
                rows = self._store.execute(
                    "SELECT g.task, MIN(CAST((s.finished_at - ?1) / ?2 AS INTEGER), ?3), "
                    "COUNT(*), SUM(s.reward), SUM(s.reward * s.reward) FROM sessions s "
                    "JOIN groups g ON g.id = s.group_id "
                    "WHERE s.stage = ?4 AND s.purpose = ?5 AND s.reward IS NOT NULL "
                    "GROUP BY 1, 2 ORDER BY 1, 2",
                    (first, width, buckets - 1, stage, TRAIN),
                )
                for task, index, n, total, squares in rows:
                    start = first + index * width
                    result.append(
                        RewardBucket(stage, task, start, start + width, n, total, squares)
                    )
        return result

    def failures(self, limit: int = 100) -> list[FailureCount]:
        """Ends other than "ok" by reason, most frequent first."""
        return self._ends("s.outcome <> 'ok'", limit)

    def verdicts(self, limit: int = 20) -> list[FailureCount]:
        """What stands beside an "ok", such as what was wrong with an answer; likewise."""
        return self._ends("s.outcome = 'ok' AND s.reason <> ''", limit)

    def _ends(self, condition: str, limit: int) -> list[FailureCount]:
        rows = self._store.execute(
            "SELECT s.stage, g.task, s.outcome, SUBSTR(s.reason, 1, ?), COUNT(*), MAX(s.key) "
            f"FROM sessions s JOIN groups g ON g.id = s.group_id WHERE {condition} "
            "GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC, 6 DESC LIMIT ?",
            (_MAX_REASON, limit),
        )
        found: list[FailureCount] = []
        for stage, task, outcome, reason, number, newest in rows:
            ((newest_id,),) = self._store.execute(
                "SELECT id FROM sessions WHERE key = ?", (newest,)
            )
            found.append(FailureCount(stage, task, outcome, reason, number, newest_id))
        return found

    def _failed(self, reason: FailureReason) -> tuple[str, list[Any]]:
        """A condition on sessions that say `reason` of themselves, and its values.

        What a session says is decided by `reasons_of`, so the combinations that occur are asked.
        """
        conditions: list[str] = []
        values: list[Any] = []
        for ended in self._store.execute(
            "SELECT DISTINCT outcome, failure, drop_reason FROM sessions"
        ):
            outcome, failure, dropped = ended
            if reason in reasons_of(
                None if outcome is None else Outcome(outcome),
                failure_named(failure),
                None if dropped is None else DropReason(dropped),
            ):
                conditions.append("(s.outcome IS ? AND s.failure IS ? AND s.drop_reason IS ?)")
                values += ended
        if reason.value in tuple(DropReason):
            conditions.append(
                "EXISTS (SELECT 1 FROM calls f WHERE f.session = s.key AND f.drop_reason = ?)"
            )
            values.append(reason.value)
        return " OR ".join(conditions) or "FALSE", values

    def _said(self, rows: Sequence[tuple[Any, ...]], needle: str) -> set[int]:
        """Keys of the sessions in which `needle` was said."""
        if not rows:
            return set()
        # Plain ASCII stands in the stored JSON as it is, so most calls need not be decoded.
        plain = needle.encode() if needle.isascii() and _needs_no_escape(needle) else None
        marks = ",".join("?" * len(rows))
        found: set[int] = set()
        for key, call, body in self._store.execute(
            f"SELECT session, id, body FROM calls WHERE session IN ({marks})",
            [row[0] for row in rows],
        ):
            if key in found or (plain is not None and plain not in body.lower()):
                continue
            try:
                messages = decode_messages(body)
            except ValueError as error:
                raise UserError(
                    f"ledger {self._store.path} is damaged at call {call} ({error}); "
                    "restore it from a copy"
                ) from error
            if any(needle in text.lower() for text in _texts(messages)):
                found.add(key)
        return found


def _conditions(wanted: SessionFilter) -> tuple[str, list[Any]]:
    conditions, values = ["TRUE"], []
    for condition, value in (
        ("s.stage = ?", wanted.stage),
        ("s.purpose = ?", wanted.purpose),
        ("g.task = ?", wanted.task),
        ("s.group_id = ?", wanted.group),
        ("s.outcome = ?", None if wanted.outcome == "open" else wanted.outcome),
        ("s.reward >= ?", wanted.min_reward),
        ("s.reward <= ?", wanted.max_reward),
    ):
        if value is not None and value != "":
            conditions.append(condition)
            values.append(value)
    if wanted.outcome == "open":
        conditions.append("s.outcome IS NULL")
    if wanted.fate == "trained":
        conditions.append("b.step IS NOT NULL")
    elif wanted.fate == "pending":
        conditions.append("s.drop_reason IS NULL AND b.step IS NULL")
    elif wanted.fate:
        conditions.append("s.drop_reason = ?")
        values.append(wanted.fate)
    if wanted.forked:
        conditions.append(
            "EXISTS (SELECT 1 FROM calls f WHERE f.session = s.key AND f.fork_reason IS NOT NULL)"
        )
    return " AND ".join(conditions), values


def _about(summary: SessionSummary, needle: str) -> bool:
    facts = [summary.id, summary.reason, json.dumps(summary.instance, ensure_ascii=False)]
    facts += reasons_of(summary.outcome, summary.failure, summary.drop_reason)
    return any(needle in fact.lower() for fact in facts)


def _needs_no_escape(text: str) -> bool:
    return json.dumps(text)[1:-1] == text


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Every text in JSON values but the names of fields and roles; arguments of tools decoded."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
            if value[:1] in "{[" and value:
                try:
                    waiting.append([json.loads(value)])
                except (ValueError, RecursionError):
                    continue  # a text that only begins like JSON
        elif isinstance(value, dict):
            waiting += [
                inner for name, inner in value.items() if name not in ("role", "type", "id")
            ]
        elif isinstance(value, list):
            waiting += value
