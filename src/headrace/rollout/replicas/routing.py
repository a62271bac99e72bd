"""Which replica serves which session: consistent hashing with bounded loads, sticky across turns.

A session's turns share a prefix, so the replica that served the last one holds its keys and values:
a session stays where it is while that replica can serve it and has not much more than its share.
Others go where the hash ring says, or on along the ring past replicas that are full (Mirrokni,
Thorup, Zadimoghaddam, Consistent Hashing with Bounded Loads, arXiv 1608.01350). Pure bookkeeping:
no I/O and no clock.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

from uhashring import HashRing

_POINTS = 160
"""Places on the ring for each unit of weight."""


class NoReplica(Exception):
    """There is no replica that may take the session."""


class _Place:
    """One replica in the table; one that comes back under its name is another place."""

    __slots__ = ("draining", "name", "requests", "sessions", "weight")

    def __init__(self, name: str, weight: int) -> None:
        self.name = name
        self.weight = weight
        self.draining = False
        self.sessions = 0
        self.requests = 0


class RoutingTable:
    """Replicas by name, and where every known session is.

    Args:
        bound: most sessions of a replica, as a multiple of its weighted share; above 1. Smaller is
            more even, larger moves fewer sessions when replicas come and go.
        busy_bound: a session leaves its replica at a turn when this many times more requests are in
            flight there than, weight for weight, at the others,
        busy_margin: and so many more than that: moving costs a prefill of everything.
        max_sessions: sessions remembered; those unused for longest are forgotten first.

    Raises:
        ValueError: a bound that leaves no room.
    """

    def __init__(
        self,
        *,
        bound: float = 1.25,
        busy_bound: float = 2.0,
        busy_margin: int = 8,
        max_sessions: int = 100_000,
    ) -> None:
        if not bound > 1 or not busy_bound > 1 or busy_margin < 1 or max_sessions < 1:
            raise ValueError(
                f"bound {bound} and busy_bound {busy_bound} must exceed 1, busy_margin "
                f"{busy_margin} and max_sessions {max_sessions} must be at least 1"
            )
        self._bound = bound
        self._busy_bound = busy_bound
        self._busy_margin = busy_margin
        self._max_sessions = max_sessions
        self._ring = HashRing()
        self._places: dict[str, _Place] = {}
        self._where: OrderedDict[str, _Place] = OrderedDict()
        self.moved = 0
        """Sessions that went to another replica than the one of their last turn."""

    # -- replicas -------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> list[str]:
        """Replicas in the table, in the order in which they came."""
        return list(self._places)

    def add(self, name: str, weight: int = 1) -> None:
        """Let a replica take sessions. Those that hash to it move there as they begin, not before.

        Args:
            weight: its share, relative to the others'.

        Raises:
            ValueError: the name is taken, or a weight below 1.
        """
        if name in self._places:
            raise ValueError(f"replica {name!r} is in the table already")
        if weight < 1:
            raise ValueError(f"replica {name!r} has weight {weight}; it must be at least 1")
        self._places[name] = _Place(name, weight)
        self._ring.add_node(name, {"weight": weight, "vnodes": _POINTS})

    def remove(self, name: str) -> None:
        """Take a replica out; its sessions go elsewhere at their next turn, the others stay.

        Raises:
            KeyError: no such replica.
        """
        del self._places[name]
        self._ring.remove_node(name)

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Give a replica no new sessions (or again); those it has stay until they end.

        Raises:
            KeyError: no such replica.
        """
        self._places[name].draining = draining

    def sessions(self, name: str) -> int:
        """Sessions that a replica has."""
        return self._places[name].sessions

    def requests(self, name: str) -> int:
        """Requests in flight at a replica."""
        return self._places[name].requests

    def imbalance(self) -> float:
        """Largest load over its fair share, by sessions and weights; 1 is even, or nothing held."""
        total = sum(place.sessions for place in self._places.values())
        weights = sum(place.weight for place in self._places.values())
        if not total:
            return 1.0
        return max(
            place.sessions * weights / (place.weight * total) for place in self._places.values()
        )

    # -- sessions -------------------------------------------------------------------------------

    def assign(self, session: str, *, without: Iterable[str] = ()) -> str:
        """The replica for the session's next turn.

        Args:
            without: replicas that cannot serve it now, e.g. because they just refused.

        Raises:
            NoReplica: none is left.
        """
        excluded = set(without)
        held = self._where.get(session)
        here = held is not None and self._places.get(held.name) is held
        if held is None or not here or held.name in excluded or not self._may_stay(held):
            name = self._choose(session, excluded, held.name if held and here else None)
            chosen = self._places[name]
            if held is not None and chosen is not held:
                self.moved += 1
            if held is not None:
                held.sessions -= 1
            chosen.sessions += 1
            self._where[session] = held = chosen
        self._where.move_to_end(session)
        while len(self._where) > self._max_sessions:
            self.release(next(iter(self._where)))
        return held.name

    def _choose(self, session: str, excluded: set[str], held: str | None) -> str:
        """First replica along the ring with room for one more session; the least loaded if none."""
        able = [
            name
            for name, place in self._places.items()
            if name not in excluded and (not place.draining or name == held)
        ]
        # Rather a draining one than none.
        able = able or [name for name in self._places if name not in excluded]
        if not able:
            raise NoReplica(f"none of {len(self._places)} replicas can take session {session!r}")
        for node in self._ring.range(session):
            name = node["nodename"]
            if name not in able or self._too_busy(name):
                continue
            if self._places[name].sessions < self._room(name, able, 1):
                return name
        return min(able, key=lambda name: self._places[name].requests / self._places[name].weight)

    def _room(self, name: str, among: Iterable[str], coming: int) -> int:
        """Most sessions of a replica, of all that some replicas have and will get."""
        places = [self._places[other] for other in among]
        total = coming + sum(place.sessions for place in places)
        weights = sum(place.weight for place in places)
        return math.ceil(self._bound * total * self._places[name].weight / weights)

    def _may_stay(self, place: _Place) -> bool:
        """Is the replica within its bounds? After another one joined it may have too many."""
        if self._too_busy(place.name):
            return False
        if place.draining:
            return True
        staying = [other.name for other in self._places.values() if not other.draining]
        return place.sessions <= self._room(place.name, staying, 0)

    def _too_busy(self, name: str) -> bool:
        place = self._places[name]
        weights = sum(other.weight for other in self._places.values()) - place.weight
        if not weights:
            return False
        elsewhere = sum(other.requests for other in self._places.values()) - place.requests
        share = elsewhere * place.weight / weights
        return place.requests > self._busy_bound * share + self._busy_margin

    def release(self, session: str) -> None:
        """The session has ended. Unknown ones are ignored."""
        place = self._where.pop(session, None)
        if place is not None:
            place.sessions -= 1

    def begin(self, name: str) -> None:
        """A request goes to the replica."""
        self._places[name].requests += 1

    def end(self, name: str) -> None:
        """It came back, or was given up. A replica that is gone is ignored."""
        if name in self._places:
            self._places[name].requests -= 1
