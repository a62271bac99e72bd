"""Products with weights that are packed once and multiplied often, as generation does.

`PackedMatrix` holds a weight in the order in which the kernels stream it, in one of three
precisions; `packed_linear` multiplies rows by it. A row's result depends on that row and the weight
only, bit for bit: not on how many rows are computed beside it, where it stands among them, or on
threads.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.native import build
from headrace.ops.pages import LargePages
from headrace.ops.registry import ANY_DEVICE, REFERENCE, REGISTRY, register

Kind = Literal["float32", "bfloat16", "int8"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Precisions of a packed matrix; native code knows them by their index."""

PANEL = 32
"""Outputs that are stored, and computed, together."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_MOST_INPUTS = 1 << 17
"""Of an int8 matrix: more products of 127 * 127 would not fit 32 bits."""


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A weight [O, D] in the order that `packed_linear` reads. Make one with `pack`.

    Panels of 32 outputs follow each other; zeros fill the last one. "float32" is
    [panels, D, 32]. The others lie as the tiles of matrix units take them, group values of a row
    (2 of bfloat16, 4 of int8) side by side: [panels, steps, 2, 16, 16 outputs, group], where a step
    is 16 groups.

    Attributes:
        kind: "float32"; "bfloat16"; or "int8", with one scale per output.
        outputs, inputs: O and D.
        data: the values.
        scales: float32 [panels * 32] of "int8", what a step of its integers is worth: the
            output's largest magnitude over 127, NaN where a weight is not finite. Else None.
    """

    kind: Kind
    outputs: int
    inputs: int
    data: Tensor
    scales: Tensor | None

    @classmethod
    def pack(cls, weight: Tensor, kind: Kind, pages: LargePages | None = None) -> "PackedMatrix":
        """A packed copy of `weight`, on its device.

        Args:
            weight: [O, D] float32 or bfloat16, both at least 1.
            kind: precision to hold it in.
            pages: where to put a copy on the CPU; worth it where many matrices are read in turn.

        Raises:
            ValueError: another kind, shape or dtype, or too many inputs for "int8".
        """
        if kind not in KINDS:
            raise ValueError(f'kind "{kind}" of a packed matrix must be one of {", ".join(KINDS)}')
        if weight.dim() != 2 or not weight.numel():
            raise ValueError(f"weight {list(weight.shape)} must be [outputs, inputs], not empty")
        outputs, inputs = weight.shape
        if kind == "int8" and inputs > _MOST_INPUTS:
            raise ValueError(f"weight has {inputs} inputs; int8 takes at most {_MOST_INPUTS}")
        panels, dtype = -(-outputs // PANEL), _DTYPES[kind]
        if kind == "float32":
            shape = (panels, inputs, PANEL)
        else:
            group = 4 // dtype.itemsize
            shape = (panels, -(-inputs // (16 * group)), 2, 16, 16, group)
        # Made under inference_mode, they could not be packed anew outside of it.
        with torch.inference_mode(False):
            if pages is not None and weight.device.type == "cpu":
                data = pages.zeros(shape, dtype)
            else:
                data = torch.zeros(shape, dtype=dtype, device=weight.device)
            scales = torch.zeros(panels * PANEL, device=weight.device) if kind == "int8" else None
        return cls(kind, outputs, inputs, data, scales).repack_(weight)

    @torch.no_grad()
    def repack_(self, weight: Tensor) -> "PackedMatrix":
        """Take over other values in place; nobody may multiply meanwhile.

        Raises:
            ValueError: `weight` is not [O, D] in float32 or bfloat16.
        """
        if weight.shape != (self.outputs, self.inputs):
            raise ValueError(
                f"weight {list(weight.shape)} must be [{self.outputs}, {self.inputs}] as before"
            )
        _check_dtype("weight", weight)
        weight = weight.detach().to(self.data.device)
        REGISTRY.resolve("pack_matrix", weight.device.type)(weight, self)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def unpack(self) -> Tensor:
        """The weight [O, D] as it is multiplied: in `kind`'s dtype, float32 for "int8"."""
        values = self._values()
        if self.scales is None:
            return values
        return values.float() * self.scales[: self.outputs, None]

    def to(self, device: torch.device | str) -> "PackedMatrix":
        """The matrix on `device`; itself if it is there already."""
        data = self.data.to(device)
        if data is self.data:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return PackedMatrix(self.kind, self.outputs, self.inputs, data, scales)

    def _values(self) -> Tensor:
        """What is stored, [O, D] in its own dtype."""
        if self.kind == "float32":
            values = self.data.transpose(1, 2).reshape(-1, self.inputs)
        else:
            groups = self.data.view(torch.int32)[..., 0].permute(0, 2, 4, 1, 3)
            values = groups.reshape(self.data.shape[0] * PANEL, -1).view(self.data.dtype)
        return values[: self.outputs, : self.inputs]


def packed_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias of a packed W. No gradient; autocast changes nothing.

    Each row of the result has the same bits whatever other rows are in the call. By kind:
    "float32" multiplies and sums in float32. "bfloat16" rounds x to it; products are exact, sums
    float32. "int8" rounds each row of x to multiples of its largest magnitude over 127 (halves to
    even), sums exactly in int32, and multiplies by the output's scale, then by the row's: the
    same bits on every machine; a row that is not finite becomes NaN.
    Source: Dettmers et al., LLM.int8(), arXiv 2208.07339, section 2.1 (vector-wise quantisation).

    Args:
        x: [S, D] float32 or bfloat16.
        matrix: on x's device.
        bias: [O] float32 or bfloat16, added in float32.

    Returns:
        [S, O] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if x.dim() != 2 or x.shape[1] != matrix.inputs:
        raise ValueError(f"x {list(x.shape)} must be [rows, {matrix.inputs}] for this matrix")
    _check_dtype("x", x)
    if matrix.data.device != x.device:
        raise ValueError(f"x is on {x.device}, but the matrix is on {matrix.data.device}")
    if bias is not None:
        if bias.shape != (matrix.outputs,) or bias.device != x.device:
            raise ValueError(
                f"bias {list(bias.shape)} on {bias.device} must be [{matrix.outputs}] on {x.device}"
            )
        _check_dtype("bias", bias)
    return REGISTRY.resolve("packed_linear", x.device.type)(x, matrix, bias)


def _pack_reference(weight: Tensor, matrix: PackedMatrix) -> PackedMatrix:
    """Write `weight` into `matrix`, whose padding is zero already."""
    data = matrix.data
    values = weight
    if matrix.scales is not None:
        values, scales = _quantise(weight.float())
        matrix.scales[: matrix.outputs] = scales
    rows, width = data.shape[0] * PANEL, data[0].numel() // PANEL
    values = F.pad(values.to(data.dtype), (0, width - matrix.inputs, 0, rows - matrix.outputs))
    values = values.contiguous()
    if matrix.kind == "float32":
        data.copy_(values.view(-1, PANEL, width).transpose(1, 2))
    else:
        groups = values.view(torch.int32).view(-1, 2, 16, data.shape[1], 16)
        data.view(torch.int32)[..., 0].copy_(groups.permute(0, 3, 1, 4, 2))
    return matrix


def _pack_native(weight: Tensor, matrix: PackedMatrix) -> PackedMatrix:
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    build.call(
        "pack_matrix",
        torch.get_num_threads(),
        weight.dtype == torch.bfloat16,
        *(weight, weight.stride(0), KINDS.index(matrix.kind), matrix.outputs, matrix.inputs),
        *(matrix.data, matrix.scales),
    )
    return matrix


@torch.no_grad()
def _reference(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """In float64, whose own rounding, which may depend on the number of rows, is lost in the
    rounding to float32 that follows."""
    values = matrix._values().double()
    if matrix.scales is None:
        rows = x.to(matrix.data.dtype)
        out = (rows.double() @ values.T).float()
    else:
        rows, scales = _quantise(x.float())
        out = (rows.double() @ values.T).float() * matrix.scales[: matrix.outputs]
        out = out * scales[:, None]
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def _native(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape[0], matrix.outputs, dtype=x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.detach().float().contiguous()
    build.call(
        "packed_linear",
        torch.get_num_threads(),
        x.dtype == torch.bfloat16,
        *(x, x.stride(0), matrix.data, matrix.scales, bias),
        *(KINDS.index(matrix.kind), x.shape[0], matrix.inputs, matrix.outputs, out),
    )
    return out


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, D], float32 scales [N]) of float32 x; zeros and NaN where a row is not finite."""
    largest = x.abs().amax(dim=1)
    # By a tensor: some devices multiply by the reciprocal of a number.
    scales = largest / torch.full_like(largest, 127.0)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    # Only a row with a scale has anything but zeros.
    steps = torch.where(scales > 0, scales, torch.inf)
    integers = (x / steps[:, None]).nan_to_num_(nan=0.0).clamp_(-127, 127).round_()
    return integers.to(torch.int8), scales


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} is {x.dtype}, must be float32 or bfloat16")


for _op, _plain, _fast in (
    ("pack_matrix", _pack_reference, _pack_native),
    ("packed_linear", _reference, _native),
):
    register(_op, REFERENCE, _plain, devices=(ANY_DEVICE,))
    register(_op, "cpu", _fast, available=build.unavailable_reason)
