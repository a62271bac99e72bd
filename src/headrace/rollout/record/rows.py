"""The rows that a ledger hands out, as small frozen types. No I/O.

Evidence itself (calls, sessions) has its types in `types.py`; these say what became of it.
"""

from enum import StrEnum
from typing import Any

import msgspec

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.groups import ScoredRollout
from headrace.rollout.types import DropReason, Outcome

TRAIN = "train"
"""The purpose of sessions that may train; every other purpose is "eval:LABEL"."""


class GroupState(StrEnum):
    """What has been decided about a group."""

    OPEN = "open"
    READY = "ready"
    """Its advantages exist; members may be put in batches."""
    DROPPED = "dropped"


class BatchMember(msgspec.Struct, frozen=True):
    """One session in a batch.

    Attributes:
        session_id: which rollout.
        advantage: its advantage.
        multiplicity: how often it counts (padding), >= 1.
        excluded: calls of the session whose tokens do not train, with the reason.
    """

    session_id: str
    advantage: float
    multiplicity: int = 1
    excluded: dict[str, DropReason] = {}


class Batch(msgspec.Struct, frozen=True):
    """What was cut for one update.

    Attributes:
        stage: name of the recipe stage.
        index: 0-based, gapless within the stage.
        current_version: newest published version when it was cut.
        tau: staleness bound it was cut with; None when there was none.
        members: in the order they were cut.
        step: trainer step that resulted; None while it is not in the surviving weights.
        replays: how often a recovery handed it out again.
    """

    stage: str
    index: int
    current_version: int
    tau: int | None
    members: tuple[BatchMember, ...]
    step: int | None = None
    replays: int = 0


class IncompleteGroup(msgspec.Struct, frozen=True):
    """A group that lost rollouts in a crash; `missing` new ones complete it.

    Attributes:
        group_id, stage, purpose, task, instance: what to dispatch again.
        missing: how many rollouts to dispatch, >= 1.
        finished: sessions that are kept.
        lost: sessions that crashes took from it, in order of dispatch.
    """

    group_id: str
    stage: str
    purpose: str
    task: str
    instance: dict[str, Any]
    missing: int
    finished: tuple[str, ...]
    lost: tuple[str, ...] = ()


class GroupRecord(msgspec.Struct, frozen=True):
    """A group as the ledger has it.

    Attributes:
        id, stage, purpose: of the group.
        size: rollouts it is meant to have.
        state: what was decided.
        drop_reason: why it was dropped as a whole; None otherwise.
        members: rollouts it has, without those that a crash took.
    """

    id: str
    stage: str
    purpose: str
    size: int
    state: str
    drop_reason: str | None
    members: int


class WaitingGroup(msgspec.Struct, frozen=True):
    """A complete group with sessions that are neither in a batch nor dropped.

    Attributes:
        group_id: which group.
        size: rollouts it was meant to have.
        rollouts: all members, for `advantages`.
        pending: sessions without a fate yet.
    """

    group_id: str
    size: int
    rollouts: tuple[ScoredRollout, ...]
    pending: tuple[str, ...]


class Recovery(msgspec.Struct, frozen=True):
    """Where a stage goes on after a crash.

    Attributes:
        stage: name of the recipe stage.
        step: trainer step of the newest durable checkpoint; 0 when there is none.
        checkpoint: its path; None when the stage starts from its initial weights.
        version: newest version published at or before `step`; None when there was none.
        cancelled: sessions that were open and are now CANCELLED.
        incomplete: groups that miss rollouts, oldest first.
        undecided: complete training groups that wait for a decision, oldest first.
        ready: decided training groups with pending sessions, oldest first.
        replay: batches to train again, verbatim and in this order, before any new one is cut.
        next_batch: index of the next new batch.
    """

    stage: str
    step: int
    checkpoint: str | None
    version: int | None
    cancelled: tuple[str, ...]
    incomplete: tuple[IncompleteGroup, ...]
    undecided: tuple[WaitingGroup, ...]
    ready: tuple[WaitingGroup, ...]
    replay: tuple[Batch, ...]
    next_batch: int


class SessionSummary(msgspec.Struct, frozen=True):
    """One session without its calls.

    Attributes:
        id, stage, purpose, task, instance, group_id: as in `Session`.
        outcome: None while open.
        reason: one line beside the outcome.
        reward: the total; None unless the outcome is scored.
        rewards: components by name.
        detail: the task service's extras.
        calls: number of calls.
        tokens: sampled tokens.
        oldest_version: of its sampled tokens; None when it has none.
        drop_reason: why it does not train; None otherwise.
        batch: index of its batch; None when it is in none.
        advantage: in that batch.
        step: trainer step that trained it; None when not in the surviving weights.
        dispatched_at, finished_at: unix time, seconds.
        failure: how it failed; None for one that did not, and in ledgers of earlier versions (see
            `failures.end_reason`).
    """

    id: str
    stage: str
    purpose: str
    task: str
    instance: dict[str, Any]
    group_id: str
    outcome: Outcome | None
    reason: str
    reward: float | None
    rewards: dict[str, float]
    detail: dict[str, Any]
    calls: int
    tokens: int
    oldest_version: int | None
    drop_reason: DropReason | None
    batch: int | None
    advantage: float | None
    step: int | None
    dispatched_at: float
    finished_at: float | None
    failure: FailureReason | None = None


class Conservation(msgspec.Struct, frozen=True):
    """Where the sampled tokens of a stage are (law L2).

    Attributes:
        sampled: all of them.
        trained: in the surviving weights.
        dropped: by reason.
        pending: in open sessions, undecided groups, and batches cut but not committed.
    """

    sampled: int
    trained: int
    dropped: dict[DropReason, int]
    pending: int

    @property
    def closes(self) -> bool:
        """Whether every sampled token is in exactly one place."""
        return self.sampled == self.trained + sum(self.dropped.values()) + self.pending


class RewardPoint(msgspec.Struct, frozen=True):
    """One scored rollout in time.

    Attributes:
        finished_at: unix time, seconds.
        reward: its total reward.
        version: oldest weight version in it; None when it sampled nothing.
        session_id: which rollout.
    """

    finished_at: float
    reward: float
    version: int | None
    session_id: str


class Publication(msgspec.Struct, frozen=True):
    """Weights handed to the engines: version, the trainer step they came from, where, when."""

    stage: str
    version: int
    step: int
    path: str
    published_at: float


class Evaluation(msgspec.Struct, frozen=True):
    """The result of one evaluation.

    Attributes:
        label: which one, e.g. "after:rl".
        task: task service name.
        stage: name of the recipe stage it belongs to.
        n: rollouts scored.
        success: success rate in [0, 1].
        low, high: confidence interval.
        detail: JSON-compatible extras, e.g. rates by family.
    """

    label: str
    task: str
    stage: str
    n: int
    success: float
    low: float
    high: float
    detail: dict[str, Any] = {}


class StageRecord(msgspec.Struct, frozen=True):
    """A stage: times in unix seconds, `seconds` of work over all resumes, its JSON result."""

    name: str
    started_at: float
    finished_at: float | None
    seconds: float | None
    result: dict[str, Any] | None
