"""Questions to a ledger: evidence, counts, token conservation, time series. It writes nothing.

`LedgerReader.open` serves reports, also beside a run in progress; `ledger.Ledger` adds the writing.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.errors import UserError
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import reasons_of
from headrace.rollout.groups import ScoredRollout
from headrace.rollout.record.evidence import CallColumns, decode_call, decode_json, decode_spans
from headrace.rollout.record.rows import (
    TRAIN,
    Batch,
    BatchMember,
    Conservation,
    Evaluation,
    Publication,
    RewardPoint,
    SessionSummary,
    StageRecord,
)
from headrace.rollout.record.store import Store
from headrace.rollout.staleness import lag
from headrace.rollout.types import Call, DropReason, Outcome, Session

FILE_NAME = "ledger.sqlite"
"""The ledger's name in a run directory."""

VERSION_STATE = "version"
"""State under which a run keeps the newest weight version it ever used."""

_PAGE = 256  # sessions fetched at once, so that iterating neither holds everything nor a cursor

SESSION_SQL = """SELECT s.key, s.id, s.stage, s.purpose, g.task, g.instance, s.group_id, s.outcome,
    s.reason, s.reward, s.rewards, s.detail, s.drop_reason, m.batch, m.advantage, b.step,
    s.dispatched_at, s.finished_at,
    (SELECT COUNT(*) FROM calls c WHERE c.session = s.key),
    (SELECT COALESCE(SUM(c.tokens), 0) FROM calls c WHERE c.session = s.key),
    (SELECT MIN(c.oldest) FROM calls c WHERE c.session = s.key), s.failure
    FROM sessions s JOIN groups g ON g.id = s.group_id
    LEFT JOIN batch_members m ON m.session = s.key
    LEFT JOIN batches b ON b.stage = m.stage AND b.idx = m.batch"""

TRAINED_SQL = """FROM calls c JOIN sessions s ON s.key = c.session
    JOIN batch_members m ON m.session = c.session
    JOIN batches b ON b.stage = m.stage AND b.idx = m.batch
    WHERE b.step IS NOT NULL AND c.drop_reason IS NULL AND (?1 IS NULL OR s.stage = ?1)"""


