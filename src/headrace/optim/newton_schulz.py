"""Orthogonalises batches of matrices by the quintic Newton-Schulz iteration.

Knows matrices only, no parameters and no optimizer. All matrices of one call have one shape, so
that the iteration is a handful of batched products however many matrices there are.

Source: Jordan et al. 2024 (Muon), coefficients of the quintic.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["auto", "float32", "bfloat16"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
_TINY = 1e-7


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values end in about [0.7, 1.2].

    Args:
        matrices: [N, R, C] float; the iteration runs in their dtype. A zero matrix stays zero.

    Returns:
        [N, R, C], same dtype.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(_TINY)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.transpose(1, 2) if tall else x


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of the iteration on a device.

    "auto" is bfloat16 where its products are much faster (CUDA, CPUs with AMX) and else float32.
    The iteration only needs singular values near one, so either gives the same training.
    """
    if precision == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and _cpu_has_amx())
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


@cache
def _cpu_has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))
