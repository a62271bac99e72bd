"""What a crash leaves of a stage, and how to go on from it.

The ledger's `recover` is this module inside one transaction; see `ledger.py` for the semantics.
"""

from collections.abc import Callable

from headrace.rollout.record.evidence import decode_json
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.rows import TRAIN, GroupState, IncompleteGroup, Recovery, WaitingGroup
from headrace.rollout.record.store import Store
from headrace.rollout.types import DropReason, Outcome


def reconcile(
    store: Store,
    reader: LedgerReader,
    stage: str,
    usable: Callable[[str], bool] | None,
    now: float,
) -> Recovery:
    """Take the record of a stage back to its newest usable checkpoint. Needs a transaction.

    Args:
        store: the ledger's file.
        reader: reads the same file.
        stage: name of the recipe stage.
        usable: whether the checkpoint at a path can still be loaded; None: all can.
        now: unix time, seconds.
    """
    step, checkpoint = 0, None
    for candidate, path in store.execute(
        "SELECT step, path FROM checkpoints WHERE stage = ? ORDER BY step DESC", (stage,)
    ):
        if usable is None or usable(path):
            step, checkpoint = candidate, path
            break
    for table in ("checkpoints", "publications"):
        store.execute(f"DELETE FROM {table} WHERE stage = ? AND step > ?", (stage, step))
    if checkpoint is None:  # an unusable checkpoint of step 0 is none
        store.execute("DELETE FROM checkpoints WHERE stage = ?", (stage,))
    store.execute(
        "UPDATE batches SET step = NULL, committed_at = NULL WHERE stage = ? AND step > ?",
        (stage, step),
    )
    store.execute(
        "UPDATE batches SET replays = replays + 1 WHERE stage = ? AND step IS NULL", (stage,)
    )
    cancelled = cancel_open(store, stage, "crash", now, replaced=True)
    replay = tuple(reader.batches(stage, uncommitted_only=True))
    ((version,),) = store.execute("SELECT MAX(version) FROM publications WHERE stage = ?", (stage,))
    ((next_batch,),) = store.execute("SELECT COUNT(*) FROM batches WHERE stage = ?", (stage,))
    incomplete, undecided, ready = _open_groups(store, reader, stage)
    store.execute(
        "INSERT INTO recoveries (stage, step, cancelled, replayed, at) VALUES (?, ?, ?, ?, ?)",
        (stage, step, len(cancelled), len(replay), now),
    )
    return Recovery(
        stage=stage,
        step=step,
        checkpoint=checkpoint,
        version=version,
        cancelled=cancelled,
        incomplete=tuple(incomplete),
        undecided=tuple(undecided),
        ready=tuple(ready),
        replay=replay,
        next_batch=next_batch,
    )


def cancel_open(
    store: Store, stage: str, reason: str, now: float, *, replaced: bool
) -> tuple[str, ...]:
    """End every open session of a stage as CANCELLED.

    Args:
        store: the ledger's file.
        stage: name of the recipe stage.
        reason: one line, for people.
        now: unix time, seconds.
        replaced: the sessions leave their groups, to be replaced by new ones.

    Returns:
        Their ids, in order of dispatch.
    """
    rows = store.execute(
        "UPDATE sessions SET outcome = ?, reason = ?, finished_at = ?, replaced = ?, "
        "drop_reason = COALESCE(drop_reason, ?) WHERE stage = ? AND outcome IS NULL "
        "RETURNING key, id",
        (Outcome.CANCELLED, reason, now, replaced, DropReason.CANCELLED, stage),
    )
    return tuple(name for _, name in sorted(rows))


def _open_groups(
    store: Store, reader: LedgerReader, stage: str
) -> tuple[list[IncompleteGroup], list[WaitingGroup], list[WaitingGroup]]:
    """(incomplete, undecided, ready) groups of a stage that has no open sessions."""
    incomplete, undecided, ready = [], [], []
    for group_id, purpose, task, instance, size, state in store.execute(
        "SELECT id, purpose, task, instance, size, state FROM groups WHERE stage = ? AND "
        "state != ? ORDER BY rowid",
        (stage, GroupState.DROPPED),
    ):
        rollouts = reader.rollouts(group_id)
        if len(rollouts) < size:
            finished = tuple(rollout.session_id for rollout in rollouts)
            incomplete.append(
                IncompleteGroup(
                    group_id,
                    stage,
                    purpose,
                    task,
                    decode_json(instance),
                    size - len(rollouts),
                    finished,
                    _lost(store, group_id),
                )
            )
        elif purpose == TRAIN:
            pending = _pending(store, group_id)
            group = WaitingGroup(group_id, size, rollouts, pending)
            if state == GroupState.OPEN:
                undecided.append(group)
            elif pending:
                ready.append(group)
    return incomplete, undecided, ready


def _lost(store: Store, group_id: str) -> tuple[str, ...]:
    """Sessions that crashes took from a group."""
    rows = store.execute(
        "SELECT id FROM sessions WHERE group_id = ? AND replaced = 1 ORDER BY key", (group_id,)
    )
    return tuple(name for (name,) in rows)


def _pending(store: Store, group_id: str) -> tuple[str, ...]:
    """Members that are neither dropped nor in a batch."""
    rows = store.execute(
        "SELECT s.id FROM sessions s LEFT JOIN batch_members m ON m.session = s.key WHERE "
        "s.group_id = ? AND s.drop_reason IS NULL AND m.session IS NULL ORDER BY s.key",
        (group_id,),
    )
    return tuple(name for (name,) in rows)
