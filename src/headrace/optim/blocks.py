"""Which parameters of a decoder are matrices, and into which blocks each is cut for Muon.

An orthogonalised matrix has one flat spectrum, so what is orthogonalised together shares its
update. Projections that are stored fused are always cut into the matrices an unfused model would
have (queries, keys and values; gate and up; the latent and its rotary key; every expert). Muon
Split cuts further: the up-projections of latent attention into one matrix per head.

Source: GLM-5 (arXiv 2602.15763) section 2.1.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

SplitPolicy = Literal["head", "matrix"]


class RowSplit(NamedTuple):
    """How the rows of a parameter [R, C], or of each matrix of [E, R, C], fall into blocks.

    The rows are `groups` equal runs; each run consists of pieces of `rows` rows, one per role.

    Attributes:
        rows: rows of each role inside one run; their sum times `groups` is R.
        groups: number of runs, usually heads; more than one only for [R, C] parameters.
        joined: a role's rows of all runs are one block, instead of one block per run.
    """

    rows: tuple[int, ...]
    groups: int = 1
    joined: bool = False


class MatrixParameter(NamedTuple):
    """A parameter for Muon: [R, C] or [E, R, C], and its blocks."""

    parameter: nn.Parameter
    split: RowSplit


def matrix_blocks(
    model: nn.Module, *, split: SplitPolicy = "head", split_qkv_heads: bool = False
) -> list[MatrixParameter]:
    """The parameters of a decoder that Muon takes, with their blocks.

    Embeddings, output projection, norms, biases, the router and the indexer's head weights are not
    among them.

    Args:
        model: a `Decoder`; its parameter names and its `config` decide.
        split: "head" is Muon Split, one block per head of the latent up-projections and of the
            indexer's queries; "matrix" is plain Muon, one block per role (W_UQ, W_UK, W_UV).
        split_qkv_heads: also cut the fused q, k, v projection of grouped-query attention by head.

    Raises:
        ValueError: a parameter's rows cannot be split as the config says.
    """
    return [
        MatrixParameter(parameter, found)
        for name, parameter in model.named_parameters()
        if (found := _split_of(name, parameter, model.config, split, split_qkv_heads)) is not None
    ]


def _split_of(
    name: str, parameter: nn.Parameter, config: Any, policy: SplitPolicy, split_qkv_heads: bool
) -> RowSplit | None:
    """The blocks of one parameter, or None when it is not Muon's."""
    path = name.removesuffix(".weight").split(".")
    inside = path[0] in ("layers", "mtp")
    if parameter.dim() < 2 or not inside or "router" in path or path[-2:] == ["indexer", "weights"]:
        return None
    rows = parameter.shape[-2]
    split = _named_split(path, rows, config, policy, split_qkv_heads)
    if sum(split.rows) * split.groups != rows:
        raise ValueError(
            f"{name}: {rows} rows cannot be split into {split.groups} x {list(split.rows)}"
        )
    return split


def _named_split(
    path: Sequence[str], rows: int, config: Any, policy: SplitPolicy, split_qkv_heads: bool
) -> RowSplit:
    heads, by_head = config.num_heads, policy == "head"
    match path[-2:]:
        case ["indexer", "q_up"]:
            return _by_head(rows, config.indexer.num_heads) if by_head else RowSplit((rows,))
        case [_, "q_up"]:
            return _by_head(rows, heads) if by_head else RowSplit((rows,))
        case [_, "kv_up"]:
            latent = config.latent
            return RowSplit((latent.nope_dim, latent.value_dim), heads, joined=not by_head)
        case [_, "kv_down"]:
            return RowSplit((config.latent.kv_rank, config.latent.rope_dim))
        case [_, "qkv"] if split_qkv_heads:
            return _by_head(rows, heads + 2 * config.num_kv_heads)
        case [_, "qkv"]:
            size = config.head_dim
            return RowSplit((heads * size, config.num_kv_heads * size, config.num_kv_heads * size))
        case [_, "gate_up"]:
            return RowSplit((rows // 2, rows // 2))
        case _:
            return RowSplit((rows,))


def _by_head(rows: int, heads: int) -> RowSplit:
    return RowSplit((rows // heads,), heads)
