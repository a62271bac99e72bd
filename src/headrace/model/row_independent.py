"""Routers and mixtures in which a token's result depends on that token alone, to the bit.

Engines that promise it and trainers that are to find the same numbers share these forms; what they
multiply by is their own.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headrace.model.moe import SMALLEST_SUM, MixtureOfExperts, Router


class RowIndependentRouter(Router, ABC):
    """A router that scores a token the same whatever tokens are beside it.

    Args:
        router: whose weight and bias to share.
    """

    def __init__(self, router: Router) -> None:
        # Not Router's constructor, which would allocate parameters.
        nn.Module.__init__(self)
        self.experts_per_token, self.scaling = router.experts_per_token, router.scaling
        self.weight = router.weight
        self.register_buffer("bias", router.bias)

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


def sum_in_order(x: Tensor) -> Tensor:
    """[N, K, ...] -> [N, ...]. A reduction of the library orders its sums by the tensor's shape."""
    total = x[:, 0]
    for index in range(1, x.shape[1]):
        total = total + x[:, index]
    return total
