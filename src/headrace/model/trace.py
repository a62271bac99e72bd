"""What layers report during a forward pass to whoever wants to know.

The model computes nothing for a trace by itself: a trace gets tensors that exist anyway, and says
beforehand if it wants the one thing that costs extra (attention mass).
"""

from typing import Protocol

from torch import Tensor, nn

from headrace.model.attention import IndexQuery
from headrace.ops import Layout


class Trace(Protocol):
    """Observer of one forward pass. All rows are flat: S = B * T."""

    @property
    def wants_mass(self) -> bool:
        """Whether `sparse` shall be given attention mass."""
        ...

    def router(self, router: nn.Module, scores: Tensor, experts: Tensor) -> None:
        """One mixture of experts routed its tokens.

        Args:
            router: the `Router`, which may report several times per forward (MTP steps share one).
            scores: [S, E] affinities with gradient.
            experts: int64 [S, K], those chosen.
        """
        ...

    def selected(self, layer: int, indices: Tensor) -> None:
        """A layer selected keys: int32 [S, K], ascending, -1 for none."""
        ...

    def dense(
        self, layer: int, index: IndexQuery, q: Tensor, k: Tensor, layout: Layout, scale: float
    ) -> None:
        """A layer with an indexer attended to all visible keys.

        Args:
            index: flat: q [S, HI, di], k [S, di], weights [S, HI].
            q: [S, H, d]; k: [S, H, d], expanded queries and keys.
        """
        ...

    def sparse(self, layer: int, index: IndexQuery, indices: Tensor, mass: Tensor) -> None:
        """A layer with an indexer attended to the keys it selected.

        Args:
            index: flat, as above.
            indices: int32 [S, K]; mass: [S, K], probabilities summed over heads.
        """
        ...


class SelectionTrace:
    """Keeps every layer's selection; for tests and for looking at a model."""

    wants_mass = False

    def __init__(self) -> None:
        self.selections: dict[int, Tensor] = {}

    def router(self, router: nn.Module, scores: Tensor, experts: Tensor) -> None:
        """Not kept."""

    def selected(self, layer: int, indices: Tensor) -> None:
        """Keep it."""
        self.selections[layer] = indices

    def dense(
        self, layer: int, index: IndexQuery, q: Tensor, k: Tensor, layout: Layout, scale: float
    ) -> None:
        """Not kept."""

    def sparse(self, layer: int, index: IndexQuery, indices: Tensor, mass: Tensor) -> None:
        """Not kept."""
