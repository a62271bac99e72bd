"""Parts of a decoder in which a token's result depends on that token alone, to the bit.

Engines that promise it and trainers that are to find the same numbers share these forms; what they
multiply by is their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headrace.model.feed_forward import apply_gate
from headrace.model.latent_attention import LatentAttention
from headrace.model.moe import SMALLEST_SUM, Experts, MixtureOfExperts, Router
from headrace.ops import PackedMatrices, PackedMatrix
from headrace.ops.packed import Kind


class RowIndependentRouter(Router, ABC):
    """A router over a packed weight that scores a token the same whatever tokens are beside it.

    Args:
        router: whose weight and bias to share.
    """

    def __init__(self, router: Router) -> None:
        # Not Router's constructor, which would allocate parameters.
        nn.Module.__init__(self)
        self.experts_per_token, self.scaling = router.experts_per_token, router.scaling
        self.weight = router.weight
        self.register_buffer("bias", router.bias)
        self.matrix = PackedMatrix.pack(router.weight, "float32")

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.matrix.nbytes

    def repack(self) -> None:
        """Take over the parameter's present values."""
        self.matrix.repack_(self.weight)

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Logits [N, E] of rows x [N, D], both float32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Router.forward`."""
        logits = self.project(x.float())
        # A softmax works on each row by itself; a sigmoid computes the last few elements of a
        # whole tensor by other instructions.
        scores = torch.stack((logits, torch.zeros_like(logits)), -1).softmax(-1)[..., 0]
        experts = (scores.detach() + self.bias).topk(self.experts_per_token, dim=-1).indices
        chosen = scores.gather(1, experts)
        total = sum_in_order(chosen)[:, None]
        return chosen / (total + SMALLEST_SUM) * self.scaling, experts, scores


class RowIndependentExperts(Experts, ABC):
    """Experts over packed matrices, whose rows do not depend on others.

    Args:
        experts: whose parameters to share.
        kind: precision of the copies.
    """

    def __init__(self, experts: Experts, kind: Kind) -> None:
        # Not Experts' constructor, which would allocate parameters.
        nn.Module.__init__(self)
        self.gate_up, self.down = experts.gate_up, experts.down
        self.matrices = [PackedMatrices.pack(x, kind) for x in (self.gate_up, self.down)]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(matrices.nbytes for matrices in self.matrices)

    def repack(self) -> None:
        """Take over the parameters' present values."""
        for matrices, weights in zip(self.matrices, (self.gate_up, self.down), strict=True):
            matrices.repack_(weights)

    @abstractmethod
    def multiply(
        self, x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[int]
    ) -> Tensor:
        """Rows x [N, D], so many of each expert, times its `weight` [E, O, D] -> [N, O]."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """See `Experts.forward`."""
        rows = counts.tolist()
        gate_up, down = self.matrices
        inner = apply_gate(self.multiply(x, self.gate_up, gate_up, rows))
        return self.multiply(inner, self.down, down, rows)


class RowIndependentMixture(MixtureOfExperts):
    """A mixture that adds a token's experts in the order of their scores.

    Args:
        mixture: whose router, experts and shared expert to take over.
    """

    def __init__(self, mixture: MixtureOfExperts) -> None:
        nn.Module.__init__(self)
        self.router, self.experts, self.shared = mixture.router, mixture.experts, mixture.shared

    def mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """See `MixtureOfExperts.mix`."""
        return sum_in_order(outputs * weights.unsqueeze(-1))


class PackedHeads:
    """Both up-projections of a latent attention, packed head by head.

    Args:
        attention: whose `kv_up` to copy.
        kind: precision of the copies.
    """

    def __init__(self, attention: LatentAttention, kind: Kind) -> None:
        self._attention = attention
        self.keys, self.values = (PackedMatrices.pack(x, kind) for x in self._weights())

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self.keys.nbytes + self.values.nbytes

    def repack(self) -> None:
        """Take over the projection's present values."""
        for matrices, weights in zip((self.keys, self.values), self._weights(), strict=True):
            matrices.repack_(weights)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """[H, R, dn] from queries to latents and [H, dv, R] from latents to values."""
        keys, values = self._attention.up_projections()
        return keys.detach().transpose(1, 2), values.detach()


def per_head(x: Tensor, multiply: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
    """x [S, H, a] through a product of rows sorted by head [H S, a] -> [S, H, b], contiguous.

    Args:
        x: rows of every head.
        multiply: of sorted rows, and how many there are of each head.
    """
    rows, heads, width = x.shape
    out = multiply(x.transpose(0, 1).reshape(-1, width), [rows] * heads)
    return out.view(heads, rows, -1).transpose(0, 1).contiguous()


def sum_in_order(x: Tensor) -> Tensor:
    """[N, K, ...] -> [N, ...]. A reduction of the library orders its sums by the tensor's shape."""
    total = x[:, 0]
    for index in range(1, x.shape[1]):
        total = total + x[:, index]
    return total
