"""What became of a session and its tokens, in words that every view uses."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headrace.recipe import FailuresTable
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import FailureRules, Rule, end_reason
from headrace.rollout.record.rows import SessionSummary


def version_words(version: int, newest: int) -> str:
    """What is known of a token's weights: "v4", or "v4..v6" where the engine told bounds alone."""
    return f"v{version}" if newest == version else f"v{version}..v{newest}"


def short_fate(session: SessionSummary) -> str:
    """The same in a word or two."""
    if session.step is not None:
        return f"update {session.step}"
    return "pending" if session.drop_reason is None else session.drop_reason.value


def fate_words(session: SessionSummary) -> str:
    """What became of the session's tokens, in words."""
    if session.step is not None:
        return f"trained in update {session.step}, advantage {session.advantage:+.3f}"
    if session.batch is not None:
        return f"cut into batch {session.batch}, not trained yet"
    if session.drop_reason is not None:
        return f"not trained: {session.drop_reason.value}"
    return "pending"


def failure_of(session: SessionSummary) -> FailureReason | None:
    """How the session failed; also of ledgers that keep outcomes only."""
    return end_reason(session.outcome, session.failure)


def rules_of(stage: Mapping[str, Any]) -> FailureRules:
    """The rules of an RL stage as a run keeps them; the defaults where it keeps none."""
    kept = stage.get("failures")
    try:
        return FailureRules() if kept is None else FailuresTable.model_validate(kept).rules
    except ValueError:  # of a later version
        return FailureRules()


def rule_words(reason: FailureReason, rules: FailureRules) -> str:
    """What is done about a reason, in a few words; "" where nothing can be."""
    if not reason.has_rule:
        return ""
    rule = rules.rule(reason)
    if rule is Rule.RETRY:
        return f"retry, {rules.retries} times, then {rules.last_rule(reason)}"
    penalty = rules.penalties.get(reason)
    return rule.value if penalty is None else f"{rule} ({penalty:g})"


FAILED = "failed."
"""Prefix of metrics that count failed rollouts since the row before, by reason."""
_WORDS = 4


def failure_metrics(metrics: Mapping[str, float]) -> dict[str, int]:
    """The counts of failed rollouts in a metrics row, by reason."""
    return {n.removeprefix(FAILED): int(v) for n, v in metrics.items() if n.startswith(FAILED)}


def failure_words(counts: Counter[str]) -> str:
    """The most frequent reasons with their counts."""
    words = [f"{number} {reason}" for reason, number in counts.most_common(_WORDS)]
    rest = sum(counts.values()) - sum(number for _, number in counts.most_common(_WORDS))
    return ", ".join([*words, f"{rest} others"] if rest else words)
