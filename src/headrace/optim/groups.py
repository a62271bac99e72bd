"""Assigns every parameter of a decoder to an optimizer and a group, and steps them as one.

Matrices inside layers go to Muon when asked; embeddings, output projection, norms, biases, router
and the indexer's head weights always go to AdamW. State is a flat table keyed by parameter name,
so that a checkpoint does not depend on how parameters were grouped or sharded.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.errors import UserError
from headrace.optim.blocks import MatrixParameter, matrix_blocks
from headrace.optim.muon import Muon
from headrace.optim.newton_schulz import Precision
from headrace.optim.updates import SCRATCH_ELEMENTS

Algorithm = Literal["adamw", "muon", "muon_split"]
Role = Literal["matrix", "embedding", "norm", "router", "indexer", "indexer_norm"]

_UNDECAYED = ("embedding", "norm", "indexer_norm")


class OptimizerGroups(NamedTuple):
    """Which algorithm trains the matrices, and every group's constants.

    Attributes:
        algorithm: "muon_split" cuts latent up-projections by head, "muon" does not, "adamw" trains
            everything with AdamW.
        learning_rate: of matrices; the other groups have multiples of it. Muon's updates have the
            root mean square of a typical AdamW step, so one rate serves both.
        weight_decay: decoupled; not on embeddings, output projection, norms and biases.
        beta1, beta2, eps: of AdamW.
        momentum: of Muon.
        embedding: learning-rate multiple of embeddings and output projection.
        norm: of norms and biases.
        router: of expert routers.
        indexer: of everything in the sparse-attention indexer.
        precision: of Muon's iteration; see `newton_schulz.resolve_precision`.
        split_qkv_heads: also cut grouped-query projections by head under "muon_split".
        scratch_elements: bounds Muon's memory; see `updates.SCRATCH_ELEMENTS`.
    """

    learning_rate: float
    algorithm: Algorithm = "muon_split"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    embedding: float = 1.0
    norm: float = 1.0
    router: float = 1.0
    indexer: float = 1.0
    precision: Precision = "auto"
    split_qkv_heads: bool = False
    scratch_elements: int = SCRATCH_ELEMENTS


class GroupSummary(NamedTuple):
    """One line of the table that a trainer may print."""

    optimizer: str
    role: Role
    tensors: int
    parameters: int
    multiple: float
    weight_decay: float


def build_optimizers(model: nn.Module, config: OptimizerGroups) -> "Optimizers":
    """Optimizers over all parameters of a `Decoder`, frozen ones too.

    Call it after the model is sharded: sharding replaces the parameters.

    Raises:
        UserError: an unknown algorithm, or a matrix sharded in a way Muon cannot follow.
    """
    if config.algorithm not in get_args(Algorithm):
        raise UserError(
            f"optimizer algorithm = {config.algorithm!r} is unknown; "
            f"use one of {', '.join(get_args(Algorithm))}"
        )
    names = dict(model.named_parameters())
    by_role: defaultdict[Role, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in names.items():
        by_role[role_of(name, parameter)].append(parameter)
    splits = dict(_muon_blocks(model, config))
    matrices: list[tuple[list[MatrixParameter], dict[str, Any]]] = []
    rest: list[dict[str, Any]] = []
    for role, parameters in by_role.items():
        options = _options(role, config)
        blocks = [MatrixParameter(p, splits[p]) for p in parameters if p in splits]
        if blocks:
            matrices.append((blocks, options))
        # A sharded and a whole tensor cannot share one fused call.
        for sharded in (False, True):
            others = [
                p for p in parameters if p not in splits and isinstance(p, DTensor) == sharded
            ]
            if others:
                rest.append({"params": others, **options})
    members: list[torch.optim.Optimizer] = [_build_muon(matrices, config)] if matrices else []
    if rest:
        betas = (config.beta1, config.beta2)
        adamw = torch.optim.AdamW(rest, config.learning_rate, betas, config.eps, fused=True)
        members.append(adamw)
    return Optimizers(members, names)


def _build_muon(
    matrices: list[tuple[list[MatrixParameter], dict[str, Any]]], config: OptimizerGroups
) -> Muon:
    (blocks, options), *others = matrices
    muon = Muon(
        blocks,
        config.learning_rate,
        momentum=config.momentum,
        precision=config.precision,
        scratch_elements=config.scratch_elements,
    )
    muon.param_groups[0].update(options)
    for blocks, options in others:
        muon.add_blocks(blocks, **options)
    return muon


def role_of(name: str, parameter: Tensor) -> Role:
    """What a decoder's parameter is, from its name and shape; decides its group."""
    path = name.split(".")
    if "indexer" in path:
        return "indexer" if parameter.dim() >= 2 else "indexer_norm"
    if path[0] in ("embed", "lm_head"):
        return "embedding"
    if parameter.dim() < 2:
        return "norm"
    return "router" if "router" in path else "matrix"


