"""Which failed rollouts are attempted again, and how often.

Bookkeeping for one stage, no I/O: it says whether a place in a group gets another session; who
dispatches that session and records it is not known here.
"""

from headrace.rollout.failures.rules import FailureRules, Rule, end_reason
from headrace.rollout.types import Session


class Retries:
    """Attempts of the rollouts of open groups.

    Args:
        rules: of the stage.
    """

    def __init__(self, rules: FailureRules) -> None:
        self._rules = rules
        self._before: dict[str, int] = {}

    def again(self, session: Session) -> bool:
        """Whether a finished session's place is to be attempted again; counts nothing yet."""
        reason = end_reason(session.outcome, session.failure)
        if reason is None or not reason.has_rule or self._rules.rule(reason) is not Rule.RETRY:
            return False
        return self._before.get(session.id, 0) < self._rules.retries

    def follow(self, failed: str, successor: str) -> None:
        """`successor` attempts the place of `failed`."""
        self._before[successor] = self._before.pop(failed, 0) + 1

    def resume(self, session_id: str, attempts: int) -> None:
        """A session whose place was attempted `attempts` times before this process began."""
        if attempts:
            self._before[session_id] = attempts

    def forget(self, session_id: str) -> None:
        """The session's group is decided."""
        self._before.pop(session_id, None)
