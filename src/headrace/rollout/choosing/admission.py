"""Whether a group that began now would be too old to train when its turn came.

Groups leave at the rate at which the trainer takes them, so one that begins behind n others waits
for as many publications as those fill (Little's law), however long a rollout takes. Pure
bookkeeping of counts: what is in flight, who dispatches and what stale means is not known here.
"""

from collections import deque

_WINDOW = 8
"""Publications over which the trainer's rate is measured."""
_LEAST = 2
"""Publications before which it is not known, and nothing is held back."""
_LEAST_MARGIN = 0.5
_TIGHTEN = 0.8
_RELIEF = 1.25
_LOOSEN = 0.01


class Admission:
    """Bounds how many groups may be on their way, in flight or waiting, in one stage.

    The bound is what the trainer takes, in groups per publication, times the publications that a
    group may grow old. Groups differ: some are older than the mean when their turn comes. So while
    trajectories go stale beside a trainer that never waits, a margin shrinks the bound; it grows
    back when the trainer waits, and slowly while nothing is stale. Before anything has gone stale,
    nothing is held back.

    Args:
        staleness: tau, in publications; None sets no bound.
        groups_per_batch: of one update; as many may always be on their way.
    """

    def __init__(self, staleness: int | None, groups_per_batch: int) -> None:
        self._staleness = staleness
        self._least = groups_per_batch
        self._per_publication: deque[int] = deque(maxlen=_WINDOW)
        self._left = 0
        self._margin = 1.0
        self._stale = self._waited = self._was_stale = False

    def left(self, groups: int) -> None:
        """So many groups are on their way no more: trained, or dropped for any reason."""
        self._left += groups

    def stale(self) -> None:
        """A trajectory was dropped because it was too old."""
        self._stale = self._was_stale = True

    def waited(self) -> None:
        """The trainer had to wait for a batch."""
        self._waited = True

    def published(self) -> None:
        """Everything on its way is one version older."""
        # Publications without a group are those of replayed batches: they say nothing.
        if self._left:
            self._per_publication.append(self._left)
        if self._waited:
            self._margin = min(1.0, self._margin * _RELIEF)
        elif self._stale:
            self._margin = max(_LEAST_MARGIN, self._margin * _TIGHTEN)
        else:
            self._margin = min(1.0, self._margin + _LOOSEN)
        self._left, self._stale, self._waited = 0, False, False

    @property
    def bound(self) -> float | None:
        """Groups that may be on their way; None while there is no reason for a bound."""
        measured = self._per_publication
        if self._staleness is None or not self._was_stale or len(measured) < _LEAST:
            return None
        rate = sum(measured) / len(measured)
        return max(float(self._least), (self._margin * self._staleness + 1.0) * rate)

    def full(self, on_the_way: int) -> bool:
        """Whether another group would be one too many.

        Args:
            on_the_way: groups in flight or waiting for the trainer.
        """
        bound = self.bound
        return bound is not None and on_the_way >= bound
