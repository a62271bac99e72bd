"""What the engine asks of the store behind its decoder: one preallocated slot per sequence.

A cache is the engine's side of the decoder's `Attend` protocol. Before a forward pass the core says
which slots and positions the pass covers (`begin_decode` or `begin_extend`); during the pass the
cache stores what each layer brings and attends over everything the slots hold. Slots of one pass
are always neighbours, so that a pass works on views and copies nothing. What a position holds
(grouped keys and values, or a latent) is the subclass's own business.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from headrace.model.attention import LatentQuery


class SlotCache(ABC):
    """Slots of `length` positions, and one more that takes the writes of padding tokens.

    Args:
        length: most tokens per sequence (L).
        stores: everything held, each [layers, slots, ..., L + 1, width].
    """

    def __init__(self, length: int, stores: Sequence[Tensor]) -> None:
        self.length = length
        self.stride = length + 1
        self._stores = tuple(stores)

    @abstractmethod
    def begin_decode(self, positions: Tensor, longest: int) -> None:
        """The next pass feeds one token to each of slots 0..n-1.

        Args:
            positions: [n, 1] int64, where each slot's token goes.
            longest: largest position + 1.
        """

    @abstractmethod
    def begin_extend(
        self, first: int, positions: Tensor, counts: Sequence[int], *, fresh: bool
    ) -> None:
        """The next pass feeds up to T tokens to each of slots first..first+P-1.

        Args:
            first: first slot.
            positions: [P, T] int64, rising by one along T; padding may run past L.
            counts: real tokens of each row, 1..T; the rest of the row is padding.
            fresh: every row starts at position 0, so nothing held before matters.
        """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.attend`; a cache of grouped keys and values overrides it."""
        raise TypeError(f"{type(self).__name__} holds no grouped keys and values")

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        """See `Attend.attend_latent`; a cache of latents overrides it."""
        raise TypeError(f"{type(self).__name__} holds no latents")

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another's."""
        if length:
            for store in self._stores:
                store[:, target, ..., :length, :] = store[:, source, ..., :length, :]

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots holding length_a and length_b positions."""
        if not length_a or not length_b:
            self.copy(a, b, length_a)
            self.copy(b, a, length_b)
            return
        for store in self._stores:
            held = store[:, a, ..., :length_a, :].clone()
            store[:, a, ..., :length_b, :] = store[:, b, ..., :length_b, :]
            store[:, b, ..., :length_a, :] = held

    def clear(self, slot: int) -> None:
        """Zero a slot. Needed after non-finite values were written: masks cannot hide NaN."""
        for store in self._stores:
            store[:, slot].zero_()
