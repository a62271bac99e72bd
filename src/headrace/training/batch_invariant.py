"""A decoder whose forward pass gives the bits of a deterministic engine, and trains as ever.

Linear layers and output projection multiply by packed copies of their parameters, which are taken
anew before the passes of every step. Gradients reach the parameters themselves, so optimizers,
checkpoints and published weights know nothing of it. The memory is one more copy of the matrices.
"""

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.model.attention import GroupedQueryAttention
from headrace.model.block import Block
from headrace.model.decoder import Decoder
from headrace.model.feed_forward import SwiGLU
from headrace.ops import PackedMatrix, batch_invariant
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


class BatchInvariant:
    """The packed copies of a model, whose linear layers are replaced in place.

    Args:
        model: float32 on the CPU, grouped-query attention and dense feed-forwards.
        bfloat16: whether its products are to be in bfloat16, which is refused.
        ranks: how many train together; more than one is refused.

    Raises:
        UserError: what there is no such forward for.
    """

    def __init__(self, model: Decoder, *, bfloat16: bool = False, ranks: int = 1) -> None:
        _check(model, bfloat16, ranks)
        pages = LargePages()
        self._copies: list[tuple[PackedMatrix, Tensor]] = []
        for parent in list(model.layers.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    linear = _Linear(child, pages)
                    setattr(parent, name, linear)
                    self._copies.append((linear.matrix, linear.weight))
        self._head = model.output_weight
        self._packed_head = PackedMatrix.pack(self._head, "float32", pages)
        self._copies.append((self._packed_head, self._head))

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(matrix.nbytes for matrix, _ in self._copies)

    def repack(self) -> None:
        """Take over the parameters' present values; must follow every change of them."""
        for matrix, weight in self._copies:
            matrix.repack_(weight)

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
    parts = [part for layer in model.layers if isinstance(layer, Block) for part in layer.parts()]
    if not all(isinstance(part, GroupedQueryAttention | SwiGLU) for part in parts):
        raise UserError(
            f"batch_invariant = true: this {model.config.family} model has latent attention or "
            "experts, for which there is no such forward; set batch_invariant = false"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise UserError(
                f"batch_invariant = true: {name} is {parameter.dtype} on "
                f"{parameter.device.type}; it needs float32 on the CPU, set batch_invariant = false"
            )
