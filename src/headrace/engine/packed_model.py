"""A decoder whose products run over packed weights: faster, and the same bits in every batch.

Linear layers are replaced by ones that keep their parameter, so that checkpoints load as before,
and multiply by a packed copy of it. A row of such a product depends on that row alone, which plain
matrix libraries do not promise: they choose another order of sums for another number of rows.
"""

from typing import cast

import torch
from torch import Tensor, nn

from headrace.model.decoder import Decoder
from headrace.model.indexer import Indexer
from headrace.ops import packed_linear
from headrace.ops.packed import Kind, PackedMatrix


class PackedLinear(nn.Linear):
    """A linear layer over a packed copy of its weight; `repack` must follow every change of it.

    Args:
        linear: whose parameters to share.
        kind: precision of the copy.
    """

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        # Not nn.Linear's constructor, which would allocate parameters.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.matrix = PackedMatrix.pack(linear.weight, kind)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], without gradient."""
        rows = input.reshape(-1, self.in_features)
        return packed_linear(rows, self.matrix, self.bias).view(*input.shape[:-1], -1)

    def repack(self) -> None:
        """Take over the parameter's present values."""
        self.matrix.repack_(self.weight)


class PackedProducts:
    """The packed linear layers of a decoder, and its output projection.

    Args:
        model: its linear layers are replaced in place.
        kind: precision of the copies; "int8" leaves the output projection as it is, which costs
            accuracy most and is read once per pass.
    """

    def __init__(self, model: Decoder, kind: Kind) -> None:
        self._model = model
        self._layers: list[PackedLinear] = []
        for parent in list(model.layers.modules()):
            for name, child in list(parent.named_children()):
                # Latent up-projections are read as matrices, never called.
                if isinstance(child, nn.Linear) and name != "kv_up":
                    # What an indexer ranks by is too fine for 8 bits.
                    own = _exact(child.weight) if isinstance(parent, Indexer) else kind
                    packed = PackedLinear(child, own)
                    setattr(parent, name, packed)
                    self._layers.append(packed)
        self._head = PackedMatrix.pack(model.output_weight, _exact(model.output_weight))

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self._head.nbytes + sum(layer.matrix.nbytes for layer in self._layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, for rows [n, D], in float32: rounding them to bfloat16, in steps of
        0.1 at 20, would be most of the difference between this engine's logprobs and a trainer's.
        """
        return packed_linear(hidden.float(), self._head)

    def repack(self) -> None:
        """Take over the model's present weights."""
        for layer in self._layers:
            layer.repack()
        self._head.repack_(cast(Tensor, self._model.output_weight))


def _exact(weight: Tensor) -> Kind:
    return "float32" if weight.dtype == torch.float32 else "bfloat16"
