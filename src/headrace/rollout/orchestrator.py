"""Keeps rollouts in flight, decides their groups and cuts batches.

Producer and consumer meet here: rollouts are dispatched group by group as long as there is room,
never waiting for a batch; `cut` hands out a batch as soon as enough finished groups carry signal.
Staleness is looked at in `cut` and nowhere else (law L7). All decisions go to the ledger first.
"""

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Sequence

import msgspec

from headrace.errors import UserError
from headrace.rollout.groups import GroupDecision, ScoredRollout, WeightedRollout, advantages
from headrace.rollout.ledger import Ledger
from headrace.rollout.mixing import TaskMix
from headrace.rollout.pausing import TaskPauses
from headrace.rollout.records import (
    TRAIN,
    Batch,
    BatchMember,
    Recovery,
    WaitingGroup,
)
from headrace.rollout.runner import FinishedRollout, RolloutRunner, Ticket
from headrace.rollout.segments import segments
from headrace.rollout.staleness import is_stale
from headrace.rollout.types import DropReason, Outcome, Segment, Session
from headrace.tasks.types import TaskInstance, TaskUnavailable


class SourceConfig(msgspec.Struct, frozen=True):
    """Constants of one RL stage; see `headrace.recipe.AgenticRlStage`."""

    stage: str
    group_size: int
    groups_per_batch: int
    concurrency: int
    staleness: int
    temperature: float
    max_tokens: int
    leave_one_out: bool = False
    advantage_std: bool = False
    synchronous: bool = False
    ready_batches: int = 2
    """Finished groups waiting for the trainer are bounded by this many batches."""


class TrainingMember(msgspec.Struct, frozen=True):
    """A trajectory of a batch: its group, segments, advantage and multiplicity."""

    session_id: str
    group_id: str
    segments: tuple[Segment, ...]
    advantage: float
    multiplicity: int


class TrainingBatch(msgspec.Struct, frozen=True):
    """What the trainer gets. `index` identifies it in the ledger."""

    index: int
    members: tuple[TrainingMember, ...]


class TaskCounts(msgspec.Struct):
    """What one task did since the last look; counts and sums."""

    dispatched: int = 0
    """Groups."""
    finished: int = 0
    """Rollouts."""
    scored: int = 0
    env_failed: int = 0
    reward_sum: float = 0.0
    trained: int = 0
    """Groups handed to the trainer."""


class Window(msgspec.Struct):
    """What happened since the last look; counts and sums."""

    finished: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    env_failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    groups: int = 0
    dropped_no_signal: int = 0
    dropped_invalid: int = 0
    dropped_stale: int = 0
    tasks: dict[str, TaskCounts] = msgspec.field(default_factory=dict)

    def of(self, task: str) -> TaskCounts:
        """The counts of one task, made on first use."""
        return self.tasks.setdefault(task, TaskCounts())


class _ReadyGroup(msgspec.Struct):
    group_id: str
    members: list[WeightedRollout]
    sessions: dict[str, Session]


