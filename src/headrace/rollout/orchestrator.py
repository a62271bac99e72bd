"""Keeps rollouts in flight and decides their groups.

Producer and consumer meet here: rollouts are dispatched group by group as long as there is room,
never waiting for a batch; `cut` hands out a batch as soon as enough finished groups carry signal.
All decisions go to the ledger first. How a batch is made of groups is `cutting`'s business.

Modes other than "async" go in step with the trainer: groups for one batch are let in at a time,
for "sync" when that batch is asked for, for "one_step_off" when the one before is handed out.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.errors import UserError
from headrace.rollout.choosing.admission import Admission
from headrace.rollout.choosing.mixing import TaskMix
from headrace.rollout.choosing.overgeneration import Overgeneration
from headrace.rollout.choosing.pausing import TaskPauses
from headrace.rollout.choosing.ratios import AdaptiveRatios
from headrace.rollout.choosing.sharing import TaskSharing
from headrace.rollout.cutting import BatchQueue, TrainingBatch
from headrace.rollout.deciding import GroupDecisions
from headrace.rollout.failures.retrying import Retries
from headrace.rollout.failures.rules import reasons_of
from headrace.rollout.naming import (
    missing_names,
    next_attempt,
    rollout_seed,
    session_name,
)
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import TRAIN, Recovery
from headrace.rollout.runner import FinishedRollout, RolloutRunner, Ticket
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Outcome, Session
from headrace.rollout.window import Hold, HoldTimer, Window
from headrace.tasks.types import TaskInstance, TaskUnavailable

SETTLE_TIMEOUT_S = 3600.0
"""Longest wait for rollouts in flight to end; they have deadlines of their own."""


class RolloutSource:
    """The producer side of one RL stage.

    Args:
        mix: gives the instance of each new group.
        pauses: which tasks rest because their environment fails; by default with its defaults.
        ratios: adjusts the mix as groups are decided and train; None leaves it as it is.
        report: called with one line for people.
        watch: is shown every finished rollout.
    """

    def __init__(
        self,
        config: SourceConfig,
        *,
        runner: RolloutRunner,
        ledger: Ledger,
        mix: TaskMix,
        pauses: TaskPauses | None = None,
        ratios: AdaptiveRatios | None = None,
        next_batch: int = 0,
        report: Callable[[str], None] = lambda _: None,
        watch: Callable[[FinishedRollout], None] | None = None,
    ) -> None:
        self.config = config
        self.window = Window()
        self._runner = runner
        self._ledger = ledger
        self.pauses = pauses or TaskPauses(mix.ratios)
        self._in_step = config.mode != "async"
        self.sharing = TaskSharing(
            config.stage,
            mix,
            group_size=config.group_size,
            # A batch in step has so many groups; nobody may take the place of another.
            in_turn=self._in_step,
            ratios=ratios,
        )
        self._open: dict[str, tuple[int, dict[str, Session]]] = {}
        self._ready = BatchQueue(
            ledger,
            stage=config.stage,
            staleness=config.staleness,
            max_tokens=config.max_tokens,
            next_batch=next_batch,
        )
        self._admission = Admission(
            config.staleness if config.hold_back and not self._in_step else None,
            config.groups_per_batch,
        )
        self._generated = Overgeneration(config.dynamic, config.groups_per_batch)
        self._decisions = GroupDecisions(config, ledger, self.sharing, self._generated)
        self._report = report
        self._watch = watch
        self._retries = Retries(config.failures)
        self._shrunk = False
        self._rollouts: dict[asyncio.Task[None], str] = {}
        self._room_changed = asyncio.Event()
        self._ready_changed = asyncio.Event()
        self._error: BaseException | None = None
        self._producer: asyncio.Task[None] | None = None
        self._credit = 0  # groups that a mode in step may still dispatch for the coming batch
        self._granted = False  # whether that batch had its credit
        self._newest = 0
        self._publishing = False
        self._drawing = False  # whether a group is about to be dispatched
        self._hold = HoldTimer()
        self._redispatch: deque[tuple[str, TaskInstance, list[tuple[int, str]]]] = deque()

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
            members = self._decisions.pending_members(waiting)
            sessions = {m.session_id: self._ledger.trainable(m.session_id) for m in members}
            if members:
                self._ready.add(waiting.group_id, members, sessions)
        for group in recovery.incomplete:
            if group.stage != self.config.stage or group.purpose != TRAIN:
                continue
            kept = {s: self._ledger.trainable(s) for s in group.finished}
            size = len(kept) + group.missing
            self._open[group.group_id] = (size, kept)
            instance = msgspec.convert(group.instance, TaskInstance)
            names = missing_names(group.group_id, size, group.finished, group.lost)
            self._redispatch.append((group.group_id, instance, names))

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

    def returned(self, task: str) -> None:
        """A task's service is there again; see `TaskPauses.returned`."""
        self.pauses.returned(task)
        self._wake()

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
        return self.sharing.mix.groups

    def take_window(self) -> Window:
        """Counts since the last call."""
        window, self.window = self.window, Window()
        window.held, window.held_slot_s = self._hold.take(), self._hold.take_slot_s()
        return window

    # -- producing --------------------------------------------------------------------------

    def _held(self) -> Hold | None:
        """Why no further group may be dispatched now, if so."""
        config = self.config
        if self._publishing:
            return Hold.PUBLICATION
        if self._in_step and self._credit <= 0:
            return Hold.BATCH
        most = self._most_rollouts()
        if most <= 0.0:
            return Hold.READY
        if self._rollouts and len(self._rollouts) + config.group_size > most:
            return Hold.CONCURRENCY if most == config.concurrency else Hold.READY
        if self._admission.full(len(self._open) + len(self._ready)):
            return Hold.STALENESS
        return None

    def _most_rollouts(self) -> float:
        """How many rollouts may be in flight, by the groups that wait for the trainer."""
        config = self.config
        if self._in_step:
            return config.concurrency
        # Rollouts started now are ready much later. So they give way little by little while groups
        # pile up; all or nothing would let the trainer run dry, then flood it, again and again.
        full = config.ready_batches * config.groups_per_batch
        return config.concurrency * min(1.0, 2.0 * (1.0 - len(self._ready) / full))

    async def _produce(self) -> None:
        while True:
            while self._redispatch and not self._publishing:
                group_id, instance, names = self._redispatch.popleft()
                attempts = self._ledger.retried(group_id)
                self._dispatch(group_id, instance, names, attempts=attempts)
            while (held := self._held()) is None:
                due = self.sharing.next_task(self.pauses.resting)
                if due is None:
                    held = Hold.TASKS
                    break
                self._hold.switch(None)
                await self._begin_group(due)
                # Give the rollouts of one group a head start over building the next.
                await asyncio.sleep(0)
            unused = int(self._most_rollouts()) - len(self._rollouts)
            self._hold.switch(held, unused if held is Hold.STALENESS else 0)
            self._room_changed.clear()
            # A task that rests may be tried again when its pause ends.
            await _changed(
                self._room_changed, self.pauses.next_try_s if held is Hold.TASKS else None
            )

    async def _begin_group(self, task: str) -> None:
        """Dispatch a group of a task, unless its service cannot be asked now."""
        group_id = f"{self.config.stage}-{self.sharing.mix.groups:06d}"
        self._drawing = True
        try:
            instance = await self.sharing.mix.next(task)
        except TaskUnavailable as error:
            self.pauses.unavailable(task, str(error))
            self._wake()
            return
        finally:
            self._drawing = False
        self.pauses.dispatched(task)
        self._credit -= 1
        self.window.of(task).dispatched += 1
        self._open[group_id] = (self.config.group_size, {})
        members = range(self.config.group_size)
        names = [(member, session_name(group_id, member)) for member in members]
        self._dispatch(group_id, instance, names)

    def _grant(self) -> None:
        """Let in as many groups as the coming batch lacks: all of them, or, after a crash, those
        that had not been dispatched."""
        size = self.config.groups_per_batch
        begun = self._open or self._ready
        self._credit = -self.sharing.mix.groups % size or (0 if begun else size)
        self._granted = True
        self._wake()

    async def settle(self) -> None:
        """Wait until new weights may come: nothing is generated that must not see them.

        Nothing new begins until `published`, and nobody waits if the mode does not care.

        Raises:
            TimeoutError: a rollout does not end.
        """
        if not self._in_step and not self.config.whole_versions:
            return
        self._publishing = not self._in_step  # a batch in step is generated to its end first
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while self._drawing or self._rollouts or (self._in_step and self._owing()):
                ended = self._producer is None or self._producer.done()
                if self._error is not None or ended or self.pauses.verdict is not None:
                    return  # `cut` says what is wrong
                self._ready_changed.clear()
                await _changed(self._ready_changed, self.pauses.patience_s)

    def _owing(self) -> bool:
        """Whether groups of the coming batch are still to be dispatched."""
        return self._credit > 0 or bool(self._redispatch)

    def published(self, version: int) -> None:
        """The engines have new weights; batches are cut at this version from here on."""
        self._newest = max(self._newest, version)
        self._publishing = False
        self._admission.published()
        self._wake()

    def _dispatch(
        self,
        group_id: str,
        instance: TaskInstance,
        names: list[tuple[int, str]],
        *,
        replaces: str | None = None,
        attempts: int = 0,
        draw: int = 0,
    ) -> None:
        """Start rollouts of a group, named by (number in the group, session id).

        One may take the place of a failed session; `attempts` were made of each before, and each
        has the random numbers of its `draw`.
        """
        tickets = [
            Ticket(
                session_id=session_id,
                group_id=group_id,
                stage=self.config.stage,
                purpose=TRAIN,
                instance=instance,
                temperature=self.config.temperature,
                seed=rollout_seed(self.config.seed, group_id, member, draw),
                penalties=self.config.failures.penalties,
            )
            for member, session_id in names
        ]
        self._ledger.dispatch(
            self.config.stage,
            TRAIN,
            group_id,
            instance.task,
            msgspec.to_builtins(instance),
            [t.session_id for t in tickets],
            state=self._decisions.chosen,
            replaces=() if replaces is None else (replaces,),
        )
        for ticket in tickets:
            if replaces is None:
                self._retries.resume(ticket.session_id, attempts)
            else:
                self._retries.follow(replaces, ticket.session_id)
            task = asyncio.create_task(self._rollout(ticket), name=ticket.session_id)
            self._rollouts[task] = instance.task
            self.sharing.running[instance.task] += 1
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.sharing.running[self._rollouts.pop(task)] -= 1
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake()

    async def _rollout(self, ticket: Ticket) -> None:
        finished = await self._runner.run(ticket)
        self._count(finished)
        if self._retries.again(finished.session):
            self._attempt_again(ticket, finished.session)
            return
        self._retries.forget(ticket.session_id)
        size, sessions = self._open[ticket.group_id]
        sessions[ticket.session_id] = finished.session
        if len(sessions) == size:
            del self._open[ticket.group_id]
            self._decide(ticket.group_id, sessions)

    def _attempt_again(self, ticket: Ticket, failed: Session) -> None:
        """Give a failed rollout's place to another session, from the same prompt."""
        self.window.retried += 1
        member, name, attempt = next_attempt(ticket.session_id)
        # What its environment broke deserves the same luck. An agent that failed by itself would,
        # with the same random numbers, do the same again.
        own_fault = failed.failure is not None and failed.failure.may_be_penalised
        self._dispatch(
            ticket.group_id,
            ticket.instance,
            [(member, name)],
            replaces=ticket.session_id,
            draw=attempt if own_fault else 0,
        )

    def _count(self, finished: FinishedRollout) -> None:
        session = finished.session
        if self._watch is not None:
            self._watch(finished)
        self.window.failures.update(reasons_of(session.outcome, session.failure, None))
        self.window.count(session, finished.reward, finished.wall_s)
        if session.outcome is Outcome.ENV_FAILED:
            self.pauses.failed(session.task, session.reason)
        elif session.outcome is not Outcome.CANCELLED:
            self.pauses.succeeded(session.task)

    def _decide(self, group_id: str, sessions: dict[str, Session]) -> None:
        """Turn a complete group into advantages, or drop it with its reason."""
        decision = self._decisions.decide(group_id, sessions)
        self.window.decided(next(iter(sessions.values())).task, decision)
        if decision.members:
            self._ready.add(group_id, decision.members, sessions)
        else:
            self._admission.left(1)
        self._wake()

    # -- cutting ----------------------------------------------------------------------------

    async def cut(self, version: int, timeout_s: float) -> TrainingBatch | None:
        """The next batch, cut at `version` or the newest published; None after `timeout_s`.

        Raises:
            UserError: no task's environment works any more.
        """
        if self._ready.replaying:
            batch = self._ready.replayed()
            if self.config.mode == "one_step_off":
                self._grant()
            return batch
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._in_step and not self._granted:
            self._grant()
        while True:
            version = max(version, self._newest)
            self._drop_stale(version)
            if self._enough():
                return self._cut(version)
            if self._generated.failed:
                stage = self.config.stage
                raise UserError(self._generated.explanation(stage, len(self._ready)))
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
            self._admission.waited()
            self._ready_changed.clear()
            await _changed(self._ready_changed, remaining)

    def _drop_stale(self, version: int) -> None:
        stale = self._ready.drop_stale(version)
        if not stale.trajectories:
            return
        self.window.stale(stale.trajectories, stale.groups)
        self._admission.stale()
        self._admission.left(sum(stale.groups.values()))
        self.sharing.lost(stale.groups)
        self._room_changed.set()

    def _wake(self) -> None:
        """Something finished or was taken: producer and consumer look again."""
        self._room_changed.set()
        self._ready_changed.set()

    def _enough(self) -> bool:
        if not self._in_step:
            wanted = 1 if self._generated.shrunk else self.config.groups_per_batch
            return len(self._ready) >= wanted
        if self._credit > 0 or self._open or self._rollouts:
            return False
        if self._ready:
            return True
        # Nobody had signal: a batch of nothing is no batch; try other instances.
        self._grant()
        return False

    def _cut(self, version: int) -> TrainingBatch:
        config, ready = self.config, len(self._ready)
        shrunk = self._generated.shrunk and ready < config.groups_per_batch
        if shrunk and not self._shrunk:
            told = self._generated.explanation(config.stage, ready)
            self._report(f"{told}; going on with smaller batches, where that happens")
        self._shrunk |= shrunk  # said once; how often it happens is a metric
        self.window.small_batches += shrunk
        with self._ledger.transaction():
            batch = self._ready.cut(
                version, ready if self._in_step else min(ready, config.groups_per_batch)
            )
            self.sharing.trained(batch.tasks)
            self._decisions.save()
        self._generated.cut()
        self._admission.left(sum(batch.tasks.values()))
        for task, groups in batch.tasks.items():
            self.window.of(task).trained += groups
        self._granted = False
        if config.mode == "one_step_off":
            self._grant()
        self._wake()
        return batch


async def _changed(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for an event, no longer than so many seconds; None waits for it alone.

    Not `wait_for`: before Python 3.12 that loses a cancellation which comes with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
