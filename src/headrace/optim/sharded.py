"""Muon's blocks when parameters are sharded by rows over processes.

A block that lies whole in one process is updated there. A block that straddles processes gets an
owner: its rows travel to the owner, are orthogonalised once, and the update's rows travel back, so
nobody ever holds a whole parameter it does not own. Owners are chosen so that all do equal work,
by the same arithmetic in every process.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from headrace.errors import UserError
from headrace.optim.blocks import RowSplit
from headrace.optim.newton_schulz import Precision, orthogonalise, resolve_precision
from headrace.optim.updates import LocalMatrix


class RowShard(NamedTuple):
    """Which process holds which rows of a parameter.

    Attributes:
        group: the processes that together hold it.
        rank: this process in the group.
        bounds: process p holds rows bounds[p] .. bounds[p + 1] of the first dimension.
    """

    group: dist.ProcessGroup
    rank: int
    bounds: tuple[int, ...]


class _Block(NamedTuple):
    """One straddling block: its row ranges, ascending, in parameter number `matrix`."""

    matrix: int
    ranges: tuple[tuple[int, int], ...]
    columns: int
    owner: int

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class _Piece(NamedTuple):
    """Rows of a block that one process holds, counted within that process's shard."""

    block: _Block
    start: int
    stop: int

    @property
    def numbers(self) -> int:
        return (self.stop - self.start) * self.block.columns


class _Round(NamedTuple):
    """Pieces that travel at a time: by owner as they leave here, by holder as they arrive here."""

    leaving: list[list[_Piece]]
    arriving: list[list[_Piece]]


def row_shard(parameter: Tensor) -> RowShard | None:
    """Where the rows of a parameter are; None when every process has all of them.

    Raises:
        UserError: sharded over another dimension, or over more than one mesh dimension.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    dims = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not dims:
        return None
    # Subclasses of Shard (strided, for two-dimensional sharding) order the rows differently.
    if len(dims) > 1 or type(placements[dims[0]]) is not Shard or placements[dims[0]] != Shard(0):
        raise UserError(
            f"Muon: a parameter {list(parameter.shape)} is placed as {placements}; shard "
            "matrices over dimension 0 of one mesh dimension (FSDP's default), or use adamw"
        )
    (dim,) = dims
    world, rows = mesh.size(dim), parameter.shape[0]
    if world == 1:
        return None
    chunk = -(-rows // world)
    bounds = tuple(min(rank * chunk, rows) for rank in range(world + 1))
    return RowShard(mesh.get_group(dim), mesh.get_local_rank(dim), bounds)


def aligned_split(shape: Sequence[int], split: RowSplit, shard: RowShard) -> RowSplit | None:
    """The blocks of this process's rows when no block straddles processes, else None.

    True of expert matrices [E, R, C], sharded by expert, and of projections cut by head when every
    process holds whole heads.
    """
    if len(shape) == 3:
        return split
    run = sum(split.rows)
    if split.joined or any(bound % run for bound in shard.bounds):
        return None
    mine = shard.bounds[shard.rank + 1] - shard.bounds[shard.rank]
    return split._replace(groups=mine // run)


class Exchange:
    """Updates straddling blocks of given parameters, which share one group of processes.

    Every process builds it from the same parameters in the same order and calls `update` equally
    often.

    Args:
        parameters: global shape [R, C], blocks and shard of each.
        scratch_elements: numbers that one process orthogonalises at a time, roughly.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Sequence[int], RowSplit, RowShard]],
        *,
        scratch_elements: int,
    ) -> None:
        shards = [shard for _, _, shard in parameters]
        self._group, self._rank = shards[0].group, shards[0].rank
        self._bounds = [shard.bounds for shard in shards]
        self._world = len(self._bounds[0]) - 1
        limit = scratch_elements * self._world
        self._rounds = [self._plan(blocks) for blocks in _rounds(self._assign(parameters), limit)]

    def update(self, matrices: Sequence[LocalMatrix], precision: Precision) -> None:
        """Add the orthogonalised update of every block to the targets, in place.

        Args:
            matrices: this process's rows of every parameter, [r, C].
            precision: see `resolve_precision`; rows travel in that precision.
        """
        dtype = resolve_precision(precision, matrices[0].target.device)
        for plan in self._rounds:
            self._update_round(plan, matrices, dtype)

    def _assign(
        self, parameters: Sequence[tuple[Sequence[int], RowSplit, RowShard]]
    ) -> list[_Block]:
        """All blocks with their owners, most work first."""
        blocks = [
            _Block(index, ranges, shape[1], owner=-1)
            for index, (shape, split, _) in enumerate(parameters)
            for ranges in _row_ranges(split)
        ]
        blocks.sort(key=_work, reverse=True)
        loads = [0] * self._world
        assigned = []
        for block in blocks:
            holders = [rank for rank in range(self._world) if any(self._pieces(block, rank))]
            candidates = holders if len(holders) == 1 else range(self._world)
            owner = min(candidates, key=loads.__getitem__)
            loads[owner] += _work(block)
            assigned.append(block._replace(owner=owner))
        return assigned

    def _pieces(self, block: _Block, rank: int) -> Iterator[_Piece]:
        """The rows of a block that `rank` holds, in the order of the block."""
        lower, upper = self._bounds[block.matrix][rank : rank + 2]
        for start, stop in block.ranges:
            first, last = max(start, lower), min(stop, upper)
            if first < last:
                yield _Piece(block, first - lower, last - lower)

    def _plan(self, blocks: Sequence[_Block]) -> _Round:
        world, me = range(self._world), self._rank
        owned = [block for block in blocks if block.owner == me]
        return _Round(
            [
                [p for b in blocks if b.owner == owner for p in self._pieces(b, me)]
                for owner in world
            ],
            [[p for b in owned for p in self._pieces(b, holder)] for holder in world],
        )

    def _update_round(
        self, plan: _Round, matrices: Sequence[LocalMatrix], dtype: torch.dtype
    ) -> None:
        leaving, arriving = plan
        sizes_out = [sum(piece.numbers for piece in pieces) for pieces in leaving]
        sizes_in = [sum(piece.numbers for piece in pieces) for pieces in arriving]

        like = matrices[0].target
        sent = like.new_empty(sum(sizes_out), dtype=dtype)
        for piece, place in _walk(leaving, sent):
            matrix = matrices[piece.block.matrix]
            rows = slice(piece.start, piece.stop)
            place.copy_(matrix.gradient[rows].lerp(matrix.average[rows], matrix.momentum))
        received = like.new_empty(sum(sizes_in), dtype=dtype)
        self._all_to_all(received, sent, sizes_in, sizes_out)

        _orthogonalise(_walk(arriving, received))

        self._all_to_all(sent, received, sizes_out, sizes_in)
        for piece, update in _walk(leaving, sent):
            matrix, block = matrices[piece.block.matrix], piece.block
            target = matrix.target[piece.start : piece.stop]
            target.add_(update, alpha=-matrix.rate(block.rows, block.columns))

    def _all_to_all(
        self, output: Tensor, given: Tensor, output_sizes: list[int], sizes: list[int]
    ) -> None:
        # Rows travel as bytes: gloo does not know every dtype.
        width = given.element_size()
        dist.all_to_all_single(
            output.view(torch.uint8),
            given.view(torch.uint8),
            [size * width for size in output_sizes],
            [size * width for size in sizes],
            group=self._group,
        )


