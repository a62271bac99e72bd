"""Orthogonalised updates of matrices that lie whole in this process, batched by shape.

Works on plain local tensors. Scratch is bounded: the update direction is computed, orthogonalised
and applied for a limited number of blocks at a time, whatever the size of the model.

Source: Liu et al. 2025 (arXiv 2502.16982), eq. 4, for the size of an update.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.optim.blocks import RowSplit
from headrace.optim.newton_schulz import Precision, orthogonalise, resolve_precision

UPDATE_RMS = 0.2
"""Root mean square of an update at learning rate 1, that of a typical AdamW step."""

SCRATCH_ELEMENTS = 1 << 24
"""Numbers orthogonalised at a time (64 MiB in float32; the iteration holds about five copies)."""


class LocalMatrix(NamedTuple):
    """One parameter's part in this process, ready for its update.

    Attributes:
        gradient: [R, C] or [E, R, C].
        average: same shape, the gradient average that already contains `gradient`.
        target: same shape, the values to change.
        momentum: Nesterov weight of the average in the update direction.
        learning_rate: size of an update relative to a matched AdamW step.
    """

    gradient: Tensor
    average: Tensor
    target: Tensor
    momentum: float
    learning_rate: float

    def rate(self, rows: int, columns: int) -> float:
        """Factor that gives an orthogonal [rows, columns] the wanted root mean square."""
        return self.learning_rate * UPDATE_RMS * max(rows, columns) ** 0.5


class _Blocks(NamedTuple):
    """N blocks of one parameter and role; tensors [N, g, r, C], a block being g * r rows."""

    matrix: LocalMatrix
    gradient: Tensor
    average: Tensor
    target: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        _, pieces, rows, columns = self.target.shape
        return pieces * rows, columns


def update_blocks(
    matrices: Iterable[tuple[LocalMatrix, RowSplit]],
    *,
    precision: Precision = "auto",
    scratch_elements: int = SCRATCH_ELEMENTS,
) -> None:
    """Add the orthogonalised update of every block to the targets, in place.

    A block that is larger than `scratch_elements` goes alone. A block and the transpose of another
    share a batch.
    """
    batches: defaultdict[tuple[torch.dtype, torch.device, int, int], list[_Blocks]]
    batches = defaultdict(list)
    for matrix, split in matrices:
        dtype = resolve_precision(precision, matrix.target.device)
        for blocks in _blocks_of(matrix, split):
            shape = (min(blocks.shape), max(blocks.shape))
            batches[dtype, matrix.target.device, *shape].append(blocks)
    for (dtype, device, short, long), members in batches.items():
        limit = max(1, scratch_elements // (short * long))
        for batch in _chunks(members, limit):
            scratch = torch.empty(
                sum(blocks.target.shape[0] for blocks in batch),
                short,
                long,
                dtype=dtype,
                device=device,
            )
            for blocks, place in zip(batch, _places(scratch, batch), strict=True):
                place.copy_(blocks.gradient.lerp(blocks.average, blocks.matrix.momentum))
            scratch = orthogonalise(scratch)
            for blocks, update in zip(batch, _places(scratch, batch), strict=True):
                blocks.target.add_(update, alpha=-blocks.matrix.rate(*blocks.shape))


def _blocks_of(matrix: LocalMatrix, split: RowSplit) -> Iterator[_Blocks]:
    """One entry per role that has any block."""
    triple = (matrix.gradient, matrix.average, matrix.target)
    pieces = zip(*(_by_role(tensor, split) for tensor in triple), strict=True)
    return (_Blocks(matrix, *piece) for piece in pieces if piece[0].numel())


def _by_role(tensor: Tensor, split: RowSplit) -> Iterator[Tensor]:
    """Views [N, g, r, C] into [R, C] or [E, R, C], one per role."""
    if tensor.dim() == 3:
        roles = tensor.split(split.rows, dim=1)
    else:
        roles = tensor.unflatten(0, (split.groups, sum(split.rows))).split(split.rows, dim=1)
    return (role.unsqueeze(0 if split.joined else 1) for role in roles)


def _chunks(members: list[_Blocks], limit: int) -> Iterator[list[_Blocks]]:
    """Groups of at most `limit` blocks, in order; members are cut where they do not fit."""
    batch: list[_Blocks] = []
    room = limit
    for matrix, *tensors in members:
        start, count = 0, tensors[0].shape[0]
        while start < count:
            taken = min(room, count - start)
            batch.append(_Blocks(matrix, *(t[start : start + taken] for t in tensors)))
            start, room = start + taken, room - taken
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def _places(scratch: Tensor, batch: list[_Blocks]) -> Iterator[Tensor]:
    """Views [N, g, r, C] into scratch [sum of N, short, long], one per member of the batch."""
    for part, blocks in zip(
        scratch.split([blocks.target.shape[0] for blocks in batch]), batch, strict=True
    ):
        rows, columns = blocks.shape
        part = part.transpose(1, 2) if rows > columns else part
        yield part.unflatten(1, tuple(blocks.target.shape[1:3]))
