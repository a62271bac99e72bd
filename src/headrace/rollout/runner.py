"""Runs one rollout: opens its session, lets the task service work, closes it with an outcome.

The runner turns whatever a task service does (return, raise, hang, be cancelled) into exactly one
`Outcome`, written to the ledger together with the calls the gateway recorded. It knows nothing of
groups or batches.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from headrace.rollout.failures.diagnosis import exception_reason, last_words, named
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import LIMIT_REASONS, REFUSAL_REASONS
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import LIMIT_WORDS, Call, Outcome, Session, SessionLimits
from headrace.tasks.results import problem_with
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance, TaskService

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""A task service that overruns its own timeout by this much is cut off as hung, unless it has a
`grace_s` of its own."""


class SessionGate(Protocol):
    """The part of the gateway a runner needs."""

    def open_session(
        self,
        session_id: str,
        *,
        limits: SessionLimits | None = None,
        seed: int | None = None,
    ) -> str:
        """Admit a session; returns its key."""
        ...

    def exceeded(self, session_id: str) -> str | None:
        """Which limit refused the last request of an open session, as an error code, or None."""
        ...

    def refused(self, session_id: str) -> str | None:
        """What refused the last request of an open session, limit or not, as an error code."""
        ...

    async def close_session(self, session_id: str) -> tuple[Call, ...]:
        """Refuse further calls, abort running ones; returns all its calls. Safe to repeat."""
        ...


class Ticket(msgspec.Struct, frozen=True):
    """A rollout to run, as dispatched in the ledger.

    Attributes:
        session_id: unique in the run.
        group_id: its group.
        stage: recipe stage.
        purpose: "train" or "eval:LABEL".
        instance: what to attempt.
        temperature: sampling temperature.
        seed: makes the session's sampling a function of this number; None leaves it to the engine.
        penalties: rewards of rollouts that failed through the agent, by reason, instead of what
            the task service gave.
    """

    session_id: str
    group_id: str
    stage: str
    purpose: str
    instance: TaskInstance
    temperature: float
    seed: int | None = None
    penalties: Mapping[FailureReason, float] = {}


class FinishedRollout(msgspec.Struct, frozen=True):
    """A closed session with its evidence, how long it took (seconds), and the service's extras."""

    session: Session
    wall_s: float
    detail: dict[str, Any] = {}

    @property
    def reward(self) -> float | None:
        """The total reward; None when the outcome carries none."""
        return self.session.rewards.get("reward")


