"""What is to be done about rollouts that failed, and how to tell from the record that they did.

Pure. `end_reason` says how a session failed and `FailureRules` what the recipe wants done about it;
who carries that out is not known here. The reasons themselves are in `reasons.py`.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.types import DropReason, Outcome


class Rule(StrEnum):
    """What to do about a rollout that failed."""

    RETRY = "retry"
    """Attempt its place in the group again, in a new session from the same prompt. When the
    retries are used up, the reason's default applies."""
    EXCLUDE = "exclude"
    """Leave it out of baseline and batch; its group is smaller."""
    PAD = "pad"
    """Leave it out of baseline and batch; valid siblings are repeated in its place, and the group
    is dropped when at most half of it is valid (paper section 4.1)."""
    PENALISE = "penalise"
    """It counts, with the reward that its task service gave or the recipe's penalty."""


LIMIT_REASONS: Mapping[str, FailureReason] = {
    "session_call_limit": FailureReason.SESSION_CALLS,
    "session_token_limit": FailureReason.SESSION_TOKENS,
    "context_length_exceeded": FailureReason.SESSION_CONTEXT,
    "session_expired": FailureReason.SESSION_TIME,
}
"""By the gateway's code of a refusal (`types.LIMIT_WORDS`)."""

REFUSAL_REASONS: Mapping[str, FailureReason] = {
    "overloaded": FailureReason.ENGINE_OVERLOADED,
    "engine_timeout": FailureReason.ENGINE_DEADLINE,
    "engine_closed": FailureReason.ENGINE_DIED,
    "generation_failed": FailureReason.ENGINE_DIED,
    "internal_error": FailureReason.ENGINE_DIED,
    "aborted": FailureReason.ENGINE_DIED,
}
"""By the gateway's code of a refusal that no limit explains; any other is PROTOCOL_MISUSE."""


class WorkerDied(Exception):
    """A helper process of a task service died or does not answer: an environment failure."""


def end_reason(outcome: Outcome | None, failure: FailureReason | None) -> FailureReason | None:
    """How a session failed; None for one that did not, or is open.

    Args:
        outcome: how it ended.
        failure: the reason that was kept beside it; ledgers of earlier versions hold none.
    """
    if failure is not None:
        return failure
    return _UNNAMED.get(outcome) if outcome is not None else None


_UNNAMED = {
    Outcome.AGENT_FAILED: FailureReason.AGENT_FAILED,
    Outcome.TIMEOUT: FailureReason.SESSION_TIME,
    Outcome.ENV_FAILED: FailureReason.ENV_FAILED,
    Outcome.CANCELLED: FailureReason.CANCELLED,
}


def reasons_of(
    outcome: Outcome | None, failure: FailureReason | None, dropped: DropReason | None
) -> tuple[FailureReason, ...]:
    """All that can be said of a session: how it failed, and why it does not train.

    A drop that only repeats the outcome adds nothing.
    """
    end = end_reason(outcome, failure)
    found = [] if end is None else [end]
    if dropped is not None and not (
        end is not None and dropped in (DropReason.ENV_FAILED, DropReason.CANCELLED)
    ):
        found.append(FailureReason(dropped.value))
    return tuple(found)


class FailureRules(msgspec.Struct, frozen=True):
    """What a stage does about failed rollouts.

    Attributes:
        rules: by reason; the others have their default.
        retries: how often one rollout's place may be attempted again.
        penalty: reward of penalised rollouts; None keeps what their task service gave.
    """

    rules: Mapping[FailureReason, Rule] = {}
    retries: int = 1
    penalty: float | None = None

    def rule(self, reason: FailureReason) -> Rule:
        """What is to be done about `reason`."""
        return self.rules.get(reason) or default_rule(reason)

    def last_rule(self, reason: FailureReason) -> Rule:
        """The same when it cannot be attempted again."""
        rule = self.rule(reason)
        return default_rule(reason) if rule is Rule.RETRY else rule

    @property
    def penalties(self) -> dict[FailureReason, float]:
        """Rewards that replace those of task services, by reason."""
        if self.penalty is None:
            return {}
        return {
            reason: self.penalty
            for reason in FailureReason
            if reason.may_be_penalised and self.last_rule(reason) is Rule.PENALISE
        }


def default_rule(reason: FailureReason) -> Rule:
    """What happens without a rule: what the agent did counts, anything else is padded for."""
    return Rule.PENALISE if reason.may_be_penalised else Rule.PAD


def check_rule(reason: FailureReason, rule: Rule) -> None:
    """Refuse what no recipe may say.

    Raises:
        ValueError: with the reason and the remedy.
    """
    if not reason.has_rule:
        raise ValueError(
            f"{reason} has no rule: it is about the group or the batch, not about how a rollout "
            "ended; leave it out"
        )
    if rule is Rule.PENALISE and not reason.may_be_penalised:
        raise ValueError(
            f'{reason} = "penalise": the {reason.fault} failed, not the agent, and that is never a '
            'reward (law L6); use "retry", "pad" or "exclude"'
        )
    if rule is Rule.RETRY and reason is FailureReason.TAMPERING:
        raise ValueError(
            'tampering = "retry" would let it try again until nobody notices; use "penalise", '
            '"exclude" or "pad"'
        )
