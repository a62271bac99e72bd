"""Keeps rollouts in flight and decides their groups.

Producer and consumer meet here: rollouts are dispatched group by group as long as there is room,
never waiting for a batch; `cut` hands out a batch as soon as enough finished groups carry signal.
All decisions go to the ledger first. How a batch is made of groups is `cutting`'s business.
"""

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.errors import UserError
from headrace.rollout.cutting import BatchQueue, TrainingBatch
from headrace.rollout.failures import FailureRules, reasons_of
from headrace.rollout.groups import GroupDecision, ScoredRollout, advantages
from headrace.rollout.ledger import Ledger
from headrace.rollout.mixing import TaskMix
from headrace.rollout.reasons import FailureReason
from headrace.rollout.records import TRAIN, Recovery, WaitingGroup
from headrace.rollout.retrying import Retries
from headrace.rollout.runner import FinishedRollout, RolloutRunner, Ticket
from headrace.rollout.types import DropReason, Outcome, Session
from headrace.rollout.window import Window
from headrace.tasks.types import TaskInstance

FAILURES_IN_A_ROW = 64
"""So many environment failures without one success in between end the stage with an error."""

_TOLD_BEFORE = (DropReason.ENV_FAILED, DropReason.CANCELLED)
"""Why rollouts leave a group that were counted as failed when they ended."""


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
    failures: FailureRules = FailureRules()
    """What to do about failed rollouts."""
    ready_batches: int = 2
    """Finished groups waiting for the trainer are bounded by this many batches."""


