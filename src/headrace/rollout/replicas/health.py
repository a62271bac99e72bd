"""When a replica counts as dead: a pure judgement over heartbeats, progress and errors.

A heartbeat is an answer of the engine about itself. It can fail to come (process gone or stopped),
say that requests run while no token was sampled for long (stuck), or look fine while one request
after the other fails. The clock is the caller's.
"""

from collections import deque
from enum import StrEnum

import msgspec


class Fault(StrEnum):
    """Why a replica is taken out of service."""

    START = "start_failed"
    """It did not come up."""
    BEATS = "missed_heartbeats"
    """It did not answer in time, several times in a row."""
    STUCK = "stuck"
    """Requests run, and no token was computed for too long."""
    ERRORS = "error_burst"
    """Too many of its requests failed within a short time."""
    DIED = "died"
    """Its process ended."""
    VERSION = "wrong_version"
    """It has other weights than it was told to load."""


class HealthPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait for what; seconds.

    Attributes:
        beat_interval_s: between two heartbeats.
        beat_timeout_s: longest wait for one.
        missed_beats: so many in a row, and the replica counts as dead.
        stuck_s: longest time without progress while something runs.
        errors: failed requests within `errors_window_s` that count as a burst.
        errors_window_s: see above.
        start_timeout_s: longest wait for a replica to come up.
        backoff_s: before the first restart; doubles with each failure after another, up to
            `backoff_most_s`, and begins anew once it stayed up for `backoff_most_s`.
        backoff_most_s: see above.

    Raises:
        ValueError: a value that is not positive.
    """

    beat_interval_s: float = 1.0
    beat_timeout_s: float = 3.0
    missed_beats: int = 3
    stuck_s: float = 60.0
    errors: int = 8
    errors_window_s: float = 30.0
    start_timeout_s: float = 180.0
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"HealthPolicy: {name} is {getattr(self, name)}; must be positive")


class Health:
    """One replica's record since it was started.

    Args:
        policy: see there.
        now: seconds on the caller's clock.
    """

    def __init__(self, policy: HealthPolicy, now: float) -> None:
        self._policy = policy
        self._missed = 0
        self._computed = -1
        self._moved_at = now
        self._errors: deque[float] = deque(maxlen=policy.errors)

    def beat(self, now: float, *, computed: int, running: int) -> Fault | None:
        """An answer came.

        Args:
            computed: tokens computed so far, of prompts and outputs.
            running: requests that are being computed.
        """
        self._missed = 0
        if computed != self._computed or not running:
            self._computed, self._moved_at = computed, now
        return Fault.STUCK if now - self._moved_at > self._policy.stuck_s else None

    def missed(self) -> Fault | None:
        """An answer did not come in time."""
        self._missed += 1
        return Fault.BEATS if self._missed >= self._policy.missed_beats else None

    def failed(self, now: float) -> Fault | None:
        """A request failed through the replica's fault."""
        self._errors.append(now)
        full = len(self._errors) == self._policy.errors
        return (
            Fault.ERRORS if full and now - self._errors[0] <= self._policy.errors_window_s else None
        )


def backoff(policy: HealthPolicy, failures: int) -> float:
    """Seconds to wait before a restart after so many failures in a row, at least 1."""
    return min(policy.backoff_most_s, policy.backoff_s * 2.0 ** min(failures - 1, 30))
