"""Collects, during a forward pass, the terms of the objectives that live inside layers.

Every term is a sum over tokens; the caller divides by the whole batch's count (law L14).
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from headrace.model.attention import IndexQuery
from headrace.objectives.balance import balance_loss
from headrace.objectives.indexer import dense_index_loss, sparse_index_loss
from headrace.ops import Layout, indexer_scores

IndexMode = Literal["dense", "sparse"]


class ObjectiveTrace:
    """A `Trace` for one packed micro-batch.

    Attributes:
        loads: tokens sent to each expert, [E] per router, summed over its uses.
        balance: terms of the balance loss, one per use of a router.
        index: terms of the indexer's loss, one per layer with an indexer.

    Args:
        layout: the documents.
        balance: collect balance terms.
        index: collect indexer terms: "dense" over all visible keys (warm-up), "sparse" over the
            selected ones (adaptation; dense where the forward was, because nothing was cut).
    """

    def __init__(
        self, layout: Layout, *, balance: bool = False, index: IndexMode | None = None
    ) -> None:
        self._layout = layout
        self._wants_balance = balance
        self._index = index
        self.loads: dict[nn.Module, Tensor] = {}
        self.balance: list[Tensor] = []
        self.index: list[Tensor] = []

    @property
    def wants_mass(self) -> bool:
        """See `Trace.wants_mass`."""
        return self._index == "sparse"

    def router(self, router: nn.Module, scores: Tensor, experts: Tensor) -> None:
        """See `Trace.router`."""
        load = torch.bincount(experts.flatten(), minlength=scores.shape[1])
        self.loads[router] = self.loads[router] + load if router in self.loads else load
        if self._wants_balance:
            self.balance.append(balance_loss(scores, experts.shape[1], self._layout))

    def selected(self, layer: int, indices: Tensor) -> None:
        """See `Trace.selected`."""

    def dense(
        self, layer: int, index: IndexQuery, q: Tensor, k: Tensor, layout: Layout, scale: float
    ) -> None:
        """See `Trace.dense`."""
        if self._index is not None:
            self.index.append(
                dense_index_loss(index.q, index.weights, index.k, q, k, layout, scale=scale)
            )

    def sparse(self, layer: int, index: IndexQuery, indices: Tensor, mass: Tensor) -> None:
        """See `Trace.sparse`."""
        if self._index is not None:
            scores = indexer_scores(index.q, index.weights, index.k, indices)
            self.index.append(sparse_index_loss(scores, mass, indices))


def total(terms: Iterable[Tensor]) -> Tensor:
    """Sum of scalar terms; 0 when there are none."""
    found = list(terms)
    return torch.stack(found).sum() if found else torch.zeros(())
