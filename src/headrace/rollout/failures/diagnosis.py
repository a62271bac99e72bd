"""How a rollout failed, read from an exception, from its calls and from what its service says.

Pure: results in, results with a `FailureReason` out. What is done about it is not known here.
"""

import sys
from collections.abc import Sequence

import msgspec

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import WorkerDied, end_reason
from headrace.rollout.types import Call, FinishReason, Outcome, ParseState
from headrace.sandbox.types import SandboxError, SandboxStartError
from headrace.tasks.types import EndpointError, RolloutResult, TaskUnavailable

_CLIENTS = ("openai", "anthropic")
"""Packages that other people's agents call with; their errors have the same names."""


def exception_reason(error: Exception) -> FailureReason:
    """What an exception of a task service amounts to."""
    if isinstance(error, SandboxStartError):
        return FailureReason.SANDBOX_START
    if isinstance(error, SandboxError):
        return FailureReason.SANDBOX_DIED
    if isinstance(error, WorkerDied):
        return FailureReason.WORKER_DIED
    if isinstance(error, ConnectionError | TaskUnavailable):
        return FailureReason.TASK_UNAVAILABLE
    for client in _CLIENTS:
        # Whoever raised one of its errors has imported it; nobody else needs it.
        package = sys.modules.get(client)
        if isinstance(error, getattr(package, "APITimeoutError", ())):
            return FailureReason.ENGINE_DEADLINE
        if isinstance(error, getattr(package, "APIStatusError", ())):
            return _status_reason(getattr(error, "status_code", 500))
    if isinstance(error, EndpointError):
        if error.timed_out:
            return FailureReason.ENGINE_DEADLINE
        return FailureReason.TASK_RAISED if error.status is None else _status_reason(error.status)
    return FailureReason.TASK_RAISED


def _status_reason(status: int) -> FailureReason:
    """What a refusal amounts to that the agent's client gave up on."""
    if status in (408, 504):
        return FailureReason.ENGINE_DEADLINE
    if status == 429:
        return FailureReason.ENGINE_OVERLOADED
    return FailureReason.ENGINE_DIED if status >= 500 else FailureReason.PROTOCOL_MISUSE


def last_words(result: RolloutResult, calls: Sequence[Call]) -> RolloutResult:
    """A result that earned nothing and has no reason, explained by the agent's last message.

    A message that the engine broke off at a deadline is an environment failure: the agent was not
    done.

    Args:
        result: of the task service.
        calls: of the session, in index order.
    """
    own = [call for call in calls if call.model is None]
    if result.outcome is not Outcome.OK or not own or result.rewards.get("reward", 0.0) > 0.0:
        return result
    last = own[-1]
    if last.finish_reason is FinishReason.DEADLINE:
        return msgspec.structs.replace(
            result,
            outcome=Outcome.ENV_FAILED,
            rewards={},
            reason="the engine broke off the last message at its deadline",
            failure=FailureReason.ENGINE_DEADLINE,
        )
    if result.failure not in (None, FailureReason.NO_ANSWER):
        return result
    if last.parse_state is ParseState.TRUNCATED:
        return msgspec.structs.replace(result, failure=FailureReason.TRUNCATED)
    if last.parse_state is ParseState.MALFORMED:
        return msgspec.structs.replace(result, failure=FailureReason.MALFORMED_CALL)
    return result


def named(result: RolloutResult) -> RolloutResult:
    """The result with a reason that fits its outcome, if it is not a plain OK.

    Tampering earns nothing, whatever the service gave. A reason of another kind than the outcome
    is taken for none: what the environment did has no reward, and what the agent did has one.
    """
    failure = result.failure
    if failure is FailureReason.TAMPERING and result.outcome.scored:
        rewards = {**result.rewards, "reward": 0.0}
        return msgspec.structs.replace(result, outcome=Outcome.AGENT_FAILED, rewards=rewards)
    fits = failure is not None and failure.has_rule
    if fits and failure is not None:
        fits = failure.may_be_penalised is result.outcome.scored
    return msgspec.structs.replace(
        result, failure=end_reason(result.outcome, failure if fits else None)
    )
