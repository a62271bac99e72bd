"""A decoder whose forward pass gives the bits of a deterministic engine, and trains as ever.

Linear layers, experts, their routers, the up-projections of latent attention and the output
projection multiply by packed copies of their parameters, which are taken anew before the passes of
every step. Gradients reach the parameters themselves, so optimizers, checkpoints and published
weights know nothing of it. The memory is one more copy of the matrices.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.model.block import Block
from headrace.model.causal import HeadProducts
from headrace.model.decoder import Decoder
from headrace.model.latent_attention import LatentAttention
from headrace.model.moe import MixtureOfExperts
from headrace.model.row_independent import (
    PackedHeads,
    RowIndependentExperts,
    RowIndependentMixture,
    RowIndependentRouter,
    per_head,
)
from headrace.ops import PackedMatrices, PackedMatrix, batch_invariant
from headrace.ops.pages import LargePages


class _Linear(nn.Linear):
    """A linear layer over a packed copy of its weight.

    Args:
        linear: whose parameters to share.
        pages: where to put the copy.
    """

    def __init__(self, linear: nn.Linear, pages: LargePages) -> None:
        # Not nn.Linear's constructor, which would allocate parameters.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.matrix = PackedMatrix.pack(linear.weight, "float32", pages)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return batch_invariant.linear(input, self.weight, self.matrix, self.bias)


class _Router(RowIndependentRouter):
    """A router with a gradient."""

    def project(self, x: Tensor) -> Tensor:
        """See `RowIndependentRouter.project`."""
        return batch_invariant.linear(x, self.weight, self.matrix)


class _Experts(RowIndependentExperts):
    """Experts with gradients."""

    def multiply(
        self, x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[int]
    ) -> Tensor:
        """See `RowIndependentExperts.multiply`."""
        return batch_invariant.grouped_linear(x, weight, matrices, rows)


class _Mixture(RowIndependentMixture):
    """A mixture of packed experts."""

    router: _Router
    experts: _Experts

    def __init__(self, mixture: MixtureOfExperts) -> None:
        super().__init__(mixture)
        self.router = _Router(mixture.router)
        self.experts = _Experts(mixture.experts, "float32")


class _Heads(PackedHeads):
    """Both up-projections of a latent attention; see `HeadProducts`."""

    def absorb(self, q_nope: Tensor, w_uk: Tensor) -> Tensor:
        """See `HeadProducts.absorb`."""
        weight = w_uk.transpose(1, 2)
        return per_head(
            q_nope, lambda x, rows: batch_invariant.grouped_linear(x, weight, self.keys, rows)
        )

    def expand(self, latents: Tensor, w_uv: Tensor) -> Tensor:
        """See `HeadProducts.expand`."""
        return per_head(
            latents, lambda x, rows: batch_invariant.grouped_linear(x, w_uv, self.values, rows)
        )


class BatchInvariant:
    """The packed copies of a model, whose layers are replaced in place; prediction layers stay.

    Args:
        model: float32 on the CPU.
        bfloat16: whether its products are to be in bfloat16, which is refused.
        ranks: how many train together; more than one is refused.

    Raises:
        UserError: what there is no such forward for.
    """

    def __init__(self, model: Decoder, *, bfloat16: bool = False, ranks: int = 1) -> None:
        _check(model, bfloat16, ranks)
        pages = LargePages()
        self._copies: list[tuple[PackedMatrix, Tensor]] = []
        self._packed: list[_Router | _Experts | _Heads] = []
        self._heads: dict[int, _Heads] = {}
        for part in list(model.layers.modules()):
            if isinstance(part, Block) and isinstance(part.feed_forward, MixtureOfExperts):
                mixture = part.feed_forward = _Mixture(part.feed_forward)
                self._packed += [mixture.router, mixture.experts]
            elif isinstance(part, LatentAttention):
                heads = self._heads[part.layer] = _Heads(part, "float32")
                self._packed.append(heads)
        for parent in list(model.layers.modules()):
            for name, child in list(parent.named_children()):
                # Latent up-projections are read as matrices, never called.
                if isinstance(child, nn.Linear) and name != "kv_up":
                    linear = _Linear(child, pages)
                    setattr(parent, name, linear)
                    self._copies.append((linear.matrix, linear.weight))
        self._head = model.output_weight
        self._packed_head = PackedMatrix.pack(self._head, "float32", pages)
        self._copies.append((self._packed_head, self._head))

    @property
    def heads(self) -> Mapping[int, HeadProducts]:
        """The up-projections of latent attention by layer; empty without."""
        return self._heads

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        matrices = sum(matrix.nbytes for matrix, _ in self._copies)
        return matrices + sum(packed.nbytes for packed in self._packed)

    def repack(self) -> None:
        """Take over the parameters' present values; must follow every change of them."""
        for matrix, weight in self._copies:
            matrix.repack_(weight)
        for packed in self._packed:
            packed.repack()

    def score(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs, entropies) of `targets` [N] after `hidden` [N, D]."""
        return batch_invariant.linear_cross_entropy(
            hidden, self._head, self._packed_head, targets, temperature=temperature
        )


def _check(model: Decoder, bfloat16: bool, ranks: int) -> None:
    """Refuse what has no forward of this kind, by name."""
    if bfloat16:
        raise UserError(
            'batch_invariant = true with dtype = "bfloat16": it computes in float32; set dtype = '
            '"float32", or batch_invariant = false'
        )
    if ranks > 1:
        raise UserError(
            f"batch_invariant = true with {ranks} trainer ranks: sharded weights are gathered anew "
            "for every pass and never packed; use one rank, or batch_invariant = false"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise UserError(
                f"batch_invariant = true: {name} is {parameter.dtype} on "
                f"{parameter.device.type}; it needs float32 on the CPU, set batch_invariant = false"
            )
