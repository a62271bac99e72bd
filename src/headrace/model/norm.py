"""RMSNorm over the last dimension, written for the machine it runs on.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467, eq. 4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.ops import is_small, rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; weight [width] starts at 1.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.
        device: where the weight lives; None is torch's default device.
        dtype: of the weight; None is torch's default dtype.
    """

    epsilon: Tensor

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = (width,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.register_buffer(
            "epsilon", torch.tensor(eps, device=device, dtype=dtype), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], same dtype; the mean square is taken in fp32 at least."""
        if x.device.type != "cpu":
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        if not is_small(x):
            return rms_norm(x, self.weight, self.eps)
        # The fewest operations that do it; torch's own rms_norm is eight on the CPU.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self.epsilon, length, length, value=1 / self.shape[0])
        return x * mean_square.rsqrt() * self.weight