def _orthogonalise(arrived: Iterator[tuple[_Piece, Tensor]]) -> None:
    """Replace the rows of whole blocks by those of their orthogonal matrices, in place."""
    # Rows arrive holder by holder, and holders hold ascending rows: a block's are in order.
    places: defaultdict[_Block, list[Tensor]] = defaultdict(list)
    for piece, rows in arrived:
        places[piece.block].append(rows)
    batches: defaultdict[tuple[int, int], list[tuple[Tensor, list[Tensor]]]] = defaultdict(list)
    for block, parts in places.items():
        matrix = torch.cat(parts)
        wide = matrix if block.rows <= block.columns else matrix.t()
        batches[wide.shape[0], wide.shape[1]].append((wide, parts))
    for batch in batches.values():
        results = orthogonalise(torch.stack([wide for wide, _ in batch]))
        for result, (wide, parts) in zip(results, batch, strict=True):
            matrix = result if wide.shape[1] == parts[0].shape[1] else result.t()
            for place, rows in zip(
                parts, matrix.split([part.shape[0] for part in parts]), strict=True
            ):
                place.copy_(rows)


def _walk(pieces: Sequence[Sequence[_Piece]], buffer: Tensor) -> Iterator[tuple[_Piece, Tensor]]:
    """Each piece with its place [rows, C] in a flat buffer that holds them one after another."""
    start = 0
    for piece in chain.from_iterable(pieces):
        stop = start + piece.numbers
        yield piece, buffer[start:stop].view(-1, piece.block.columns)
        start = stop


def _row_ranges(split: RowSplit) -> Iterator[tuple[tuple[int, int], ...]]:
    """The row ranges of every block of a parameter [R, C]."""
    run, start = sum(split.rows), 0
    for rows in split.rows:
        ranges = tuple(
            (group * run + start, group * run + start + rows) for group in range(split.groups)
        )
        if split.joined:
            yield ranges
        else:
            yield from ((one,) for one in ranges)
        start += rows


def _rounds(blocks: Sequence[_Block], limit: int) -> Iterator[list[_Block]]:
    """Consecutive blocks of at most `limit` numbers; a larger block goes alone."""
    held: list[_Block] = []
    numbers = 0
    for block in blocks:
        size = block.rows * block.columns
        if held and numbers + size > limit:
            yield held
            held, numbers = [], 0
        held.append(block)
        numbers += size
    if held:
        yield held


def _work(block: _Block) -> int:
    """Multiplications of one iteration, up to a factor."""
    short, long = sorted((block.rows, block.columns))
    return short * short * (2 * long + short)