class RolloutRunner:
    """See the module's docstring. One per run; many rollouts at once.

    Args:
        tasks: task services by name.
        gate: opens and closes sessions.
        ledger: where outcomes go.
        base_url: of the gateway, for agents.
        model: name of the model that learns.
        models: names of those beside it.
        limits: of every session. Without a time limit, its key works a little longer than the
            rollout may take.
        max_tokens: per call.
        max_turns: per rollout.
        timeout_s: wall clock of a rollout.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, TaskService],
        gate: SessionGate,
        ledger: Ledger,
        base_url: str,
        model: str,
        models: tuple[str, ...] = (),
        limits: SessionLimits | None = None,
        max_tokens: int = 64,
        max_turns: int = 6,
        timeout_s: float = 60.0,
    ) -> None:
        self._tasks = tasks
        self._gate = gate
        self._ledger = ledger
        self._base_url = base_url
        self._model = model
        self._models = models
        limits = limits or SessionLimits()
        if limits.wall_s is None:
            limits = msgspec.structs.replace(limits, wall_s=timeout_s + 2 * GRACE_S)
        self._limits = limits
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self.in_flight = 0

    async def run(self, ticket: Ticket) -> FinishedRollout:
        """Run one dispatched rollout to its end.

        Never raises for what a task service does. After a cancellation the session stays open in
        the ledger: the end of its stage or the next resume decides what becomes of it.
        """
        started = time.monotonic()
        self.in_flight += 1
        try:
            key = self._gate.open_session(ticket.session_id, limits=self._limits, seed=ticket.seed)
            endpoint = Endpoint(
                base_url=self._base_url,
                api_key=key,
                model=self._model,
                temperature=ticket.temperature,
                max_tokens=self._max_tokens,
                max_turns=self._max_turns,
                timeout_s=self._timeout_s,
                models=self._models,
            )
            result = await self._attempt(ticket, endpoint)
        except asyncio.CancelledError:
            await self._gate.close_session(ticket.session_id)
            raise
        finally:
            self.in_flight -= 1
        session = await self._close(ticket, result)
        return FinishedRollout(session, time.monotonic() - started, result.detail)

    async def _attempt(self, ticket: Ticket, endpoint: Endpoint) -> RolloutResult:
        """The task service's result, or what its failure amounts to."""
        service = self._tasks[ticket.instance.task]
        grace_s = getattr(service, "grace_s", GRACE_S)
        deadline = asyncio.timeout(endpoint.timeout_s + grace_s)
        try:
            async with deadline:
                result = await service.rollout(ticket.instance, endpoint)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return RolloutResult(
                    Outcome.ENV_FAILED,
                    reason=f"task service hung: no result {grace_s:.0f} s after its own timeout",
                    failure=FailureReason.TASK_HUNG,
                )
            # Whatever a task service raises hurts only its own rollout.
            logger.warning("rollout %s failed", ticket.session_id, exc_info=True)
            failure = f"{type(error).__name__}: {str(error)[:200]}"
            return self._refused(
                ticket,
                RolloutResult(Outcome.ENV_FAILED, reason=failure, failure=exception_reason(error)),
            )
        problem = problem_with(result)
        if problem is not None:
            return RolloutResult(
                Outcome.ENV_FAILED,
                reason=f"the task service's result cannot be: {problem}",
                failure=FailureReason.TASK_LIED,
            )
        if result.outcome is Outcome.ENV_FAILED:
            return self._refused(ticket, result)
        return result

    def _refused(self, ticket: Ticket, failed: RolloutResult) -> RolloutResult:
        """A rollout whose last request was refused by a limit of its session failed through its
        agent, which used too much, and not through its environment, which could not go on. Another
        refusal explains an environment failure that has no better name.
        """
        code = self._gate.exceeded(ticket.session_id)
        if code is None:
            return self._explained(ticket, failed)
        outcome = Outcome.TIMEOUT if code == "session_expired" else Outcome.AGENT_FAILED
        reason = f"session limit ({code}): {LIMIT_WORDS.get(code, code)}; then {failed.reason}"
        return RolloutResult(
            outcome, {"reward": 0.0}, reason[:400], failed.detail, LIMIT_REASONS.get(code)
        )

    def _explained(self, ticket: Ticket, failed: RolloutResult) -> RolloutResult:
        code = self._gate.refused(ticket.session_id)
        if code is None or failed.failure not in (None, FailureReason.TASK_RAISED):
            return failed
        reason = REFUSAL_REASONS.get(code, FailureReason.PROTOCOL_MISUSE)
        return msgspec.structs.replace(failed, failure=reason)

    async def _close(self, ticket: Ticket, result: RolloutResult) -> Session:
        """Close the session everywhere and return its evidence."""
        calls = await self._gate.close_session(ticket.session_id)
        result = named(last_words(result, calls))
        rewards = dict(result.rewards) if result.outcome.scored else {}
        if result.failure is not None and result.failure in ticket.penalties:
            rewards["reward"] = ticket.penalties[result.failure]
        self._ledger.finish(
            ticket.session_id,
            result.outcome,
            rewards,
            result.reason,
            result.detail,
            result.failure,
        )
        return Session(
            id=ticket.session_id,
            stage=ticket.stage,
            purpose=ticket.purpose,
            task=ticket.instance.task,
            instance=msgspec.to_builtins(ticket.instance),
            group_id=ticket.group_id,
            outcome=result.outcome,
            reason=result.reason,
            rewards=rewards,
            calls=calls,
            failure=result.failure,
        )
