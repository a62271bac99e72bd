"""Which tokens each cache slot holds, and how a new prompt gets the longest prefix already held.

Pure bookkeeping beside `SlotCache`: it moves and copies keys and values along with the tokens they
belong to, and knows nothing of requests or models.
"""

import numpy as np
import numpy.typing as npt

from headrace.engine.cache import SlotCache

_MIN_SHARED = 8
"""A shared prefix shorter than this is cheaper to compute than to copy."""

Tokens = npt.NDArray[np.int32]


class SlotTable:
    """The tokens of every slot.

    Attributes:
        tokens: [slots, max_context + 1] int32; padding reads the last column.
        known: [slots], tokens of the slot's sequence.
        held: [slots], how many of them have their keys and values in the cache.

    Args:
        cache: moved along.
        slots: number of slots.
    """

    def __init__(self, cache: SlotCache, slots: int) -> None:
        self._cache = cache
        self.tokens = np.zeros((slots, cache.length + 1), dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int64)
        self.held = np.zeros(slots, dtype=np.int64)
        self._last_used = np.zeros(slots, dtype=np.int64)
        self._tick = 0

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        if a == b:
            return
        self._cache.swap(a, b, int(self.held[a]), int(self.held[b]))
        for array in (self.tokens, self.known, self.held, self._last_used):
            array[[a, b]] = array[[b, a]]

    def touch(self, slot: int) -> None:
        """The slot's sequence was in use until now; it gives way last."""
        self._tick += 1
        self._last_used[slot] = self._tick

    def shared(self, prompt: Tokens) -> npt.NDArray[np.int64]:
        """Leading tokens of the prompt whose keys and values each slot holds: [slots].

        The last prompt token is never counted: its logits must be computed.
        """
        limit = len(prompt) - 1
        equal = np.zeros((len(self.held), limit + 1), dtype=bool)
        equal[:, :limit] = self.tokens[:, :limit] == prompt[:limit]
        return np.minimum(equal.argmin(1), self.held)

    def place(self, prompt: Tokens, target: int) -> int:
        """Make slot `target` hold the prompt, with the longest prefix held anywhere.

        Slots from `target` on are idle. A sequence the prompt extends is taken over; of any other
        the shared part is copied, so that the sequence itself stays.

        Returns:
            How many tokens need not be computed.
        """
        shared = self.shared(prompt)
        source = int(shared.argmax())
        reused = int(shared[source])
        if reused < _MIN_SHARED:
            reused = 0
        if reused and source >= target and reused == self.held[source]:
            self.swap(source, target)
        else:
            victim = self._idlest(target, keep=source if reused else -1)
            if victim == source:
                self.swap(source, target)
            else:
                self.held[victim] = 0
                self.swap(victim, target)
                self._cache.copy(victim if source == target else source, target, reused)
        self.tokens[target, : len(prompt)] = prompt
        self.known[target] = len(prompt)
        self.held[target] = reused
        return reused

    def _idlest(self, first: int, *, keep: int) -> int:
        """An empty slot from `first` on, else the one left alone longest; `keep` only if alone."""

        def rank(slot: int) -> tuple[bool, int]:
            return slot == keep, int(self._last_used[slot]) if self.held[slot] else -1

        return min(range(first, len(self.held)), key=rank)

    def clear(self, slot: int) -> None:
        """Wipe a slot that may hold non-finite keys and values."""
        self._cache.clear(slot)
        self.held[slot] = 0

    def drop_held(self, active: int) -> list[int]:
        """Forget every key and value (law L8) and sort the first `active` slots by known tokens.

        Neighbours of like length waste least padding, and with nothing held moving is free.

        Returns:
            For each of the first `active` slots, which slot its sequence was in before.
        """
        self.held[:] = 0
        order = np.argsort(self.known[:active], kind="stable")
        self.tokens[:active] = self.tokens[order]
        self.known[:active] = self.known[order]
        return order.tolist()


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
