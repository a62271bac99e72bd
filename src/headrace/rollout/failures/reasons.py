"""The names of everything that keeps a rollout from being a clean sample, and whose fault it is.

Names only; what to do about each is `failures.py`, and docs/failures.md has a paragraph on each.
"""

from collections.abc import Mapping
from enum import StrEnum


class Fault(StrEnum):
    """Whose business a reason is."""

    ENVIRONMENT = "environment"
    """Task service, sandbox and their processes. Never a reward (law L6)."""
    ENGINE = "engine"
    """Whoever samples. Never a reward either."""
    LIMIT = "limit"
    """The session used up what it may use."""
    AGENT = "agent"
    """What the model wrote."""
    SELECTION = "selection"
    """Grouping and batching: the rollout may be fine and does not train all the same."""


class FailureReason(StrEnum):
    """Every way in which a rollout can fail to be a clean sample."""

    # environment
    TASK_HUNG = "task_hung"
    """The task service gave no result long after its own timeout."""
    TASK_RAISED = "task_raised"
    """The task service raised an exception that has no name here."""
    TASK_LIED = "task_lied"
    """The task service's result is none: no finite reward, or not of the promised form."""
    TASK_UNAVAILABLE = "task_unavailable"
    """The task service cannot be reached."""
    PROTOCOL_MISUSE = "protocol_misuse"
    """The agent's program sent a request that the gateway refuses whatever the model wrote."""
    SANDBOX_START = "sandbox_start"
    """No sandbox could be made."""
    SANDBOX_DIED = "sandbox_died"
    """The sandbox ended or broke while the rollout ran."""
    WORKER_DIED = "worker_died"
    """A helper process of the task service died or hung."""
    ENV_FAILED = "env_failed"
    """The task service says that its environment failed, and not how."""
    # engine
    ENGINE_DIED = "engine_died"
    """The engine, or the last replica of it, ended or failed during a request."""
    ENGINE_OVERLOADED = "engine_overloaded"
    """The engine's queue stayed full through all retries."""
    ENGINE_DEADLINE = "engine_deadline"
    """A request was not answered within its deadline."""
    # limits of a session
    SESSION_CALLS = "session_calls"
    """It made all the calls it may."""
    SESSION_TOKENS = "session_tokens"
    """It sampled all the tokens it may."""
    SESSION_CONTEXT = "session_context"
    """The conversation no longer fits the context."""
    SESSION_TIME = "session_time"
    """It used up its wall clock."""
    # agent
    TURN_LIMIT = "turn_limit"
    """It did not answer within its turns."""
    NO_ANSWER = "no_answer"
    """Its last message holds no answer in the form that was asked for."""
    TRUNCATED = "truncated"
    """Its last message was cut by max_tokens and earned nothing."""
    MALFORMED_CALL = "malformed_call"
    """It ended with a tool call that cannot be read and earned nothing."""
    TAMPERING = "tampering"
    """It reached for the sandbox or the verifier instead of the task."""
    AGENT_FAILED = "agent_failed"
    """The task service says that the agent failed, and not how."""
    # grouping and batching
    NO_SIGNAL = "no_signal"
    """All valid rollouts of its group have one reward."""
    GROUP_INVALID = "group_invalid"
    """Half of its group or more failed."""
    EXCLUDED = "excluded"
    """A rule of the recipe leaves it out."""
    RETRIED = "retried"
    """A rule of the recipe had it attempted again; another session took its place."""
    STALE = "stale"
    """Its oldest tokens lagged more than tau when the batch was cut."""
    TOO_LONG = "too_long"
    """Longer than the trainer's sequence limit."""
    FORKED = "forked"
    """It has a branch that is not trained."""
    OTHER_MODEL = "other_model"
    """Sampled by a model beside the one that learns."""
    STAGE_ENDED = "stage_ended"
    """The stage was over before it was needed."""
    CANCELLED = "cancelled"
    """Cut off by the system: a crash, or the end of the stage."""
    EVALUATION = "evaluation"
    """Sampled for measurement."""
    HELD_OUT = "held_out"
    """Its problem is measured on and therefore not attempted in training."""

    @property
    def fault(self) -> Fault:
        """Whose business it is."""
        return _FAULTS.get(self, Fault.SELECTION)

    @property
    def has_rule(self) -> bool:
        """Whether a recipe may say what to do about it."""
        return self.fault is not Fault.SELECTION

    @property
    def may_be_penalised(self) -> bool:
        """Whether it may count with a reward: only what the agent itself did (law L6)."""
        return self.fault in (Fault.LIMIT, Fault.AGENT)


_R = FailureReason
_FAULTS: Mapping[FailureReason, Fault] = {
    **dict.fromkeys(
        (
            _R.TASK_HUNG, _R.TASK_RAISED, _R.TASK_LIED, _R.TASK_UNAVAILABLE, _R.PROTOCOL_MISUSE,
            _R.SANDBOX_START, _R.SANDBOX_DIED, _R.WORKER_DIED, _R.ENV_FAILED,
        ),
        Fault.ENVIRONMENT,
    ),
    **dict.fromkeys((_R.ENGINE_DIED, _R.ENGINE_OVERLOADED, _R.ENGINE_DEADLINE), Fault.ENGINE),
    **dict.fromkeys(
        (_R.SESSION_CALLS, _R.SESSION_TOKENS, _R.SESSION_CONTEXT, _R.SESSION_TIME), Fault.LIMIT
    ),
    **dict.fromkeys(
        (
            _R.TURN_LIMIT, _R.NO_ANSWER, _R.TRUNCATED, _R.MALFORMED_CALL, _R.TAMPERING,
            _R.AGENT_FAILED,
        ),
        Fault.AGENT,
    ),
}  # fmt: skip
