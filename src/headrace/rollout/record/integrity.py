"""Whether the rows of a ledger fit together: what the audit asks of the tables themselves.

The schema forbids most of what is looked for here, so this is about files that were changed by
other means, or by a bug. It reads rows and knows no laws; `audit` does.
"""

from headrace.rollout.record.reading import TRAINED_SQL, LedgerReader
from headrace.rollout.record.rows import TRAIN, GroupRecord


def stage_names(ledger: LedgerReader) -> list[str]:
    """Every stage that is mentioned: those that started, in order, then others by name."""
    names = [record.name for record in ledger.stages()]
    rows = ledger.query(
        "SELECT stage FROM groups UNION SELECT stage FROM batches UNION "
        "SELECT stage FROM publications ORDER BY 1"
    )
    return [*names, *(name for (name,) in rows if name not in names)]


def group_records(
    ledger: LedgerReader, stage: str, purpose: str | None = TRAIN
) -> list[GroupRecord]:
    """Groups of a stage in order of dispatch; of every purpose if that is None."""
    rows = ledger.query(
        "SELECT id, stage, purpose, size, state, drop_reason, (SELECT COUNT(*) FROM sessions s "
        "WHERE s.group_id = g.id AND s.replaced = 0) FROM groups g "
        "WHERE stage = ?1 AND (?2 IS NULL OR purpose = ?2) ORDER BY rowid",
        (stage, purpose),
    )
    return [GroupRecord(*row) for row in rows]


def recovery_count(ledger: LedgerReader, stage: str) -> int:
    """How often a stage that had begun was taken up after its process had ended."""
    ((count,),) = ledger.query(
        "SELECT COUNT(*) FROM recoveries r WHERE r.stage = ?1 AND (r.step > 0 OR r.cancelled "
        "OR r.replayed OR r.at > (SELECT MIN(created_at) FROM groups WHERE stage = ?1))",
        (stage,),
    )
    return count


def missing_rows(ledger: LedgerReader, stage: str) -> list[str]:
    """What rows of a stage imply that is not there, in words; empty in a sound ledger."""
    found = []
    for words, sql in (
        (
            "session {} has no group",
            "SELECT id FROM sessions WHERE stage = ?1 AND group_id NOT IN (SELECT id FROM groups)",
        ),
        (
            "batch {} lacks a member",
            "SELECT batch FROM batch_members WHERE stage = ?1 GROUP BY batch "
            "HAVING MAX(position) >= COUNT(*)",
        ),
        (
            "batch member {} has no batch",
            "SELECT session FROM batch_members m WHERE stage = ?1 AND NOT EXISTS "
            "(SELECT 1 FROM batches b WHERE b.stage = m.stage AND b.idx = m.batch)",
        ),
        (
            "session {} lacks a call before its last",
            "SELECT s.id FROM sessions s JOIN calls c ON c.session = s.key WHERE s.stage = ?1 "
            "GROUP BY s.key HAVING MAX(c.idx) >= COUNT(*)",
        ),
    ):
        found += [words.format(row[0]) for row in ledger.query(sql, (stage,))]
    return found


def duplicate_rows(ledger: LedgerReader, stage: str) -> dict[str, int]:
    """What occurs more than once in a stage and must not, by kind; empty in a sound ledger.

    The schema forbids most of it, so this is about files that were changed by other means.
    Tokens that train more than once are those of calls whose session is a member twice.
    """
    found = {}
    for kind, sql in (
        ("session ids", "SELECT id FROM sessions WHERE stage = ?1"),
        (
            "call ids",
            "SELECT c.id FROM calls c JOIN sessions s ON s.key = c.session WHERE s.stage = ?1",
        ),
        ("group ids", "SELECT id FROM groups WHERE stage = ?1"),
        ("batch indices", "SELECT idx FROM batches WHERE stage = ?1"),
        ("sessions in batches", "SELECT session FROM batch_members WHERE stage = ?1"),
    ):
        ((extra,),) = ledger.query(
            f"WITH found(name) AS ({sql}) SELECT COUNT(*) - COUNT(DISTINCT name) FROM found",
            (stage,),
        )
        if extra:
            found[kind] = extra
    ((tokens,),) = ledger.query(
        "SELECT COALESCE(SUM((n - 1) * tokens), 0) FROM (SELECT c.tokens, COUNT(*) AS n "
        f"{TRAINED_SQL} GROUP BY c.rowid)",
        (stage,),
    )
    return found | ({"tokens trained again": tokens} if tokens else {})
