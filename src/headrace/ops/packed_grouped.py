"""Several packed matrices of one shape, each multiplied by rows of its own.

Experts are such a group, and so are the heads of latent attention: what a batch brings to each of
them changes from pass to pass, and here a row keeps its bits whatever that is, as in `packed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.ops.native import build
from headrace.ops.packed import KINDS, Kind, PackedMatrix, packed_linear
from headrace.ops.registry import ANY_DEVICE, REFERENCE, REGISTRY, register


@dataclass(frozen=True, eq=False)
class PackedMatrices:
    """E weights [O, D], each as a `PackedMatrix` holds it. Make them with `pack`.

    Attributes:
        kind: precision of all.
        outputs, inputs: O and D.
        data: [E, ...], the values.
        scales: float32 [E, outputs rounded up to panels] of "int8", else None.
    """

    kind: Kind
    outputs: int
    inputs: int
    data: Tensor
    scales: Tensor | None

    @classmethod
    def pack(cls, weights: Tensor, kind: Kind) -> "PackedMatrices":
        """A packed copy of `weights`, on their device.

        Args:
            weights: [E, O, D] float32 or bfloat16, all at least 1.
            kind: precision to hold them in.

        Raises:
            ValueError: another kind, shape or dtype, or too many inputs for "int8".
        """
        if weights.dim() != 3 or not weights.numel():
            raise ValueError(
                f"weights {list(weights.shape)} must be [matrices, outputs, inputs], not empty"
            )
        first = PackedMatrix.pack(weights[0], kind)
        # Made under inference_mode, they could not be packed anew outside of it.
        with torch.inference_mode(False):
            data, scales = (
                None if x is None else x.new_zeros(len(weights), *x.shape)
                for x in (first.data, first.scales)
            )
        assert data is not None
        return cls(kind, first.outputs, first.inputs, data, scales).repack_(weights)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> PackedMatrix:
        """One of them, in the same memory."""
        scales = None if self.scales is None else self.scales[index]
        return PackedMatrix(self.kind, self.outputs, self.inputs, self.data[index], scales)

    def repack_(self, weights: Tensor) -> "PackedMatrices":
        """Take over other values in place; nobody may multiply meanwhile.

        Raises:
            ValueError: `weights` are not [E, O, D] in float32 or bfloat16.
        """
        if weights.dim() != 3 or len(weights) != len(self):
            raise ValueError(
                f"weights {list(weights.shape)} must be "
                f"[{len(self)}, {self.outputs}, {self.inputs}] as before"
            )
        for index, weight in enumerate(weights):
            self[index].repack_(weight)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def unpack(self) -> Tensor:
        """The weights [E, O, D] as they are multiplied, see `PackedMatrix.unpack`."""
        return torch.stack([self[index].unpack() for index in range(len(self))])

    def to(self, device: torch.device | str) -> "PackedMatrices":
        """The matrices on `device`; themselves if they are there already."""
        data = self.data.to(device)
        if data is self.data:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return PackedMatrices(self.kind, self.outputs, self.inputs, data, scales)


def packed_grouped_linear(
    x: Tensor, matrices: PackedMatrices, counts: Sequence[int] | Tensor
) -> Tensor:
    """Rows times the matrix of their group, x_e W_e^T. No gradient; autocast changes nothing.

    What `packed_linear` says of a row holds for every one: the same bits whatever other rows are
    in its group or in the call, and those that `packed_linear` gives it.

    Args:
        x: [N, D] float32 or bfloat16, sorted by group.
        matrices: E of them, on x's device.
        counts: rows of each of the E groups, summing to N; zeros are allowed.

    Returns:
        [N, O] in x's dtype.

    Raises:
        ValueError: shapes, dtypes, counts or devices do not fit.
    """
    if x.dim() != 2 or x.shape[1] != matrices.inputs:
        raise ValueError(f"x {list(x.shape)} must be [rows, {matrices.inputs}] for these matrices")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"x is {x.dtype}, must be float32 or bfloat16")
    if matrices.data.device != x.device:
        raise ValueError(f"x is on {x.device}, but the matrices are on {matrices.data.device}")
    rows: list[int] = counts.tolist() if isinstance(counts, Tensor) else [int(n) for n in counts]
    if len(rows) != len(matrices) or sum(rows) != x.shape[0] or min(rows) < 0:
        raise ValueError(
            f"counts {rows} must be {len(matrices)} numbers >= 0 that sum to {x.shape[0]}"
        )
    return REGISTRY.resolve("packed_grouped_linear", x.device.type)(x, matrices, rows)


def _reference(x: Tensor, matrices: PackedMatrices, counts: list[int]) -> Tensor:
    with REGISTRY.use(REFERENCE):
        parts = [packed_linear(rows, matrices[index]) for index, rows in enumerate(x.split(counts))]
    return torch.cat(parts)


def _native(x: Tensor, matrices: PackedMatrices, counts: list[int]) -> Tensor:
    out = torch.empty(x.shape[0], matrices.outputs, dtype=x.dtype)
    build.call(
        "packed_grouped",
        torch.get_num_threads(),
        x.dtype == torch.bfloat16,
        *(x.contiguous(), matrices.data, matrices.scales, KINDS.index(matrices.kind)),
        *(torch.tensor(counts, dtype=torch.int64), len(counts)),
        *(matrices.inputs, matrices.outputs, matrices.data[0].nbytes),
        out,
    )
    return out


register("packed_grouped_linear", REFERENCE, _reference, devices=(ANY_DEVICE,))
register("packed_grouped_linear", "cpu", _native, available=build.unavailable_reason)
