"""The books of a run, stage by stage: where its groups and tokens are, how old the trained tokens
were, and what occurs twice that must occur once.

It reads a ledger and judges nothing; `audit` does. Counts come from what rows say, not from what
the schema promises, so that a file that somebody changed by hand shows its damage.
"""

from collections import Counter

import msgspec

from headrace.errors import UserError
from headrace.rollout.record.audit import Finding, audit
from headrace.rollout.record.integrity import (
    duplicate_rows,
    group_records,
    recovery_count,
    stage_names,
)
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.rows import TRAIN, Conservation, Publication, SessionSummary
from headrace.rollout.record.trained import trained_digest
from headrace.rollout.segments import segments
from headrace.rollout.types import DropReason


class GroupAccount(msgspec.Struct, frozen=True):
    """Where the training groups of a stage are.

    Attributes:
        dispatched: all of them.
        trained: at least one member is in the surviving weights.
        dropped: no member ever trains, by reason.
        waiting: decided, and waiting for a batch or in one that is not in the weights.
        open: not decided.
    """

    dispatched: int
    trained: int
    dropped: dict[str, int]
    waiting: int
    open: int

    @property
    def closes(self) -> bool:
        """Whether every group is in exactly one place."""
        return self.dispatched == (
            self.trained + sum(self.dropped.values()) + self.waiting + self.open
        )


class BatchAccount(msgspec.Struct, frozen=True):
    """What was cut.

    Attributes:
        cut: batches.
        trained: of them, in the surviving weights.
        replayed: of them, handed out again by a recovery.
        tau: the largest staleness bound they were cut with; None when there was none.
    """

    cut: int
    trained: int
    replayed: int
    tau: int | None


class StageAccount(msgspec.Struct, frozen=True):
    """The books of one stage.

    Attributes:
        stage: name.
        finished: whether it is over; None of what is no stage of the recipe, i.e. evaluation.
        sessions: by outcome, those of evaluations included.
        groups, tokens, batches: see their types; tokens and sessions include evaluations.
        staleness: trained tokens by lag, i.e. publications between their version and the newest
            one when their batch was cut.
        duplicates: what occurs twice that must not; empty when nothing does.
        publications: oldest first.
        recoveries: how often a crash was recovered from.
        trained_digest: equal for runs that trained the same; "" when nothing did.
    """

    stage: str
    finished: bool | None
    sessions: dict[str, int]
    groups: GroupAccount
    tokens: Conservation
    batches: BatchAccount
    staleness: dict[int, int]
    duplicates: dict[str, int]
    publications: list[Publication]
    recoveries: int
    trained_digest: str


class LedgerReport(msgspec.Struct, frozen=True):
    """An audited run.

    Attributes:
        laws: what the audit found, by law.
        stages: in order of their start; those that only measured come last.
    """

    laws: dict[str, Finding]
    stages: list[StageAccount]

    @property
    def held(self) -> bool:
        """Whether no law is broken."""
        return all(finding.held for finding in self.laws.values())


def ledger_report(ledger: LedgerReader, stage: str | None = None) -> LedgerReport:
    """Audit a ledger, and draw up its books, as of one moment.

    Args:
        ledger: any open ledger; its run may be over, crashed or going on.
        stage: only this one.

    Raises:
        UserError: there is no such stage.
    """
    with ledger.snapshot():
        names = stage_names(ledger)
        if stage is not None and stage not in names:
            raise UserError(
                f"--stage {stage}: the ledger has no such stage; it has "
                f"{', '.join(names) or 'none yet'}"
            )
        chosen = names if stage is None else [stage]
        finished = {record.name: record.finished_at is not None for record in ledger.stages()}
        return LedgerReport(
            laws=audit(ledger, stage=stage, derive=segments),
            stages=[_account(ledger, name, finished.get(name)) for name in chosen],
        )


def _account(ledger: LedgerReader, stage: str, finished: bool | None) -> StageAccount:
    batches = ledger.batches(stage)
    try:
        staleness = ledger.staleness_histogram(stage)
        digest = trained_digest(ledger, stage)
    except (UserError, ValueError):  # damaged evidence, of which the audit says where
        staleness, digest = {}, ""
    bounds = [batch.tau for batch in batches if batch.tau is not None]
    return StageAccount(
        stage=stage,
        finished=finished,
        sessions=ledger.outcome_counts(stage),
        groups=_groups(ledger, stage),
        tokens=ledger.conservation(stage),
        batches=BatchAccount(
            cut=len(batches),
            trained=sum(batch.step is not None for batch in batches),
            replayed=sum(batch.replays > 0 for batch in batches),
            tau=max(bounds, default=None),
        ),
        staleness=staleness,
        duplicates=duplicate_rows(ledger, stage),
        publications=ledger.publications(stage),
        recoveries=recovery_count(ledger, stage),
        trained_digest=digest,
    )


def _groups(ledger: LedgerReader, stage: str) -> GroupAccount:
    """Each training group's place, from where its members are."""
    members: dict[str, list[SessionSummary]] = {}
    for session in ledger.sessions(stage=stage, purpose=TRAIN):
        members.setdefault(session.group_id, []).append(session)
    places: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    groups = group_records(ledger, stage)
    for group in groups:
        own = members.get(group.id, [])
        if any(session.step is not None for session in own):
            places["trained"] += 1
        elif group.state == "open":
            places["open"] += 1
        elif any(session.drop_reason is None for session in own):
            places["waiting"] += 1
        else:
            reasons = Counter(
                session.drop_reason for session in own if session.drop_reason is not None
            )
            # A group that had signal lost it member by member; most of them say why.
            usual = reasons.most_common(1)[0][0] if reasons else DropReason.CANCELLED
            dropped[group.drop_reason or usual] += 1
    return GroupAccount(
        dispatched=len(groups),
        trained=places["trained"],
        dropped=dict(sorted(dropped.items())),
        waiting=places["waiting"],
        open=places["open"],
    )
