"""A decoder whose products run over packed weights: faster, and the same bits in every batch.

Linear layers are replaced by ones that keep their parameter, so that checkpoints load as before,
and multiply by a packed copy of it. A row of such a product depends on that row alone, which plain
matrix libraries do not promise: they choose another order of sums for another number of rows.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from headrace.model.block import Block
from headrace.model.decoder import Decoder
from headrace.model.indexer import Indexer
from headrace.model.latent_attention import LatentAttention
from headrace.model.moe import Experts, MixtureOfExperts
from headrace.model.row_independent import (
    PackedHeads,
    RowIndependentExperts,
    RowIndependentMixture,
    RowIndependentRouter,
    per_head,
)
from headrace.ops import PackedMatrices, packed_grouped_linear, packed_linear
from headrace.ops.packed import Kind, PackedMatrix
from headrace.ops.pages import LargePages


class PackedLinear(nn.Linear):
    """A linear layer over a packed copy of its weight; `repack` must follow every change of it.

    Args:
        linear: whose parameters to share.
        kind: precision of the copy.
        pages: where to put it.
    """

    def __init__(self, linear: nn.Linear, kind: Kind, pages: LargePages | None = None) -> None:
        # Not nn.Linear's constructor, which would allocate parameters.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.matrix = PackedMatrix.pack(linear.weight, kind, pages)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], without gradient."""
        rows = input.reshape(-1, self.in_features)
        return packed_linear(rows, self.matrix, self.bias).view(*input.shape[:-1], -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.matrix.nbytes

    def repack(self) -> None:
        """Take over the parameter's present values."""
        self.matrix.repack_(self.weight)


class EngineHeads(PackedHeads):
    """The up-projections of a latent attention in its own precision, without gradient.

    Args:
        attention: whose `kv_up` to copy.
    """

    def __init__(self, attention: LatentAttention) -> None:
        super().__init__(attention, _exact(attention.kv_up.weight))

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Queries [S, H, dn] -> what scores latents directly, [S, H, R]."""
        return per_head(q_nope, lambda x, rows: packed_grouped_linear(x, self.keys, rows))

    def expand(self, latents: Tensor) -> Tensor:
        """Attended latents [S, H, R] -> [S, H, dv]."""
        return per_head(latents, lambda x, rows: packed_grouped_linear(x, self.values, rows))


class PackedRouter(RowIndependentRouter):
    """A router without gradient."""

    def project(self, x: Tensor) -> Tensor:
        """See `RowIndependentRouter.project`."""
        return packed_linear(x, self.matrix)


class PackedExperts(RowIndependentExperts):
    """Experts without gradient, in their own precision.

    Args:
        experts: whose parameters to share.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts, _exact(experts.down))

    def multiply(
        self, x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[int]
    ) -> Tensor:
        """See `RowIndependentExperts.multiply`."""
        return packed_grouped_linear(x, matrices, rows)


class PackedMixture(RowIndependentMixture):
    """A mixture of experts over packed matrices.

    Args:
        mixture: whose parameters to share.
    """

    router: PackedRouter
    experts: PackedExperts

    def __init__(self, mixture: MixtureOfExperts) -> None:
        super().__init__(mixture)
        self.router = PackedRouter(mixture.router)
        self.experts = PackedExperts(mixture.experts)


class PackedProducts:
    """The packed linear layers of a decoder, and its output projection.

    Args:
        model: its linear layers are replaced in place.
        kind: precision of the copies; "int8" leaves the output projection as it is, which costs
            accuracy most and is read once per pass.
        row_independent: also replace what else would let a row depend on others: prediction
            layers; in float32, experts, their routers and the up-projections of latent attention
            (`heads`), which are packed for speed otherwise. All these keep the model's precision.
    """

    def __init__(self, model: Decoder, kind: Kind, *, row_independent: bool = False) -> None:
        self._model = model
        self._packed: list[PackedLinear | PackedRouter | PackedExperts | EngineHeads] = []
        self._heads: dict[int, EngineHeads] | None = None
        for module in list(model.modules()):
            # A decoding step's few rows each read whole experts: the packed ones at full speed.
            if isinstance(module, Block) and (row_independent or kind != "float32"):
                self._replace_experts(module)
        if row_independent or kind != "float32":
            # Plain products of one row copy both matrices before they multiply.
            self._heads = {
                module.layer: EngineHeads(module)
                for module in model.modules()
                if isinstance(module, LatentAttention)
            }
            self._packed += self._heads.values()
        pages = LargePages()
        self._replace_linear(model.layers, kind, pages)
        if row_independent and model.mtp is not None:
            self._replace_linear(model.mtp, _exact(model.embed.weight), pages)
        head = model.output_weight
        self._head = PackedMatrix.pack(head, _exact(head), pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self._head.nbytes + sum(packed.nbytes for packed in self._packed)

    @property
    def heads(self) -> "Mapping[int, EngineHeads] | None":
        """The up-projections of latent attention by layer, if packed."""
        return self._heads

    @property
    def head(self) -> PackedMatrix:
        """The output projection."""
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, for rows [n, D], in float32: rounding them to bfloat16, in steps of
        0.1 at 20, would be most of the difference between this engine's logprobs and a trainer's.
        """
        return packed_linear(hidden.float(), self._head)

    def repack(self) -> None:
        """Take over the model's present weights."""
        for packed in self._packed:
            packed.repack()
        self._head.repack_(cast(Tensor, self._model.output_weight))

    def _replace_experts(self, block: Block) -> None:
        if isinstance(block.feed_forward, MixtureOfExperts):
            mixture = block.feed_forward = PackedMixture(block.feed_forward)
            self._packed += [mixture.router, mixture.experts]

    def _replace_linear(self, root: nn.Module, kind: Kind, pages: LargePages) -> None:
        for parent in list(root.modules()):
            for name, child in list(parent.named_children()):
                # Latent up-projections are read as matrices, never called.
                if isinstance(child, nn.Linear) and name != "kv_up":
                    # What an indexer ranks by is too fine for 8 bits.
                    own = _exact(child.weight) if isinstance(parent, Indexer) else kind
                    packed = PackedLinear(child, own, pages)
                    setattr(parent, name, packed)
                    self._packed.append(packed)


def _exact(weight: Tensor) -> Kind:
    return "float32" if weight.dtype == torch.float32 else "bfloat16"
