"""How long a run has worked, all its processes together, whatever ended each of them.

The sum is kept with everything that is logged. What a killed process did after that shows in the
times of its other records, which a resume adds.
"""

import time
from collections.abc import Callable

from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.reading import LedgerReader

_SECONDS, _KEPT_AT = "seconds:run", "seconds:run:at"
_NEWEST = """SELECT MAX(at) FROM (
    SELECT MAX(MAX(dispatched_at, COALESCE(finished_at, 0))) AS at FROM sessions
    UNION ALL SELECT MAX(MAX(cut_at, COALESCE(committed_at, 0))) FROM batches
    UNION ALL SELECT MAX(MAX(started_at, COALESCE(finished_at, 0))) FROM stages
    UNION ALL SELECT MAX(published_at) FROM publications
    UNION ALL SELECT MAX(saved_at) FROM checkpoints
    UNION ALL SELECT MAX(at) FROM evaluations)"""


class WorkedSeconds:
    """The seconds of one run. Make it before anything is written to a ledger that is resumed.

    Args:
        ledger: where they are kept.
        logged_at: when the newest metric was logged, unix seconds; None without any.
        started: when this process began, by `clock`.
        clock: seconds, never going back.
        unix_clock: the time that records carry.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        logged_at: float | None = None,
        started: float,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._started = started
        self._clock, self._unix_clock = clock, unix_clock
        self._before = float(ledger.get_state(_SECONDS, 0.0))
        # Ledgers of earlier versions do not say when they kept it.
        kept_at = ledger.get_state(_KEPT_AT)
        if kept_at is not None:
            newest = max(newest_record(ledger) or 0.0, logged_at or 0.0)
            self._before += max(0.0, newest - kept_at)

    def keep(self) -> float:
        """Seconds of work so far, earlier processes included; kept for the next one."""
        seconds = self._before + self._clock() - self._started
        with self._ledger.transaction():
            self._ledger.put_state(_SECONDS, seconds)
            self._ledger.put_state(_KEPT_AT, self._unix_clock())
        return seconds


def newest_record(ledger: LedgerReader) -> float | None:
    """Unix time of the newest event in a ledger; None when there is none."""
    return ledger.query(_NEWEST)[0][0]