class RolloutSource:
    """The producer side of one RL stage.

    Args:
        mix: gives the instance of each new group.
        pauses: which tasks rest because their environment fails; by default with its defaults.
    """

    def __init__(
        self,
        config: SourceConfig,
        *,
        runner: RolloutRunner,
        ledger: Ledger,
        mix: TaskMix,
        pauses: TaskPauses | None = None,
        next_batch: int = 0,
    ) -> None:
        self.config = config
        self.window = Window()
        self._runner = runner
        self._ledger = ledger
        self.mix = mix
        self.pauses = pauses or TaskPauses(mix.ratios)
        self._next_batch = next_batch
        self._replay: deque[Batch] = deque()
        self._open: dict[str, tuple[int, dict[str, Session]]] = {}
        self._ready: deque[_ReadyGroup] = deque()
        self._rollouts: dict[asyncio.Task[None], str] = {}
        self._room_changed = asyncio.Event()
        self._ready_changed = asyncio.Event()
        self._error: BaseException | None = None
        self._producer: asyncio.Task[None] | None = None
        self._credit = 0  # groups a synchronous stage may still dispatch for the coming batch
        self._redispatch: deque[tuple[str, TaskInstance, int]] = deque()

    # -- life -------------------------------------------------------------------------------

    def resume(self, recovery: Recovery) -> None:
        """Take over what a crashed process left: replays, waiting and incomplete groups."""
        self._next_batch = recovery.next_batch
        self._replay.extend(recovery.replay)
        for waiting in recovery.undecided:
            self._decide(
                waiting.group_id,
                {r.session_id: self._ledger.trainable(r.session_id) for r in waiting.rollouts},
            )
        for waiting in recovery.ready:
            self._requeue(waiting)
        for group in recovery.incomplete:
            if group.stage != self.config.stage or group.purpose != TRAIN:
                continue
            kept = {s: self._ledger.trainable(s) for s in group.finished}
            size = len(kept) + group.missing
            self._open[group.group_id] = (size, kept)
            instance = msgspec.convert(group.instance, TaskInstance)
            self._redispatch.append((group.group_id, instance, group.missing))

    def start(self) -> None:
        """Begin to dispatch."""
        self._producer = asyncio.create_task(self._produce(), name="rollout producer")
        self._producer.add_done_callback(lambda _: self._wake())

    async def stop(self) -> None:
        """Cancel what is in flight; `Ledger.stage_finished` gives the rest its reason."""
        if self._producer is not None:
            self._producer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._producer
        for task in list(self._rollouts):
            task.cancel()
        await asyncio.gather(*self._rollouts, return_exceptions=True)
        self._open.clear()
        self._ready.clear()

    @property
    def replaying(self) -> bool:
        """Whether batches wait that a crashed process had cut but not trained."""
        return bool(self._replay)

    @property
    def in_flight(self) -> int:
        """Rollouts running now."""
        return len(self._rollouts)

    @property
    def ready_groups(self) -> int:
        """Groups waiting for the trainer."""
        return len(self._ready)

    @property
    def cursor(self) -> int:
        """Groups dispatched so far."""
        return self.mix.groups

    def take_window(self) -> Window:
        """Counts since the last call."""
        window, self.window = self.window, Window()
        return window

    # -- producing --------------------------------------------------------------------------

    def _room(self) -> bool:
        """Whether another group may be dispatched."""
        config = self.config
        if config.synchronous:
            return self._credit > 0
        if self._rollouts and len(self._rollouts) + config.group_size > config.concurrency:
            return False
        return len(self._ready) < config.ready_batches * config.groups_per_batch

    async def _produce(self) -> None:
        while True:
            while self._redispatch:
                group_id, instance, missing = self._redispatch.popleft()
                self._dispatch(group_id, instance, missing)
            while self._room() and (due := self.mix.due(self.pauses.resting)) is not None:
                group_id = f"{self.config.stage}-{self.mix.groups:06d}"
                try:
                    instance = await self.mix.next(due)
                except TaskUnavailable as error:
                    self.pauses.unavailable(due, str(error))
                    self._wake()
                    continue
                self.pauses.dispatched(due)
                self._credit -= 1
                self.window.of(instance.task).dispatched += 1
                self._open[group_id] = (self.config.group_size, {})
                self._dispatch(group_id, instance, self.config.group_size)
                # Give the rollouts of one group a head start over building the next.
                await asyncio.sleep(0)
            self._room_changed.clear()
            # A task that rests may be tried again when its pause ends. Not `wait_for`, which may
            # swallow the cancellation that ends this.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pauses.next_try_s if self._room() else None):
                    await self._room_changed.wait()

    def _dispatch(self, group_id: str, instance: TaskInstance, count: int) -> None:
        tickets = [
            Ticket(
                session_id=f"{group_id}-{uuid.uuid4().hex[:8]}",
                group_id=group_id,
                stage=self.config.stage,
                purpose=TRAIN,
                instance=instance,
                temperature=self.config.temperature,
            )
            for _ in range(count)
        ]
        self._ledger.dispatch(
            self.config.stage,
            TRAIN,
            group_id,
            instance.task,
            msgspec.to_builtins(instance),
            [t.session_id for t in tickets],
            state={cursor_key(self.config.stage): self.mix.state},
        )
        for ticket in tickets:
            task = asyncio.create_task(self._rollout(ticket), name=ticket.session_id)
            self._rollouts[task] = ticket.session_id
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._rollouts.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake()

    async def _rollout(self, ticket: Ticket) -> None:
        finished = await self._runner.run(ticket)
        self._count(finished)
        size, sessions = self._open[ticket.group_id]
        sessions[ticket.session_id] = finished.session
        if len(sessions) == size:
            del self._open[ticket.group_id]
            self._decide(ticket.group_id, sessions)

    def _count(self, finished: FinishedRollout) -> None:
        window, session = self.window, finished.session
        window.finished += 1
        task = window.of(session.task)
        task.finished += 1
        window.turns += len(session.policy_calls)
        window.sampled_tokens += sum(len(c.output_ids) for c in session.policy_calls)
        if session.outcome is Outcome.ENV_FAILED:
            window.env_failed += 1
            task.env_failed += 1
            self.pauses.failed(session.task, session.reason)
        elif session.outcome is not Outcome.CANCELLED:
            self.pauses.succeeded(session.task)
        if finished.reward is not None:
            window.scored += 1
            window.reward_sum += finished.reward
            task.scored += 1
            task.reward_sum += finished.reward

    # -- deciding ---------------------------------------------------------------------------

    def _decide(self, group_id: str, sessions: dict[str, Session]) -> None:
        """Turn a complete group into advantages, or drop it with its reason."""
        decision = self._decision(sessions)
        self._ledger.decide_group(group_id, decision)
        self.window.groups += 1
        if decision.drop_reason is DropReason.NO_SIGNAL:
            self.window.dropped_no_signal += 1
        elif decision.drop_reason is DropReason.GROUP_INVALID:
            self.window.dropped_invalid += 1
        if decision.members:
            self._ready.append(_ReadyGroup(group_id, list(decision.members), sessions))
        self._wake()

    def _decision(self, sessions: dict[str, Session]) -> GroupDecision:
        scored = [
            ScoredRollout(s.id, s.outcome or Outcome.CANCELLED, s.rewards.get("reward"))
            for s in sessions.values()
        ]
        return advantages(
            scored,
            group_size=max(self.config.group_size, len(scored)),
            leave_one_out=self.config.leave_one_out,
            normalise_std=self.config.advantage_std,
        )

    def _requeue(self, waiting: WaitingGroup) -> None:
        """A decided group from before a crash: decide again (it is pure), keep what is pending."""
        decision = advantages(
            waiting.rollouts,
            group_size=waiting.size,
            leave_one_out=self.config.leave_one_out,
            normalise_std=self.config.advantage_std,
        )
        members = [m for m in decision.members if m.session_id in waiting.pending]
        sessions = {m.session_id: self._ledger.trainable(m.session_id) for m in members}
        self._ready.append(_ReadyGroup(waiting.group_id, members, sessions))

    # -- cutting ----------------------------------------------------------------------------

    async def cut(self, version: int, timeout_s: float) -> TrainingBatch | None:
        """The next batch, cut at `version`; None when `timeout_s` passes first.

        Raises:
            UserError: no task's environment works any more.
        """
        if self._replay:
            return self._replayed(self._replay.popleft())
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self.config.synchronous:
            self._credit = self.config.groups_per_batch
            self._wake()
        while True:
            self._drop_stale(version)
            if self._enough():
                return self._cut(version)
            if self._error is not None:
                raise self._error  # the recorder failed (a full disk, a bug): nothing can go on
            if (verdict := self.pauses.verdict) is not None:
                raise UserError(f"stage {self.config.stage}: {verdict}")
            if self._producer is not None and self._producer.done():
                self._producer.result()
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return None
            if (patience_s := self.pauses.patience_s) is not None:
                remaining = min(remaining, patience_s)
            self._ready_changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready_changed.wait(), remaining)

    def _wake(self) -> None:
        """Something finished or was taken: producer and consumer look again."""
        self._room_changed.set()
        self._ready_changed.set()

    def _enough(self) -> bool:
        if not self.config.synchronous:
            return len(self._ready) >= self.config.groups_per_batch
        if self._credit > 0 or self._rollouts:
            return False
        if self._ready:
            return True
        # Nobody had signal: a synchronous batch of nothing is no batch; try other instances.
        self._credit = self.config.groups_per_batch
        self._wake()
        return False

    def _drop_stale(self, version: int) -> None:
        """Remove trajectories that are too old for a batch cut now."""
        stale: list[tuple[str, DropReason]] = []
        for group in self._ready:
            keep: list[WeightedRollout] = []
            for member in group.members:
                versions = _versions(group.sessions[member.session_id])
                if is_stale(version, versions, self.config.staleness):
                    stale.append((member.session_id, DropReason.STALE))
                else:
                    keep.append(member)
            group.members = keep
        if stale:
            self.window.dropped_stale += len(stale)
            self._ledger.drop(stale)
            self._ready = deque(g for g in self._ready if g.members)
            self._room_changed.set()

    def _cut(self, version: int) -> TrainingBatch:
        """Take the oldest groups, oldest first."""
        count = len(self._ready) if self.config.synchronous else self.config.groups_per_batch
        groups = [self._ready.popleft() for _ in range(count)]
        index = self._next_batch
        self._next_batch += 1
        members: list[TrainingMember] = []
        records: list[BatchMember] = []
        for group in groups:
            # One instance, one task; a ready group has members.
            self.window.of(next(iter(group.sessions.values())).task).trained += 1
            for member in group.members:
                found, excluded = self._segments(group.sessions[member.session_id])
                records.append(
                    BatchMember(member.session_id, member.advantage, member.multiplicity, excluded)
                )
                members.append(
                    TrainingMember(
                        member.session_id,
                        group.group_id,
                        found,
                        member.advantage,
                        member.multiplicity,
                    )
                )
        self._ledger.cut_batch(
            Batch(self.config.stage, index, version, self.config.staleness, tuple(records))
        )
        self._wake()
        return TrainingBatch(index, tuple(members))

    def _segments(self, session: Session) -> tuple[tuple[Segment, ...], dict[str, DropReason]]:
        """Segments short enough to train on, and the calls they leave out with their reason."""
        kept = tuple(segments(session, self.config.max_tokens))
        owned = {call_id for segment in kept for call_id in segment.call_ids}
        excluded = {
            call.id: DropReason.TOO_LONG
            for call in session.policy_calls
            if call.spans and call.id not in owned
        }
        return kept, excluded

    def _replayed(self, batch: Batch) -> TrainingBatch:
        """A batch that had been cut before a crash, rebuilt verbatim from the evidence."""
        members = []
        for member in batch.members:
            session = self._ledger.trainable(member.session_id)
            found, _ = self._segments(session)
            members.append(
                TrainingMember(
                    member.session_id,
                    session.group_id,
                    found,
                    member.advantage,
                    member.multiplicity,
                )
            )
        return TrainingBatch(batch.index, tuple(members))


def cursor_key(stage: str) -> str:
    """Name under which the ledger keeps what a stage has dispatched; see `TaskMix.state`."""
    return f"cursor:{stage}"


def _versions(session: Session) -> Sequence[int]:
    return [span.weight_version for call in session.policy_calls for span in call.spans]