def _muon_blocks(model: nn.Module, config: OptimizerGroups) -> list[MatrixParameter]:
    if config.algorithm == "adamw":
        return []
    by_head = config.algorithm == "muon_split"
    return matrix_blocks(
        model,
        split="head" if by_head else "matrix",
        split_qkv_heads=by_head and config.split_qkv_heads,
    )


def _options(role: Role, config: OptimizerGroups) -> dict[str, Any]:
    """Options of one parameter group."""
    multiples: dict[Role, float] = {
        "matrix": 1.0,
        "embedding": config.embedding,
        "norm": config.norm,
        "router": config.router,
        "indexer": config.indexer,
        "indexer_norm": config.indexer,
    }
    return {
        "role": role,
        "multiple": multiples[role],
        "lr": config.learning_rate * multiples[role],
        "weight_decay": 0.0 if role in _UNDECAYED else config.weight_decay,
    }


class Optimizers:
    """All optimizers of one model, stepped together. Made by `build_optimizers`.

    Args:
        members: torch optimizers; each group has a `multiple` of the learning rate and a `role`.
        names: parameter name -> parameter, for the state table.
    """

    def __init__(
        self, members: list[torch.optim.Optimizer], names: Mapping[str, nn.Parameter]
    ) -> None:
        self.members = members
        self._names = dict(names)
        self._owner = {
            parameter: member
            for member in members
            for group in member.param_groups
            for parameter in group["params"]
        }

    def step(self, learning_rate: float | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            learning_rate: of matrices, for this and later steps; each group takes its multiple.
                None keeps the current one.
        """
        if learning_rate is not None:
            self.set_learning_rate(learning_rate)
        for member in self.members:
            member.step()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of matrices; each group takes its multiple."""
        for group in self._groups():
            group["lr"] = learning_rate * group["multiple"]

    def reset(self) -> None:
        """Forget all state, as if freshly built."""
        for member in self.members:
            member.state.clear()

    def summary(self) -> list[GroupSummary]:
        """The non-empty groups."""
        return [
            GroupSummary(
                type(member).__name__.lower(),
                group["role"],
                len(group["params"]),
                sum(parameter.numel() for parameter in group["params"]),
                group["multiple"],
                group["weight_decay"],
            )
            for member in self.members
            for group in member.param_groups
        ]

    def named_state(self) -> dict[str, Tensor]:
        """The state itself, not a copy, under "<parameter name>.<entry>".

        Entries are `momentum` (Muon) or `exp_avg`, `exp_avg_sq` and `step` (AdamW), with the shape,
        dtype and placement of their parameter (`step` is a float32 number). State that no step has
        made yet is made now, zero, which continues as if it did not exist: so the table of a
        fresh optimizer is a template that `torch.distributed.checkpoint.load` fills in place.
        Frozen parameters have no entries.
        """
        return {
            f"{name}.{entry}": value
            for name, parameter in self._names.items()
            if parameter.requires_grad
            for entry, value in self._state_of(parameter).items()
        }

    @torch.no_grad()
    def load_named_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a table of `named_state` into this optimizer.

        Raises:
            UserError: an entry is missing, unknown or of another shape; nothing is changed.
        """
        mine = self.named_state()
        lacking, unknown = mine.keys() - state.keys(), state.keys() - mine.keys()
        for problem, names in (("lacks", lacking), ("has the unexpected", unknown)):
            if names:
                raise UserError(
                    f"optimizer state: {problem} entry {min(names)} ({len(names)} such); it was "
                    "saved by another model, optimizer or set of trained parameters; reset it"
                )
        for name, value in mine.items():
            if value.shape != state[name].shape:
                raise UserError(
                    f"optimizer state: {name} has shape {list(state[name].shape)} and the model "
                    f"asks for {list(value.shape)}; it was saved by another model; reset it"
                )
        for name, value in mine.items():
            value.copy_(state[name])

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for member in self.members for group in member.param_groups)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        member = self._owner[parameter]
        state = member.state[parameter]
        if not state:
            if isinstance(member, Muon):
                state["momentum"] = torch.zeros_like(parameter)
            else:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