class LedgerReader:
    """A ledger, read only. Methods may be called from one thread.

    Reads see the newest committed state; use `snapshot` for several that must agree.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open for reading, also while a run writes.

        Args:
            path: the ledger file, or the run directory that holds it.

        Raises:
            UserError: none there, damaged, foreign, or of a newer schema.
        """
        return cls(Store.read(ledger_file(path)))

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads inside see one moment of the ledger."""
        with self._store.snapshot():
            yield

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT, for modules that know the tables as this one does."""
        return self._store.execute(sql, parameters)

    # --- evidence ---------------------------------------------------------------------------

    def session(self, session_id: str) -> Session:
        """Full evidence of one session: every call, also those that arrived late.

        Raises:
            KeyError: unknown session.
            UserError: its stored bytes are damaged.
        """
        return self._session(session_id, late_calls=True)

    def trainable(self, session_id: str) -> Session:
        """The session as the trainer may see it: without calls that arrived after its end.

        Raises:
            KeyError: unknown session.
            UserError: its stored bytes are damaged.
        """
        return self._session(session_id, late_calls=False)

    def _session(self, session_id: str, *, late_calls: bool) -> Session:
        rows = self._store.execute(SESSION_SQL + " WHERE s.id = ?", (session_id,))
        if not rows:
            raise KeyError(f"no session {session_id!r} in {self._store.path}")
        row = rows[0]
        summary = session_summary(row)
        return Session(
            id=summary.id,
            stage=summary.stage,
            purpose=summary.purpose,
            task=summary.task,
            instance=summary.instance,
            group_id=summary.group_id,
            outcome=summary.outcome,
            reason=summary.reason,
            rewards=summary.rewards,
            failure=summary.failure,
            calls=tuple(self._calls(row[0], session_id, late_calls)),
        )

    def _calls(self, key: int, session_id: str, late_calls: bool) -> list[Call]:
        rows = self._store.execute(
            "SELECT c.id, c.idx, c.parent, c.fork_reason, c.finish_reason, c.parse_state, t.body, "
            "c.late, c.body FROM calls c JOIN tools t ON t.key = c.tools WHERE c.session = ? "
            "ORDER BY c.key",  # order of arrival: a parent comes before its children
            (key,),
        )
        messages: dict[str | None, list[dict[str, Any]]] = {None: []}
        calls = []
        for call_id, index, parent, fork, finish, parse, tools, late, body in rows:
            columns = CallColumns(call_id, session_id, index, parent, fork, finish, parse, tools)
            try:
                call = decode_call(columns, body, messages[parent])
            except (ValueError, KeyError) as error:
                raise UserError(
                    f"ledger {self._store.path} is damaged at call {call_id} ({error}); "
                    "restore it from a copy"
                ) from error
            messages[call_id] = call.messages
            if late_calls or not late:
                calls.append(call)
        return sorted(calls, key=lambda call: call.index)

    def sessions(
        self,
        *,
        stage: str | None = None,
        purpose: str | None = None,
        task: str | None = None,
        outcome: Outcome | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Iterator[SessionSummary]:
        """Sessions in order of dispatch that meet every condition given, without their calls."""
        conditions, values = ["TRUE"], []
        for condition, value in (
            ("s.stage = ?", stage),
            ("s.purpose = ?", purpose),
            ("g.task = ?", task),
            ("s.outcome = ?", outcome),
            ("s.reward >= ?", min_reward),
            ("s.reward <= ?", max_reward),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        order, beyond = ("DESC", "s.key < ?") if newest_first else ("ASC", "s.key > ?")
        last = 2**62 if newest_first else -1
        left = 2**62 if limit is None else limit
        where = " AND ".join([*conditions, beyond])
        while left > 0:
            rows = self._store.execute(
                f"{SESSION_SQL} WHERE {where} ORDER BY s.key {order} LIMIT ?",
                (*values, last, min(left, _PAGE)),
            )
            for row in rows:
                yield session_summary(row)
            if len(rows) < _PAGE:
                return
            last, left = rows[-1][0], left - len(rows)

    def rollouts(self, group_id: str) -> tuple[ScoredRollout, ...]:
        """The group's finished members as `groups.advantages` wants them, in order of dispatch.

        Rollouts lost in a crash and replaced since are not members.
        """
        rows = self._store.execute(
            "SELECT id, outcome, reward, failure FROM sessions WHERE group_id = ? "
            "AND replaced = 0 AND outcome IS NOT NULL ORDER BY key",
            (group_id,),
        )
        return tuple(
            ScoredRollout(name, Outcome(outcome), reward, failure_named(failure))
            for name, outcome, reward, failure in rows
        )

    def attempts(self, group_id: str) -> int:
        """Sessions that were dispatched for the group so far, lost ones included."""
        ((count,),) = self._store.execute(
            "SELECT COUNT(*) FROM sessions WHERE group_id = ?", (group_id,)
        )
        return count

    def retried(self, group_id: str) -> int:
        """How many finished sessions of a group were attempted again by a rule of the recipe."""
        ((count,),) = self._store.execute(
            "SELECT COUNT(*) FROM sessions WHERE group_id = ? AND replaced = 1 AND outcome != ?",
            (group_id, Outcome.CANCELLED),
        )
        return count

    # --- accounting -------------------------------------------------------------------------

    def conservation(self, stage: str | None = None) -> Conservation:
        """Where the sampled tokens are (law L2), of one stage or of the run.

        The four numbers come from different tables: members of committed batches, reasons, and
        what has neither, so that a token in two places or in none shows.
        """
        with self.snapshot():
            ((sampled,),) = self._store.execute(
                "SELECT COALESCE(SUM(c.tokens), 0) FROM calls c JOIN sessions s "
                "ON s.key = c.session WHERE ?1 IS NULL OR s.stage = ?1",
                (stage,),
            )
            ((trained,),) = self._store.execute(
                f"SELECT COALESCE(SUM(c.tokens), 0) {TRAINED_SQL}", (stage,)
            )
            dropped = self._store.execute(
                "SELECT COALESCE(c.drop_reason, s.drop_reason) AS why, SUM(c.tokens) FROM calls c "
                "JOIN sessions s ON s.key = c.session WHERE why IS NOT NULL "
                "AND (?1 IS NULL OR s.stage = ?1) GROUP BY why ORDER BY why",
                (stage,),
            )
            ((pending,),) = self._store.execute(
                "SELECT COALESCE(SUM(c.tokens), 0) FROM calls c JOIN sessions s "
                "ON s.key = c.session LEFT JOIN batch_members m ON m.session = s.key "
                "LEFT JOIN batches b ON b.stage = m.stage AND b.idx = m.batch "
                "WHERE c.drop_reason IS NULL AND s.drop_reason IS NULL AND b.step IS NULL "
                "AND (?1 IS NULL OR s.stage = ?1)",
                (stage,),
            )
        return Conservation(
            sampled,
            trained,
            {DropReason(name): tokens for name, tokens in dropped if tokens},
            pending,
        )

    def outcome_counts(
        self, stage: str | None = None, purpose: str | None = None
    ) -> dict[str, int]:
        """Sessions by outcome; open ones under "open"."""
        return dict(
            self._store.execute(
                "SELECT COALESCE(outcome, 'open'), COUNT(*) FROM sessions WHERE "
                "(?1 IS NULL OR stage = ?1) AND (?2 IS NULL OR purpose = ?2) GROUP BY 1 ORDER BY 1",
                (stage, purpose),
            )
        )

    def drop_counts(self, stage: str | None = None) -> dict[DropReason, int]:
        """Whole sessions by the reason why they do not train."""
        rows = self._store.execute(
            "SELECT drop_reason, COUNT(*) FROM sessions WHERE drop_reason IS NOT NULL AND "
            "(?1 IS NULL OR stage = ?1) GROUP BY 1 ORDER BY 1",
            (stage,),
        )
        return {DropReason(name): count for name, count in rows}

    def failure_counts(self, stage: str | None = None) -> dict[FailureReason, int]:
        """Sessions by everything that keeps them from being clean samples, most frequent first.

        A session may count twice: for how it ended, and for why it does not train. Sessions that
        only lack some calls count for the reason of these.
        """
        counts: Counter[FailureReason] = Counter()
        with self.snapshot():
            for outcome, failure, dropped, number in self._store.execute(
                "SELECT outcome, failure, drop_reason, COUNT(*) FROM sessions WHERE "
                "(?1 IS NULL OR stage = ?1) AND (outcome != ?2 OR failure IS NOT NULL OR "
                "drop_reason IS NOT NULL) GROUP BY 1, 2, 3",
                (stage, Outcome.OK),
            ):
                for reason in reasons_of(
                    None if outcome is None else Outcome(outcome),
                    failure_named(failure),
                    None if dropped is None else DropReason(dropped),
                ):
                    counts[reason] += number
            for dropped, number in self._store.execute(
                "SELECT c.drop_reason, COUNT(DISTINCT c.session) FROM calls c JOIN sessions s "
                "ON s.key = c.session WHERE c.drop_reason IS NOT NULL AND s.drop_reason IS NOT "
                "c.drop_reason AND (?1 IS NULL OR s.stage = ?1) GROUP BY 1",
                (stage,),
            ):
                counts[FailureReason(dropped)] += number
        return dict(counts.most_common())

    def fork_counts(self, stage: str | None = None) -> dict[str, int]:
        """Calls that started a new branch in their session, by reason."""
        return dict(
            self._store.execute(
                "SELECT c.fork_reason, COUNT(*) FROM calls c JOIN sessions s ON s.key = c.session "
                "WHERE c.fork_reason IS NOT NULL AND (?1 IS NULL OR s.stage = ?1) "
                "GROUP BY 1 ORDER BY 1",
                (stage,),
            )
        )

    def staleness_histogram(self, stage: str | None = None) -> dict[int, int]:
        """Trained tokens by their lag in publications when their batch was cut."""
        counts: dict[int, int] = defaultdict(int)
        mixed = []
        for key, version, oldest, newest, tokens in self._store.execute(
            f"SELECT c.key, b.version, c.oldest, c.newest, c.tokens {TRAINED_SQL} AND c.tokens > 0",
            (stage,),
        ):
            if oldest == newest:
                counts[lag(version, [oldest])] += tokens
            else:
                mixed.append((key, version))
        for key, version in mixed:
            ((body,),) = self._store.execute("SELECT body FROM calls WHERE key = ?", (key,))
            for span in decode_spans(body):
                counts[lag(version, [span.weight_version])] += len(span.ids)
        return dict(sorted(counts.items()))

    def reward_series(self, stage: str, purpose: str = TRAIN) -> list[RewardPoint]:
        """Every scored rollout of a stage in the order they finished."""
        rows = self._store.execute(
            "SELECT s.finished_at, s.reward, "
            "(SELECT MIN(c.oldest) FROM calls c WHERE c.session = s.key), s.id FROM sessions s "
            "WHERE s.stage = ? AND s.purpose = ? AND s.reward IS NOT NULL "
            "ORDER BY s.finished_at, s.key",
            (stage, purpose),
        )
        return [RewardPoint(*row) for row in rows]

    # --- the stage's record -----------------------------------------------------------------

    def batches(self, stage: str, *, uncommitted_only: bool = False) -> list[Batch]:
        """The batches of a stage with their members, in order of index."""
        members: dict[int, list[BatchMember]] = defaultdict(list)
        excluded: dict[str, dict[str, DropReason]] = defaultdict(dict)
        condition = "b.stage = ? AND (b.step IS NULL OR NOT ?)"
        values = (stage, uncommitted_only)
        with self.snapshot():
            for session_id, call_id, reason in self._store.execute(
                "SELECT s.id, c.id, c.drop_reason FROM calls c "
                "JOIN sessions s ON s.key = c.session JOIN batch_members m ON m.session = s.key "
                "JOIN batches b ON b.stage = m.stage AND b.idx = m.batch "
                f"WHERE c.drop_reason IS NOT NULL AND {condition}",
                values,
            ):
                excluded[session_id][call_id] = DropReason(reason)
            for index, session_id, advantage, multiplicity in self._store.execute(
                "SELECT m.batch, s.id, m.advantage, m.multiplicity FROM batch_members m "
                "JOIN sessions s ON s.key = m.session JOIN batches b ON b.stage = m.stage "
                f"AND b.idx = m.batch WHERE {condition} ORDER BY m.batch, m.position",
                values,
            ):
                members[index].append(
                    BatchMember(session_id, advantage, multiplicity, excluded[session_id])
                )
            rows = self._store.execute(
                "SELECT b.idx, b.version, b.tau, b.step, b.replays FROM batches b "
                f"WHERE {condition} ORDER BY b.idx",
                values,
            )
        return [
            Batch(stage, index, version, tau, tuple(members[index]), step, replays)
            for index, version, tau, step, replays in rows
        ]

    def publications(self, stage: str) -> list[Publication]:
        """Weights published in a stage, oldest first; those a crash took back are gone."""
        rows = self._store.execute(
            "SELECT stage, version, step, path, published_at FROM publications WHERE stage = ? "
            "ORDER BY version",
            (stage,),
        )
        return [Publication(*row) for row in rows]

    def stages(self) -> list[StageRecord]:
        """Stages that have started, in order."""
        rows = self._store.execute(
            "SELECT name, started_at, finished_at, seconds, result FROM stages ORDER BY rowid"
        )
        return [
            StageRecord(
                name, started_at, finished_at, seconds, None if text is None else decode_json(text)
            )
            for name, started_at, finished_at, seconds, text in rows
        ]

    def evaluations(self) -> list[Evaluation]:
        """Evaluation results, in the order they were first written."""
        rows = self._store.execute(
            "SELECT label, task, stage, n, success, low, high, detail FROM evaluations "
            "ORDER BY rowid"
        )
        return [
            Evaluation(label, task, stage, n, success, low, high, decode_json(detail))
            for label, task, stage, n, success, low, high, detail in rows
        ]

    def get_state(self, name: str, default: Any = None) -> Any:
        """A value put with `Ledger.put_state`, or `default`."""
        rows = self._store.execute("SELECT value FROM state WHERE name = ?", (name,))
        return decode_json(rows[0][0]) if rows else default


def ledger_file(path: Path) -> Path:
    """The ledger of a run directory; a path to a file stays as it is.

    Raises:
        UserError: the path may not be looked at.
    """
    path = Path(path)
    try:
        return path / FILE_NAME if path.is_dir() else path
    except PermissionError as error:
        raise UserError(f"{path} may not be read; check the permissions") from error


def failure_named(name: str | None) -> FailureReason | None:
    """A stored reason; None also for one that only a later version knows."""
    try:
        return None if name is None else FailureReason(name)
    except ValueError:
        return None


def session_summary(row: tuple[Any, ...]) -> SessionSummary:
    """A session from a row of `SESSION_SQL`, whose first column is its key."""
    return SessionSummary(
        id=row[1],
        stage=row[2],
        purpose=row[3],
        task=row[4],
        instance=decode_json(row[5]),
        group_id=row[6],
        outcome=None if row[7] is None else Outcome(row[7]),
        reason=row[8],
        reward=row[9],
        rewards={} if row[10] is None else decode_json(row[10]),
        detail={} if row[11] is None else decode_json(row[11]),
        drop_reason=None if row[12] is None else DropReason(row[12]),
        batch=row[13],
        advantage=row[14],
        step=row[15],
        dispatched_at=row[16],
        finished_at=row[17],
        calls=row[18],
        tokens=row[19],
        oldest_version=row[20],
        failure=failure_named(row[21]),
    )
