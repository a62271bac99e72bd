"""Checks a ledger against the laws it can testify to: L2, L4, L5, L6, L7 and L9.

It trusts neither the writer nor the accounting columns: tokens, logprobs and versions are counted
again from the stored evidence. A run's summary shows the result.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from headrace.errors import UserError
from headrace.rollout.record.integrity import (
    duplicate_rows,
    group_records,
    missing_rows,
    stage_names,
)
from headrace.rollout.record.reading import VERSION_STATE, LedgerReader
from headrace.rollout.record.rows import TRAIN, Batch, BatchMember, GroupState, SessionSummary
from headrace.rollout.staleness import is_stale
from headrace.rollout.types import DropReason, Outcome, Segment, Session

_LOGPROB_SLACK = 1e-4  # float32 log-softmax may round the logprob of a sure token above 0

_NO_BASELINE = (DropReason.EXCLUDED, DropReason.RETRIED)  # rules took their rewards out of it


class Finding(NamedTuple):
    """Whether a law held, and in one line what was looked at or where it broke."""

    held: bool
    detail: str


class _Law(msgspec.Struct):
    """Collects what breaks one law."""

    checked: int = 0
    broken: list[str] = []

    def expect(self, condition: bool, where: str) -> None:
        self.checked += 1
        if not condition:
            self.broken.append(where)

    def finding(self, unit: str, *, note: str = "") -> Finding:
        if self.broken:
            return Finding(False, f"{len(self.broken)} broken, first: {self.broken[0]}")
        return Finding(True, f"{self.checked} {unit} checked{note}")


def audit(
    ledger: LedgerReader,
    *,
    stage: str | None = None,
    derive: Callable[[Session], Sequence[Segment]] | None = None,
) -> dict[str, Finding]:
    """Read the whole ledger and say of each law whether it held.

    Args:
        ledger: any open ledger; its run may be over, crashed or going on.
        stage: look at this one only.
        derive: makes the training segments of a session; when given, L5 also checks that they own
            each of its sampled tokens exactly once.

    Returns:
        A finding for each of "L2", "L4", "L5", "L6", "L7" and "L9".
    """
    with ledger.snapshot():
        laws = {name: _Law() for name in ("L2", "L4", "L5", "L6", "L7", "L9")}
        stages = stage_names(ledger) if stage is None else [stage]
        versions = ledger.get_state(VERSION_STATE)
        finished = {record.name for record in ledger.stages() if record.finished_at is not None}
        for name in stages:
            batches = ledger.batches(name)
            _check_batches(laws, name, batches)
            _check_groups(laws["L2"], ledger, name, finished=name in finished)
            members = {m.session_id: (batch, m) for batch in batches for m in batch.members}
            baselines = _group_means(ledger, name)
            trained = 0
            for summary in ledger.sessions(stage=name):
                session = _evidence(ledger, summary, laws["L5"])
                if session is None:
                    continue
                _check_tokens(laws, session, summary, versions)
                _check_fate(laws, summary, name in finished)
                _check_reward(laws["L6"], summary, baselines)
                if summary.id in members:
                    batch, member = members[summary.id]
                    trained += _check_member(laws["L7"], session, batch, member)
                    if derive is not None:
                        _check_segments(laws["L5"], session, member, derive)
            _check_closure(laws["L2"], ledger, name, trained, name in finished)
    return {
        "L2": laws["L2"].finding("sessions, groups and stages", note=_totals(ledger, stage)),
        "L4": laws["L4"].finding("sampled spans"),
        "L5": laws["L5"].finding("sessions"),
        "L6": laws["L6"].finding("rewards and advantages"),
        "L7": laws["L7"].finding("batch members"),
        "L9": laws["L9"].finding("sessions and batches", note=_replays(ledger, stages)),
    }


def _evidence(ledger: LedgerReader, summary: SessionSummary, law: _Law) -> Session | None:
    """The session, or None when its bytes cannot be read (the constructors enforce lengths)."""
    try:
        session = ledger.session(summary.id)
    except UserError as error:
        law.expect(False, str(error))
        return None
    law.expect(len(session.calls) == summary.calls, f"session {summary.id} lacks calls")
    return session


def _check_tokens(
    laws: dict[str, _Law], session: Session, summary: SessionSummary, newest_version: int | None
) -> None:
    tokens = 0
    oldest = min(
        (span.weight_version for call in session.policy_calls for span in call.spans), default=None
    )
    laws["L4"].expect(
        oldest == summary.oldest_version,
        f"session {session.id}: oldest version {summary.oldest_version} accounted, {oldest} in its "
        "evidence",
    )
    other = {call.id for call in session.calls if call.model is not None}
    for call in session.calls:
        laws["L2"].expect(
            call.parent_id is None or (call.parent_id in other) == (call.id in other),
            f"call {call.id} continues a call of another model",
        )
        stamps = [span.weight_version for span in call.spans]
        laws["L4"].expect(
            call.model is not None
            or (
                (stamps == sorted(stamps) or summary.purpose != TRAIN)
                and (newest_version is None or max(stamps, default=0) <= newest_version)
            ),
            f"call {call.id} has versions {stamps}, which fall or were never published (the newest "
            f"is {newest_version})",
        )
        for span in call.spans:
            tokens += len(span.ids)
            laws["L4"].expect(
                span.weight_version >= 0
                and len(span.logprobs) == len(span.ids)
                and all(math.isfinite(p) and p <= _LOGPROB_SLACK for p in span.logprobs),
                f"call {call.id} has a token without a usable logprob or version",
            )
    laws["L2"].expect(
        tokens == summary.tokens,
        f"session {session.id}: {summary.tokens} tokens accounted, {tokens} in its evidence",
    )


def _check_fate(laws: dict[str, _Law], summary: SessionSummary, stage_finished: bool) -> None:
    name = summary.id
    in_batch = summary.batch is not None
    laws["L2"].expect(
        not (in_batch and summary.drop_reason is not None),
        f"session {name} is in batch {summary.batch} and dropped ({summary.drop_reason})",
    )
    laws["L2"].expect(
        summary.purpose == TRAIN or (not in_batch and summary.drop_reason is DropReason.EVALUATION),
        f"evaluation session {name} is not excluded from training",
    )
    if stage_finished:
        laws["L9"].expect(
            summary.outcome is not None, f"session {name} is open, its stage is finished"
        )
        laws["L9"].expect(
            summary.step is not None or summary.drop_reason is not None,
            f"session {name} of a finished stage neither trained nor was dropped",
        )
    if in_batch:
        laws["L9"].expect(summary.outcome is not None, f"session {name} is in a batch while open")


def _check_reward(
    law: _Law, summary: SessionSummary, baselines: dict[str, tuple[float, float]]
) -> None:
    """Unscored sessions have no reward and no advantage; the others' baseline is of scored ones.

    The sign of an advantage tells whether its baseline was the mean of the group's scored rewards,
    with or without leave-one-out and standard deviation.
    """
    scored = summary.outcome is not None and summary.outcome.scored
    law.expect(
        scored is (summary.reward is not None),
        f"session {summary.id} ended {summary.outcome} with reward {summary.reward}",
    )
    if summary.outcome in (Outcome.ENV_FAILED, Outcome.CANCELLED):
        law.expect(
            summary.drop_reason is not None and summary.batch is None,
            f"session {summary.id} ended {summary.outcome} and was not excluded",
        )
    if summary.advantage is not None and summary.reward is not None:
        mean, tolerance = baselines[summary.group_id]
        difference = summary.reward - mean
        law.expect(
            abs(difference) <= tolerance or difference * summary.advantage > 0,
            f"session {summary.id}: advantage {summary.advantage:g} at reward {summary.reward:g} "
            f"and group mean {mean:g}",
        )


def _group_means(ledger: LedgerReader, stage: str) -> dict[str, tuple[float, float]]:
    """Mean of the scored rewards of each training group, and the rounding to allow for."""
    rewards: dict[str, list[float]] = {}
    for summary in ledger.sessions(stage=stage, purpose=TRAIN):
        if summary.reward is not None and summary.drop_reason not in _NO_BASELINE:
            rewards.setdefault(summary.group_id, []).append(summary.reward)
    return {
        group: (math.fsum(values) / len(values), 1e-9 * max(1.0, *map(abs, values)))
        for group, values in rewards.items()
    }


def _check_member(law: _Law, session: Session, batch: Batch, member: BatchMember) -> int:
    """The age of a member when its batch was cut; returns its tokens in the surviving weights."""
    calls = [call for call in session.policy_calls if call.id not in member.excluded]
    spans = [span for call in calls for span in call.spans]
    if batch.tau is not None:
        versions = [span.weight_version for span in spans]
        law.expect(
            not is_stale(batch.current_version, versions, batch.tau),
            f"session {session.id} in batch {batch.index}: oldest version "
            f"{min(versions, default=None)} at version {batch.current_version}, tau {batch.tau}",
        )
    return sum(len(span.ids) for span in spans) if batch.step is not None else 0


def _check_segments(
    law: _Law,
    session: Session,
    member: BatchMember,
    derive: Callable[[Session], Sequence[Segment]],
) -> None:
    """Segments own each sampled token once. Late calls (CANCELLED) never reach the trainer, and
    neither do those of other models."""
    calls = tuple(
        call
        for call in session.policy_calls
        if member.excluded.get(call.id) is not DropReason.CANCELLED
    )
    sampled = sum(len(call.output_ids) for call in calls)
    try:
        segments = derive(msgspec.structs.replace(session, calls=calls))
    except ValueError as error:  # a constructor refused unequal lengths
        law.expect(False, f"session {session.id}: {error}")
        return
    owned = sum(sum(segment.train_mask) for segment in segments)
    law.expect(
        owned == sampled, f"session {session.id}: segments own {owned} of {sampled} sampled tokens"
    )


def _check_batches(laws: dict[str, _Law], stage: str, batches: Sequence[Batch]) -> None:
    steps = [batch.step for batch in batches]
    done = [step for step in steps if step is not None]
    laws["L9"].expect(
        [batch.index for batch in batches] == list(range(len(batches)))
        and steps[: len(done)] == done
        and all(a < b for a, b in pairwise(done)),
        f"batches of stage {stage} were not trained in order: steps {steps}",
    )
    empty = [batch.index for batch in batches if not batch.members]
    laws["L9"].expect(not empty, f"batches {empty} of stage {stage} have no members")
    times = Counter(member.session_id for batch in batches for member in batch.members)
    laws["L9"].expect(
        not times or max(times.values()) == 1,
        f"stage {stage} trains {times.most_common(1)} more than once",
    )


def _check_groups(law: _Law, ledger: LedgerReader, stage: str, *, finished: bool) -> None:
    """Groups have the members they were dispatched with, and only decided ones train."""
    for gap in missing_rows(ledger, stage):
        law.expect(False, gap)
    duplicates = duplicate_rows(ledger, stage)
    law.expect(not duplicates, f"stage {stage} holds more than once: {duplicates}")
    states = {}
    for group in group_records(ledger, stage, purpose=None):
        states[group.id] = group.state
        # Between a crash and the resume that replaces them, members are missing.
        law.expect(
            group.members == group.size
            or (group.members < group.size and group.state != GroupState.READY),
            f"group {group.id} has {group.members} members and was dispatched with {group.size}",
        )
        law.expect(
            not finished or group.purpose != TRAIN or group.state != GroupState.OPEN,
            f"group {group.id} of a finished stage is not decided",
        )
    for summary in ledger.sessions(stage=stage, purpose=TRAIN):
        law.expect(
            summary.batch is None or states.get(summary.group_id) == GroupState.READY,
            f"session {summary.id} is in batch {summary.batch}, its group is "
            f"{states.get(summary.group_id)}",
        )


def _check_closure(
    law: _Law, ledger: LedgerReader, stage: str, trained: int, finished: bool
) -> None:
    account = ledger.conservation(stage)
    law.expect(
        account.closes and account.trained == trained,
        f"stage {stage}: {account} ({trained} trained by its batches)",
    )
    law.expect(
        not finished or account.pending == 0,
        f"finished stage {stage} still has {account.pending} pending tokens",
    )


def _totals(ledger: LedgerReader, stage: str | None) -> str:
    account = ledger.conservation(stage)
    reasons = ", ".join(f"{tokens} {reason}" for reason, tokens in account.dropped.items())
    return (
        f"; {account.sampled} sampled = {account.trained} trained"
        f"{' + ' + reasons if reasons else ''}{f' + {account.pending} pending'}"
    )


def _replays(ledger: LedgerReader, stages: Sequence[str]) -> str:
    def replayed() -> Iterator[int]:
        for stage in stages:
            yield sum(batch.replays > 0 for batch in ledger.batches(stage))

    count = sum(replayed())
    return f"; {count} batches replayed after a crash" if count else ""
