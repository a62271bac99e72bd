"""The durable record of a run: who sampled what, how it ended, and whether it trained.

One process writes; every method is one transaction and is durable against SIGKILL when it returns.
The life of a session, each arrow one method, each end exactly one place (laws L2 and L9):

    dispatch -> (record_call)* -> finish -> decide_group -> cut_batch -> commit_batch: trained
                                |           |              |
                                +-----------+----- drop ---+-----------------> dropped(reason)

Crash semantics: trained weights survive a crash only up to the newest durable checkpoint, step S.
`recover` therefore keeps batches with step <= S as final and hands out every other batch that was
cut, to be trained again verbatim: in the lineage of weights that survives, nothing trains twice and
nothing that finished is lost. Resume from the checkpoint that `recover` names, not from the newest
directory on disk: one that was written but not yet recorded here is not part of the record.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.groups import GroupDecision
from headrace.rollout.record.evidence import encode_call, encode_json, encode_messages
from headrace.rollout.record.progress import ProgressRecord
from headrace.rollout.record.reading import ledger_file
from headrace.rollout.record.recovery import cancel_open, reconcile
from headrace.rollout.record.rows import (
    TRAIN,
    Batch,
    BatchMember,
    GroupState,
    Recovery,
)
from headrace.rollout.record.store import Store
from headrace.rollout.types import Call, DropReason, Outcome


class Ledger(ProgressRecord):
    """A ledger open for writing. One per run; use from one thread.

    Calls that contradict the life above raise ValueError and change nothing: they are bugs of the
    caller. A full disk, a damaged file and the like raise UserError and change nothing either.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(store, clock=clock)
        # Messages of calls of open sessions, and as stored: a child stores only what is new, and
        # what the gateway knows to be the very same object is not written out to see that.
        self._messages: dict[int, dict[str, tuple[list[dict[str, Any]], list[bytes]]]] = {}
        self._tools: dict[bytes, int] = {}

    @classmethod
    def create(cls, path: Path, *, clock: Callable[[], float] = time.time) -> "Ledger":
        """Start the ledger of a new run.

        Args:
            path: run directory (must exist) or ledger file.
            clock: unix time in seconds.

        Raises:
            UserError: there already is one, or the directory cannot be written.
        """
        return cls(Store.create(ledger_file(path)), clock=clock)

    @classmethod
    def resume(cls, path: Path, *, clock: Callable[[], float] = time.time) -> "Ledger":
        """Open the ledger of a run that ended in any way; `recover` then takes up a stage.

        Raises:
            UserError: none there, in use by another process, damaged, foreign, of a newer schema.
        """
        return cls(Store.resume(ledger_file(path)), clock=clock)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Several methods as one: all of them happen or none (e.g. a cursor and its dispatch).

        Never await inside: other coroutines' writes would join the transaction.
        """
        try:
            with super().transaction():
                yield
        except BaseException:
            # They may name rows that are gone now; without them more is stored, never less.
            self._messages.clear()
            self._tools.clear()
            raise

    # --- the life of a session --------------------------------------------------------------

    def dispatch(
        self,
        stage: str,
        purpose: str,
        group_id: str,
        task: str,
        instance: Mapping[str, Any],
        session_ids: Sequence[str],
        state: Mapping[str, Any] | None = None,
        replaces: Sequence[str] = (),
    ) -> None:
        """Open sessions: a whole new group, or the missing members of one that lost some.

        Args:
            stage: name of the recipe stage.
            purpose: "train" or "eval:LABEL"; the latter never train (reason EVALUATION).
            group_id: unique in the run; one instance, one baseline.
            task: task service name.
            instance: JSON-compatible description of the instance.
            session_ids: new ids; for a new group their number is the group's size.
            state: values to `put_state` in the same transaction, e.g. the cursor that moved.
            replaces: finished sessions that leave the group for these; they never train (RETRIED).

        Raises:
            ValueError: an id is known, the group differs from its first dispatch, is decided or
                would outgrow its size, the stage is finished, or one of `replaces` is no finished
                member of this group.
        """
        if not session_ids:
            raise ValueError(f"dispatch of group {group_id} without sessions")
        if purpose != TRAIN and not purpose.startswith("eval:"):
            raise ValueError(f'purpose {purpose!r} is neither "{TRAIN}" nor "eval:LABEL"')
        now = self._clock()
        body = encode_json(dict(instance))
        with self.transaction():
            if self._row("SELECT 1 FROM stages WHERE name = ? AND finished_at IS NOT NULL", stage):
                raise ValueError(f"dispatch in stage {stage}, which is finished")
            self._take_out(group_id, replaces)
            known = self._row(
                "SELECT stage, purpose, task, instance, size, state, "
                "(SELECT COUNT(*) FROM sessions WHERE group_id = groups.id AND replaced = 0) "
                "FROM groups WHERE id = ?",
                group_id,
            )
            if known is None:
                self._store.execute(
                    "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?)",
                    (group_id, stage, purpose, task, body, len(session_ids), GroupState.OPEN, now),
                )
            else:
                if known[:4] != (stage, purpose, task, body):
                    raise ValueError(f"group {group_id} was dispatched with other content before")
                if known[5] != GroupState.OPEN or known[6] + len(session_ids) > known[4]:
                    raise ValueError(
                        f"group {group_id} ({known[5]}, {known[6]} of {known[4]} members) cannot "
                        f"take {len(session_ids)} more"
                    )
            for session_id in session_ids:
                if self._row("SELECT 1 FROM sessions WHERE id = ?", session_id):
                    raise ValueError(f"session {session_id} was dispatched before")
                self._store.execute(
                    "INSERT INTO sessions (id, group_id, stage, purpose, drop_reason, "
                    "dispatched_at) VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        session_id,
                        group_id,
                        stage,
                        purpose,
                        None if purpose == TRAIN else DropReason.EVALUATION,
                        now,
                    ),
                )
            for name, value in (state or {}).items():
                self.put_state(name, value)

    def record_call(self, call: Call) -> None:
        """Keep one call. A call that comes after its session's end is kept, counted, not trained;
        so is one of another model than the one that learns, whose versions count for nothing.

        Raises:
            ValueError: unknown session or parent, or the id or index is taken.
        """
        with self.transaction():
            row = self._row(
                "SELECT key, outcome, drop_reason FROM sessions WHERE id = ?", call.session_id
            )
            if row is None:
                raise ValueError(f"call {call.id} names unknown session {call.session_id}")
            session, outcome, dropped = row
            taken = self._row(
                "SELECT id FROM calls WHERE id = ?1 OR (session = ?2 AND idx = ?3)",
                call.id,
                session,
                call.index,
            )
            if taken is not None:
                raise ValueError(
                    f"call {call.id}, index {call.index} of session {call.session_id}: "
                    f"{taken[0]} is already recorded in its place"
                )
            cache = self._messages.setdefault(session, {}) if outcome is None else {}
            seen: list[dict[str, Any]] = []
            parent: list[bytes] = []
            if call.parent_id is not None:
                if call.parent_id in cache:
                    seen, parent = cache[call.parent_id]
                elif not self._row(
                    "SELECT 1 FROM calls WHERE id = ? AND session = ?", call.parent_id, session
                ):
                    raise ValueError(f"call {call.id} names unknown parent {call.parent_id}")
            same = 0
            for own, other in zip(call.messages, seen, strict=False):
                if own is not other:
                    break
                same += 1
            messages = [*parent[:same], *encode_messages(call.messages[same:])]
            late = outcome is not None
            own = call.model is None
            reason = None
            if late and dropped is None:
                reason = DropReason.CANCELLED
            if not own:
                reason = DropReason.OTHER_MODEL
            versions = [span.weight_version for span in call.spans if own]
            newest = [span.newest_version or span.weight_version for span in call.spans if own]
            self._store.execute(
                "INSERT INTO calls (id, session, idx, parent, tokens, oldest, newest, drop_reason, "
                "late, fork_reason, finish_reason, parse_state, tools, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    call.id,
                    session,
                    call.index,
                    call.parent_id,
                    sum(len(span.ids) for span in call.spans),
                    min(versions, default=None),
                    max(newest, default=None),
                    reason,
                    late,
                    call.fork_reason,
                    call.finish_reason,
                    call.parse_state,
                    self._tools_key(call.tools),
                    encode_call(call, messages, parent),
                ),
            )
            cache[call.id] = (call.messages, messages)

    def finish(
        self,
        session_id: str,
        outcome: Outcome,
        rewards: Mapping[str, float] | None = None,
        reason: str = "",
        detail: Mapping[str, Any] | None = None,
        failure: FailureReason | None = None,
    ) -> None:
        """End an open session. ENV_FAILED and CANCELLED fix at once why it does not train (L6).

        Args:
            session_id: an open session.
            outcome: how it ended.
            rewards: components by name, with the total under "reward" exactly when outcome.scored;
                components of unscored outcomes are kept but the total is not.
            reason: one line, for people.
            detail: JSON-compatible extras.
            failure: how it failed, if it did.

        Raises:
            ValueError: unknown or finished session, or a scored outcome without a finite reward.
        """
        rewards = dict(rewards or {})
        reward = rewards.get("reward")
        if not outcome.scored:
            reward = None
        elif reward is None or not math.isfinite(reward):
            raise ValueError(f"session {session_id} ended {outcome} with reward {reward}")
        with self.transaction():
            row = self._row("SELECT key, outcome FROM sessions WHERE id = ?", session_id)
            if row is None or row[1] is not None:
                state = "unknown" if row is None else f"already {row[1]}"
                raise ValueError(f"finish({outcome}) of session {session_id}, which is {state}")
            self._store.execute(
                "UPDATE sessions SET outcome = ?, reward = ?, finished_at = ?, reason = ?, "
                "failure = ?, rewards = ?, detail = ?, drop_reason = COALESCE(drop_reason, ?) "
                "WHERE key = ?",
                (
                    outcome,
                    None if reward is None else float(reward),
                    self._clock(),
                    # Exception texts may hold file names that are not Unicode.
                    reason.encode("utf-8", "backslashreplace").decode(),
                    failure,
                    encode_json(rewards),
                    encode_json(dict(detail or {})),
                    _unscored_reason(outcome),
                    row[0],
                ),
            )
        self._messages.pop(row[0], None)

    def _take_out(self, group_id: str, session_ids: Sequence[str]) -> None:
        """Finished sessions leave an undecided group."""
        for session_id in session_ids:
            if not self._store.execute(
                "UPDATE sessions SET replaced = 1, drop_reason = COALESCE(drop_reason, ?) WHERE "
                "id = ? AND group_id = ? AND replaced = 0 AND outcome IS NOT NULL RETURNING 1",
                (DropReason.RETRIED, session_id, group_id),
            ):
                raise ValueError(f"session {session_id} is no finished member of group {group_id}")

    def decide_group(self, group_id: str, decision: GroupDecision) -> None:
        """Keep the decision on a complete group: it trains, or it is dropped with all its sessions.

        Raises:
            ValueError: unknown, already decided or of an evaluation, has open or missing members,
                the decision is on other sessions, or it trains one that has no reward (law L6).
        """
        decided = {member.session_id for member in decision.members}
        with self.transaction():
            size = self._undecided_group(group_id)
            rollouts = self.rollouts(group_id)
            if len(rollouts) != size:
                raise ValueError(f"group {group_id} has {len(rollouts)} of {size} members finished")
            scored = {r.session_id for r in rollouts if r.outcome.scored}
            named = sorted([*decided, *(session_id for session_id, _ in decision.dropped)])
            if named != sorted(r.session_id for r in rollouts) or not decided <= scored:
                raise ValueError(f"group {group_id}: the decision does not fit its sessions")
            for session_id, reason in decision.dropped:
                self._store.execute(
                    "UPDATE sessions SET drop_reason = COALESCE(drop_reason, ?) WHERE id = ?",
                    (reason, session_id),
                )
            state = GroupState.READY if decided else GroupState.DROPPED
            self._store.execute(
                "UPDATE groups SET state = ?, drop_reason = ? WHERE id = ?",
                (state, decision.drop_reason, group_id),
            )

    def drop_group(self, group_id: str, reason: DropReason) -> None:
        """Give up an undecided group, complete or not. Open members become CANCELLED.

        Raises:
            ValueError: unknown, already decided, or of an evaluation.
        """
        with self.transaction():
            self._undecided_group(group_id)
            self._store.execute(
                "UPDATE sessions SET outcome = ?, reason = ?, finished_at = ? "
                "WHERE group_id = ? AND outcome IS NULL",
                (Outcome.CANCELLED, f"group dropped: {reason}", self._clock(), group_id),
            )
            self._store.execute(
                "UPDATE sessions SET drop_reason = ? WHERE group_id = ? AND drop_reason IS NULL",
                (reason, group_id),
            )
            self._store.execute(
                "UPDATE groups SET state = ?, drop_reason = ? WHERE id = ?",
                (GroupState.DROPPED, reason, group_id),
            )

    def _undecided_group(self, group_id: str) -> int:
        """Size of an open training group."""
        row = self._row("SELECT state, purpose, size FROM groups WHERE id = ?", group_id)
        if row is None or row[:2] != (GroupState.OPEN, TRAIN):
            state = "unknown" if row is None else f"{row[0]} ({row[1]})"
            raise ValueError(f"decision on group {group_id}, which is {state}")
        return row[2]

    def drop(self, sessions: Iterable[tuple[str, DropReason]]) -> None:
        """Say why finished sessions will never train.

        Args:
            sessions: (session id, reason) pairs.

        Raises:
            ValueError: one is unknown, open, in a batch, or already dropped.
        """
        with self.transaction():
            for session_id, reason in sessions:
                self._drop(session_id, reason, None)

    def _drop(self, session_id: str, reason: DropReason, batch: int | None) -> None:
        key = self._pending(session_id, f"drop({reason})")
        self._store.execute(
            "UPDATE sessions SET drop_reason = ?, drop_batch = ? WHERE key = ?",
            (reason, batch, key),
        )

    # --- batches and weights ----------------------------------------------------------------

    def cut_batch(self, batch: Batch, dropped: Iterable[tuple[str, DropReason]] = ()) -> None:
        """Give sessions to one update and say which ones the cut refused (law L7).

        Args:
            batch: the next one of its stage; members are sessions of READY groups. `step` and
                `replays` are ignored.
            dropped: (session id, reason) pairs that this cut refused, e.g. as STALE.

        Raises:
            ValueError: wrong index, no members, or a session that is not pending in the stage or
                whose group is not READY, or an excluded call that is not the session's.
        """
        what = f"batch {batch.index} of stage {batch.stage}"
        with self.transaction():
            ((expected,),) = self._store.execute(
                "SELECT COUNT(*) FROM batches WHERE stage = ?", (batch.stage,)
            )
            if batch.index != expected:
                raise ValueError(f"{what}: the next one is {expected}")
            if not batch.members:
                raise ValueError(f"{what} has no members")
            self._store.execute(
                "INSERT INTO batches (stage, idx, version, tau, cut_at) VALUES (?, ?, ?, ?, ?)",
                (batch.stage, batch.index, batch.current_version, batch.tau, self._clock()),
            )
            for position, member in enumerate(batch.members):
                self._add_member(what, batch, position, member)
            for session_id, reason in dropped:
                self._drop(session_id, reason, batch.index)

    def _add_member(self, what: str, batch: Batch, position: int, member: BatchMember) -> None:
        if member.multiplicity < 1 or not math.isfinite(member.advantage):
            raise ValueError(f"{what}: {member} cannot be trained")
        key = self._pending(member.session_id, what)
        row = self._row(
            "SELECT s.stage, g.state FROM sessions s JOIN groups g ON g.id = s.group_id "
            "WHERE s.key = ?",
            key,
        )
        if row != (batch.stage, GroupState.READY):
            raise ValueError(f"{what}: session {member.session_id} is of a group in state {row}")
        self._store.execute(
            "INSERT INTO batch_members VALUES (?, ?, ?, ?, ?, ?)",
            (key, batch.stage, batch.index, position, float(member.advantage), member.multiplicity),
        )
        for call_id, reason in member.excluded.items():
            if not self._store.execute(
                "UPDATE calls SET drop_reason = COALESCE(drop_reason, ?) "
                "WHERE id = ? AND session = ? RETURNING 1",
                (reason, call_id, key),
            ):
                raise ValueError(f"{what}: {call_id} is no call of session {member.session_id}")

    def commit_batch(self, stage: str, batch_index: int, step: int) -> None:
        """The trainer has applied the batch; its weights after it are those of `step`.

        Raises:
            ValueError: unknown, committed, out of order, or a step that does not increase.
        """
        with self.transaction():
            row = self._row(
                "SELECT (SELECT MIN(idx) FROM batches WHERE stage = ?1 AND step IS NULL), "
                "(SELECT COALESCE(MAX(step), 0) FROM batches WHERE stage = ?1)",
                stage,
            )
            assert row is not None
            if row[0] != batch_index or step <= row[1]:
                raise ValueError(
                    f"commit of batch {batch_index} at step {step} in stage {stage}: "
                    f"next uncommitted batch {row[0]}, last step {row[1]}"
                )
            self._store.execute(
                "UPDATE batches SET step = ?, committed_at = ? WHERE stage = ? AND idx = ?",
                (step, self._clock(), stage, batch_index),
            )

    def recover(self, stage: str, usable: Callable[[str], bool] | None = None) -> Recovery:
        """Make the record of a stage fit the weights that survived, and say how to go on.

        Open sessions become CANCELLED ("crash"), their calls stay and are counted; batches beyond
        the checkpoint are handed out for replay; versions published beyond it are taken back (the
        replay publishes them again). Harmless to repeat; also right before a stage's first start.

        Args:
            stage: name of the recipe stage.
            usable: says whether the checkpoint at a path can still be loaded; default: all can.
        """
        self._messages.clear()
        with self.transaction():
            return reconcile(self._store, self, stage, usable, self._clock())

    def stage_finished(
        self, stage: str, seconds: float, result: Mapping[str, Any] | None = None
    ) -> None:
        """A stage ends: open sessions are cancelled, pending ones dropped (STAGE_ENDED).

        Args:
            stage: a started stage.
            seconds: of work, over all resumes.
            result: JSON-compatible.

        Raises:
            ValueError: not started, already finished, a batch is cut but not committed, or the
                last committed step is in no checkpoint (a crash would lose it).
        """
        now = self._clock()
        with self.transaction():
            row = self._row(
                "SELECT (SELECT COUNT(*) FROM stages WHERE name = ?1 AND finished_at IS NULL), "
                "(SELECT MIN(idx) FROM batches WHERE stage = ?1 AND step IS NULL), "
                "(SELECT COALESCE(MAX(step), 0) FROM batches WHERE stage = ?1), "
                "(SELECT COALESCE(MAX(step), 0) FROM checkpoints WHERE stage = ?1)",
                stage,
            )
            assert row is not None
            running, uncommitted, last_step, durable_step = row
            if not running:
                raise ValueError(f"stage {stage} has not started or is already finished")
            if uncommitted is not None:
                raise ValueError(f"stage {stage} ends while batch {uncommitted} is not committed")
            if last_step > durable_step:
                raise ValueError(
                    f"stage {stage} ends at step {last_step}, its last checkpoint is {durable_step}"
                )
            cancel_open(self._store, stage, "stage ended", now, replaced=False)
            self._messages.clear()
            self._store.execute(
                "UPDATE sessions SET drop_reason = ? WHERE stage = ? AND drop_reason IS NULL AND "
                "key NOT IN (SELECT session FROM batch_members WHERE stage = ?)",
                (DropReason.STAGE_ENDED, stage, stage),
            )
            self._store.execute(
                "UPDATE groups SET state = ?, drop_reason = ? WHERE stage = ? AND state = ?",
                (GroupState.DROPPED, DropReason.STAGE_ENDED, stage, GroupState.OPEN),
            )
            self._store.execute(
                "UPDATE stages SET finished_at = ?, seconds = ?, result = ? WHERE name = ?",
                (now, seconds, encode_json(dict(result or {})), stage),
            )

    # --- shared by the above ----------------------------------------------------------------

    def _pending(self, session_id: str, what: str) -> int:
        """Key of a finished session that has no fate yet."""
        row = self._row(
            "SELECT s.key, s.outcome, s.drop_reason, m.batch FROM sessions s "
            "LEFT JOIN batch_members m ON m.session = s.key WHERE s.id = ?",
            session_id,
        )
        if row is None:
            raise ValueError(f"{what}: unknown session {session_id}")
        key, outcome, dropped, batch = row
        if outcome is None or dropped is not None or batch is not None:
            raise ValueError(
                f"{what}: session {session_id} is not pending (outcome {outcome}, "
                f"dropped {dropped}, in batch {batch})"
            )
        return key

    def _tools_key(self, tools: list[dict[str, Any]]) -> int:
        body = encode_json(tools)
        key = self._tools.get(body)
        if key is None:
            row = self._row("SELECT key FROM tools WHERE body = ?", body)
            key = (
                self._store.insert("INSERT INTO tools (body) VALUES (?)", (body,))
                if row is None
                else row[0]
            )
            if len(self._tools) >= 256:  # an agent that changes its tools on every call
                self._tools.clear()
            self._tools[body] = key
        return key


def _unscored_reason(outcome: Outcome) -> DropReason | None:
    if outcome.scored:
        return None
    return DropReason.ENV_FAILED if outcome is Outcome.ENV_FAILED else DropReason.CANCELLED