class RolloutSource:
    """The producer side of one RL stage.

    Args:
        mix: gives the instance of each new group.
        watch: is shown every finished rollout.
    """

    def __init__(
        self,
        config: SourceConfig,
        *,
        runner: RolloutRunner,
        ledger: Ledger,
        mix: TaskMix,
        next_batch: int = 0,
        watch: Callable[[FinishedRollout], None] | None = None,
    ) -> None:
        self.config = config
        self.window = Window()
        self._watch = watch
        self._retries = Retries(config.failures)
        self._runner = runner
        self._ledger = ledger
        self.mix = mix
        self._open: dict[str, tuple[int, dict[str, Session]]] = {}
        self._ready = BatchQueue(
            ledger,
            stage=config.stage,
            staleness=config.staleness,
            max_tokens=config.max_tokens,
            next_batch=next_batch,
        )
        self._rollouts: dict[asyncio.Task[None], str] = {}
        self._room_changed = asyncio.Event()
        self._ready_changed = asyncio.Event()
        self._failures = 0
        self._last_failure = ""
        self._error: BaseException | None = None
        self._producer: asyncio.Task[None] | None = None
        self._credit = 0  # groups a synchronous stage may still dispatch for the coming batch
        self._redispatch: deque[tuple[str, TaskInstance, int]] = deque()

    # -- life -------------------------------------------------------------------------------

    def resume(self, recovery: Recovery) -> None:
        """Take over what a crashed process left: replays, waiting and incomplete groups."""
        self._ready.next_batch = recovery.next_batch
        self._ready.replay_first(recovery.replay)
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
        return self._ready.replaying

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
                attempts = self._ledger.retried(group_id)
                self._dispatch(group_id, instance, missing, attempts=attempts)
            while self._room():
                group_id = f"{self.config.stage}-{self.mix.groups:06d}"
                instance = await self.mix.next()
                self._credit -= 1
                self.window.of(instance.task).dispatched += 1
                self._open[group_id] = (self.config.group_size, {})
                self._dispatch(group_id, instance, self.config.group_size)
                # Give the rollouts of one group a head start over building the next.
                await asyncio.sleep(0)
            self._room_changed.clear()
            await self._room_changed.wait()

    def _dispatch(
        self,
        group_id: str,
        instance: TaskInstance,
        count: int,
        *,
        replaces: str | None = None,
        attempts: int = 0,
    ) -> None:
        """Start `count` rollouts of a group; one may take the place of a failed session."""
        tickets = [
            Ticket(
                session_id=f"{group_id}-{uuid.uuid4().hex[:8]}",
                group_id=group_id,
                stage=self.config.stage,
                purpose=TRAIN,
                instance=instance,
                temperature=self.config.temperature,
                penalties=self.config.failures.penalties,
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
            replaces=() if replaces is None else (replaces,),
        )
        for ticket in tickets:
            if replaces is None:
                self._retries.resume(ticket.session_id, attempts)
            else:
                self._retries.follow(replaces, ticket.session_id)
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
        if self._retries.again(finished.session):
            self.window.retried += 1
            self._dispatch(ticket.group_id, ticket.instance, 1, replaces=ticket.session_id)
            return
        self._retries.forget(ticket.session_id)
        size, sessions = self._open[ticket.group_id]
        sessions[ticket.session_id] = finished.session
        if len(sessions) == size:
            del self._open[ticket.group_id]
            self._decide(ticket.group_id, sessions)

    def _count(self, finished: FinishedRollout) -> None:
        window, session = self.window, finished.session
        if self._watch is not None:
            self._watch(finished)
        window.finished += 1
        window.failures.update(reasons_of(session.outcome, session.failure, None))
        task = window.of(session.task)
        task.finished += 1
        window.turns += len(session.policy_calls)
        window.sampled_tokens += sum(len(c.output_ids) for c in session.policy_calls)
        if session.outcome is Outcome.ENV_FAILED:
            window.env_failed += 1
            self._failures += 1
            self._last_failure = session.reason
        else:
            self._failures = 0
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
        self.window.failures.update(
            FailureReason(why.value) for _, why in decision.dropped if why not in _TOLD_BEFORE
        )
        if decision.drop_reason is DropReason.NO_SIGNAL:
            self.window.dropped_no_signal += 1
        elif decision.drop_reason is DropReason.GROUP_INVALID:
            self.window.dropped_invalid += 1
        if decision.members:
            self._ready.add(group_id, decision.members, sessions)
        self._wake()

    def _decision(self, sessions: dict[str, Session]) -> GroupDecision:
        scored = [
            ScoredRollout(s.id, s.outcome or Outcome.CANCELLED, s.rewards.get("reward"), s.failure)
            for s in sessions.values()
        ]
        return advantages(
            scored,
            group_size=max(self.config.group_size, len(scored)),
            leave_one_out=self.config.leave_one_out,
            normalise_std=self.config.advantage_std,
            rules=self.config.failures,
        )

    def _requeue(self, waiting: WaitingGroup) -> None:
        """A decided group from before a crash: decide again (it is pure), keep what is pending."""
        decision = advantages(
            waiting.rollouts,
            group_size=waiting.size,
            leave_one_out=self.config.leave_one_out,
            normalise_std=self.config.advantage_std,
            rules=self.config.failures,
        )
        members = [m for m in decision.members if m.session_id in waiting.pending]
        sessions = {m.session_id: self._ledger.trainable(m.session_id) for m in members}
        if members:
            self._ready.add(waiting.group_id, members, sessions)

    # -- cutting ----------------------------------------------------------------------------

    async def cut(self, version: int, timeout_s: float) -> TrainingBatch | None:
        """The next batch, cut at `version`; None when `timeout_s` passes first.

        Raises:
            UserError: the environment fails again and again.
        """
        if self._ready.replaying:
            return self._ready.replayed()
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self.config.synchronous:
            self._credit = self.config.groups_per_batch
            self._wake()
        while True:
            stale = self._ready.drop_stale(version)
            if stale:
                self.window.dropped_stale += stale
                self.window.failures[FailureReason.STALE] += stale
                self._room_changed.set()
            if self._enough():
                return self._cut(version)
            if self._error is not None:
                raise self._error  # the recorder failed (a full disk, a bug): nothing can go on
            if self._failures >= FAILURES_IN_A_ROW:
                raise UserError(
                    f"stage {self.config.stage}: {self._failures} rollouts in a row ended with an "
                    f"environment failure, the last one: {self._last_failure}"
                )
            if self._producer is not None and self._producer.done():
                self._producer.result()
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return None
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

    def _cut(self, version: int) -> TrainingBatch:
        config = self.config
        batch = self._ready.cut(
            version, len(self._ready) if config.synchronous else config.groups_per_batch
        )
        for task, groups in batch.tasks.items():
            self.window.of(task).trained += groups
        self._wake()
        return batch


def cursor_key(stage: str) -> str:
    """Name under which the ledger keeps what a stage has dispatched; see `TaskMix.state`."""
    return f"cursor:{stage}"
