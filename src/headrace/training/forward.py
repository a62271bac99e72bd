"""One micro-batch through the model: everything a loss may need, from one forward pass.

A single module whose parameters are the model's, so that data-parallel sharding sees one forward
with all losses as its outputs, whichever of the model's methods take part.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.model.attention import IndexQuery
from headrace.model.causal import CausalAttend
from headrace.model.decoder import Decoder
from headrace.objectives.balance import balance_loss
from headrace.objectives.indexer import dense_index_loss, sparse_index_loss
from headrace.objectives.mtp import mtp_targets
from headrace.ops import Layout, indexer_scores, linear_cross_entropy, row_independent
from headrace.training.batch_invariant import BatchInvariant
from headrace.training.rows import Rows


class LossConfig(NamedTuple):
    """Which losses a step minimises, and with which weights.

    Attributes:
        mtp_weight: of multi-token prediction; 0 leaves its layers alone.
        balance_weight: of the sequence-wise expert balance loss.
        index: what teaches the indexer: None nothing; "dense" all visible keys, attention does not
            select (warm-up); "sparse" the selected keys, attention selects (adaptation).
        index_weight: of that loss.
        language: whether next-token (or RL) loss is part of it; False for the indexer's warm-up.
    """

    mtp_weight: float = 0.0
    balance_weight: float = 0.0
    index: Literal["dense", "sparse"] | None = None
    index_weight: float = 1.0
    language: bool = True


class Losses(NamedTuple):
    """A whole batch's losses, the same numbers on every rank.

    Attributes:
        total: what was minimised, weights included.
        language, mtp, balance, index: its parts before their weights; 0 where not asked for. The
            balance loss is 1 when experts are used evenly; the index loss is a KL in nats.
    """

    total: float
    language: float
    mtp: float
    balance: float
    index: float

    def metrics(self, losses: LossConfig) -> dict[str, float]:
        """`loss`, and each part that was asked for besides a plain language loss."""
        asked = {
            "language_loss": losses.language,
            "mtp_loss": losses.mtp_weight > 0,
            "balance_loss": losses.balance_weight > 0,
            "index_loss": losses.index is not None,
        }
        parts = (self.language, self.mtp, self.balance, self.index)
        found = {
            name: part for (name, wanted), part in zip(asked.items(), parts, strict=True) if wanted
        }
        return {"loss": self.total, **(found if len(found) > 1 else {})}


class PassOutput(NamedTuple):
    """What came out of one micro-batch of M trained tokens.

    Attributes:
        logprobs: float32 [M] with gradient, entropies: [M] without; empty without a language loss.
        mtp_logprobs, mtp_weights: one [M_j] per prediction step.
        balance, index: sums over tokens, one scalar per reporting layer.
    """

    logprobs: Tensor
    entropies: Tensor
    mtp_logprobs: list[Tensor]
    mtp_weights: list[Tensor]
    balance: list[Tensor]
    index: list[Tensor]


class Pass(nn.Module):
    """The model and its losses' inputs as one forward.

    Args:
        model: what is trained.
        losses: what to compute.
        bfloat16: matrix products in bfloat16 (autocast).
        invariant: packed copies of the model's weights, kept up to date by the caller, to compute
            what a deterministic engine computes.
    """

    def __init__(
        self,
        model: Decoder,
        losses: LossConfig,
        *,
        bfloat16: bool,
        invariant: BatchInvariant | None = None,
    ) -> None:
        super().__init__()
        _check(model, losses)
        self.model = model
        self.losses = losses
        self._half = bfloat16
        self._invariant = invariant
        self.loads: dict[nn.Module, Tensor] = {}

    @property
    def mtp_depth(self) -> int:
        """Prediction steps that are trained."""
        config = self.model.config.mtp
        return config.depth if config is not None and self.losses.mtp_weight > 0 else 0

    def forward(self, rows: Rows, temperature: float = 1.0) -> PassOutput:
        """See `PassOutput`; logits are divided by `temperature` before the softmax."""
        trace = _LossTrace(self.losses, rows.layout, self.loads if rows.counts else {})
        mode = "dense" if self.losses.index == "dense" else "auto"
        invariant = self._invariant is not None
        heads = None if self._invariant is None else self._invariant.heads
        attend = CausalAttend(rows.layout, mode, trace, invariant=invariant, heads=heads)
        with (
            autocast(rows.ids.device, self._half),
            row_independent() if invariant else nullcontext(),
        ):
            hidden = self.model(rows.ids, rows.positions, attend, trace)
            logprobs = entropies = torch.zeros(0, device=rows.ids.device)
            if self.losses.language:
                logprobs, entropies = self._score(hidden, rows.where, rows.targets, temperature)
            mtp_logprobs, mtp_weights = self._predict_ahead(rows, hidden, attend, trace)
        return PassOutput(
            logprobs, entropies, mtp_logprobs, mtp_weights, trace.balance, trace.index
        )

    def _predict_ahead(
        self, rows: Rows, hidden: Tensor, attend: CausalAttend, trace: "_LossTrace"
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Multi-token prediction: (logprobs, weights) of every step that is trained."""
        logprobs, weights = [], []
        # The first step has an indexer of its own to teach, whether or not its loss counts.
        steps = self.mtp_depth
        if steps == 0 and self.losses.index is not None and self.model.config.mtp is not None:
            steps = 1
        for step in range(steps):
            target = mtp_targets(rows.ids[0], rows.token_weights, rows.lengths, step)
            hidden = self.model.mtp_forward(
                step, hidden, target.next_ids[None], rows.positions, attend, trace
            )
            if self.mtp_depth:
                logprobs.append(self._score(hidden, target.where, target.targets)[0])
                weights.append(target.weights)
        return logprobs, weights

    def _score(
        self, hidden: Tensor, where: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(logprobs [M] with gradient, entropies [M]) of the tokens predicted at rows `where`."""
        selected = hidden.flatten(0, 1).index_select(0, where)
        if selected.shape[0] == 0:
            # Still part of the graph: every rank's backward has to visit the same parameters.
            empty = self.model.logits(selected).float().sum(-1)
            return empty, empty.detach()
        if self._invariant is not None:
            logprobs, entropies = self._invariant.score(selected, targets, temperature)
        else:
            logprobs, entropies = linear_cross_entropy(
                selected, self.model.output_weight, targets, temperature=temperature
            )
        # An own tensor: sharding hooks on a module's outputs, and views of others lose them.
        return logprobs.clone(), entropies


class _LossTrace:
    """Turns what layers report into loss terms; see `headrace.model.trace.Trace`."""

    def __init__(self, losses: LossConfig, layout: Layout, loads: dict[nn.Module, Tensor]) -> None:
        self.wants_mass = losses.index is not None
        self.balance: list[Tensor] = []
        self.index: list[Tensor] = []
        self._losses = losses
        self._layout = layout
        self._loads = loads

    def router(self, router: nn.Module, scores: Tensor, experts: Tensor) -> None:
        """Count the load; balance loss if asked for."""
        load = torch.bincount(experts.flatten(), minlength=scores.shape[1])
        self._loads[router] = self._loads.get(router, 0) + load
        if self._losses.balance_weight > 0:
            with torch.autocast(scores.device.type, enabled=False):
                self.balance.append(balance_loss(scores, experts.shape[1], self._layout))

    def selected(self, layer: int, indices: Tensor) -> None:
        """Not needed."""

    def dense(
        self, layer: int, index: IndexQuery, q: Tensor, k: Tensor, layout: Layout, scale: float
    ) -> None:
        """Indexer loss over all visible keys; with few keys that is also the selected set."""
        if self.wants_mass:
            self.index.append(
                dense_index_loss(index.q, index.weights, index.k, q, k, layout, scale=scale)
            )

    def sparse(self, layer: int, index: IndexQuery, indices: Tensor, mass: Tensor) -> None:
        """Indexer loss over the selected keys."""
        scores = indexer_scores(index.q, index.weights, index.k, indices)
        self.index.append(sparse_index_loss(scores, mass, indices))


def autocast(device: torch.device, bfloat16: bool) -> torch.autocast | nullcontext[None]:
    """bfloat16 matrix products, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if bfloat16 else nullcontext()


def freeze(model: Decoder, trainable: Literal["all", "indexer", "all_but_indexer"]) -> None:
    """Leave gradients on for the named set of parameters only.

    Raises:
        UserError: "indexer" of a model that has none, or an unknown set.
    """
    keep = _TRAINABLE.get(trainable)
    if keep is None:
        raise UserError(f"trainable = {trainable!r} is unknown; use one of {', '.join(_TRAINABLE)}")
    trained = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(keep("indexer" in name.split(".")))
        trained += parameter.requires_grad
    if trained == 0:
        raise UserError(
            f"trainable = {trainable!r}: the model has no such parameters; add an indexer first"
        )


_TRAINABLE: dict[str, Callable[[bool], bool]] = {
    "all": lambda indexer: True,
    "indexer": lambda indexer: indexer,
    "all_but_indexer": lambda indexer: not indexer,
}


def _check(model: Decoder, losses: LossConfig) -> None:
    config = model.config
    for name, wanted, part in (
        ("mtp_weight", losses.mtp_weight > 0, config.mtp),
        ("balance_weight", losses.balance_weight > 0, config.moe),
        ("index", losses.index is not None, config.indexer),
    ):
        if wanted and part is None:
            raise UserError(
                f"loss {name} = {getattr(losses, name)!r}, but the model has no such part; "
                "leave it out or use another model"
            )
    if not losses.language and losses.index is None and losses.mtp_weight <= 0:
        raise UserError("loss language = False and no other loss; nothing would be trained")
