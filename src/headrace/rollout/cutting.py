"""Decided groups on their way into batches: they wait, grow old, are cut, oldest weights first.

Staleness is looked at here, when a batch is cut, and nowhere else (law L7). Every decision goes to
the ledger first. Who produces groups and who waits for batches is not known here.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.rollout.groups import WeightedRollout
from headrace.rollout.naming import place
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import Batch, BatchMember
from headrace.rollout.segments import segments
from headrace.rollout.staleness import is_stale
from headrace.rollout.types import DropReason, Segment, Session


class TrainingMember(msgspec.Struct, frozen=True):
    """A trajectory of a batch: its group, task, segments, advantage and multiplicity."""

    session_id: str
    group_id: str
    task: str
    segments: tuple[Segment, ...]
    advantage: float
    multiplicity: int


class TrainingBatch(msgspec.Struct, frozen=True):
    """What the trainer gets. `index` identifies it in the ledger; `tasks` says how many of its
    groups are of which task."""

    index: int
    members: tuple[TrainingMember, ...]
    tasks: dict[str, int]


class StaleDrop(msgspec.Struct, frozen=True):
    """What was too old: so many trajectories, and by task the groups that were left empty."""

    trajectories: int
    groups: dict[str, int]


_Cut = tuple[tuple[Segment, ...], dict[str, DropReason]]
"""A session's segments that train, and the calls that they leave out."""


class _ReadyGroup(msgspec.Struct):
    group_id: str
    task: str
    members: list[WeightedRollout]
    sessions: Mapping[str, Session]
    cut: dict[str, _Cut]
    """Of every member. Worked out on arrival: when a batch is cut, a trainer waits for it."""
    oldest: float
    """Version of the oldest weights that sampled any of it; infinite if nothing was sampled."""


class BatchQueue:
    """Groups with signal that wait for the trainer.

    Args:
        ledger: where drops and cuts are kept.
        stage: name of the recipe stage.
        staleness: tau, see `staleness.is_stale`.
        max_tokens: longest segment that trains.
        next_batch: index of the next batch.
    """

    def __init__(
        self, ledger: Ledger, *, stage: str, staleness: int, max_tokens: int, next_batch: int = 0
    ) -> None:
        self.next_batch = next_batch
        self._ledger = ledger
        self._stage = stage
        self._staleness = staleness
        self._max_tokens = max_tokens
        self._ready: deque[_ReadyGroup] = deque()
        self._replay: deque[Batch] = deque()

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._ready)

    def add(
        self, group_id: str, members: Sequence[WeightedRollout], sessions: Mapping[str, Session]
    ) -> None:
        """A decided group with at least one member; all its sessions attempt one instance."""
        task = sessions[members[0].session_id].task
        oldest = min((v for m in members for v in _versions(sessions[m.session_id])), default=None)
        self._ready.append(
            _ReadyGroup(
                group_id,
                task,
                list(members),
                sessions,
                {m.session_id: self._segments(sessions[m.session_id]) for m in members},
                math.inf if oldest is None else oldest,
            )
        )

    def clear(self) -> None:
        """Forget what waits."""
        self._ready.clear()

    def drop_stale(self, version: int) -> StaleDrop:
        """Remove trajectories that are too old for a batch cut now."""
        stale: list[tuple[str, DropReason]] = []
        for group in self._ready:
            keep: list[WeightedRollout] = []
            for member in group.members:
                versions = _versions(group.sessions[member.session_id])
                if is_stale(version, versions, self._staleness):
                    stale.append((member.session_id, DropReason.STALE))
                else:
                    keep.append(member)
            group.members = keep
        empty = Counter(group.task for group in self._ready if not group.members)
        if stale:
            self._ledger.drop(stale)
            self._ready = deque(g for g in self._ready if g.members)
        return StaleDrop(len(stale), empty)

    def cut(self, version: int, count: int) -> TrainingBatch:
        """A batch of the `count` oldest groups, which have to be there, at `version`.

        Oldest by the weights that sampled them, then in the order they came: a group with a slow
        rollout comes late and old, and behind younger ones it would wait until it is stale.
        """
        self._ready = deque(sorted(self._ready, key=lambda group: group.oldest))
        groups = [self._ready.popleft() for _ in range(count)]
        # As dispatched, not as finished: floating-point sums of a batch depend on its order.
        groups.sort(key=lambda group: place(group.group_id))
        members: list[TrainingMember] = []
        records: list[BatchMember] = []
        for group in groups:
            for member in group.members:
                found, excluded = group.cut[member.session_id]
                records.append(
                    BatchMember(member.session_id, member.advantage, member.multiplicity, excluded)
                )
                members.append(
                    TrainingMember(
                        member.session_id,
                        group.group_id,
                        group.task,
                        found,
                        member.advantage,
                        member.multiplicity,
                    )
                )
        index = self.next_batch
        self._ledger.cut_batch(Batch(self._stage, index, version, self._staleness, tuple(records)))
        self.next_batch += 1
        return TrainingBatch(index, tuple(members), Counter(group.task for group in groups))

    # -- after a crash ----------------------------------------------------------------------

    def replay_first(self, batches: Iterable[Batch]) -> None:
        """Batches that were cut but are in no surviving weights; they train before all others."""
        self._replay.extend(batches)

    @property
    def replaying(self) -> bool:
        """Whether such batches wait."""
        return bool(self._replay)

    def replayed(self) -> TrainingBatch:
        """The next of them, rebuilt verbatim from the evidence."""
        batch = self._replay.popleft()
        members = []
        tasks: dict[str, str] = {}
        for member in batch.members:
            session = self._ledger.trainable(member.session_id)
            tasks[session.group_id] = session.task
            found, _ = self._segments(session)
            members.append(
                TrainingMember(
                    member.session_id,
                    session.group_id,
                    session.task,
                    found,
                    member.advantage,
                    member.multiplicity,
                )
            )
        return TrainingBatch(batch.index, tuple(members), Counter(tasks.values()))

    def _segments(self, session: Session) -> _Cut:
        """Segments short enough to train on, and the calls they leave out with their reason."""
        kept = tuple(segments(session, self._max_tokens))
        owned = {call_id for segment in kept for call_id in segment.call_ids}
        excluded = {
            call.id: DropReason.TOO_LONG
            for call in session.policy_calls
            if call.spans and call.id not in owned
        }
        return kept, excluded


def _versions(session: Session) -> Sequence[int]:
    return [span.weight_version for call in session.policy_calls for span in call.spans]
