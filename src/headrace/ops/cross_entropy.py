"""Output projection and cross-entropy in one op, so that the logits never exist all at once.

The forward keeps the normaliser of each row; the backward computes a chunk's logits again and turns
them into their gradient in place. When everything fits one chunk, the probabilities are kept
instead and nothing is computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.ops.registry import register

_BLOCK_ELEMENTS = 1 << 20
"""Logits widened to float32 at once: what stays in cache between the passes over it."""


Measure = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""What becomes of logits z [n, V] in float32, which may be overwritten, and of targets [n]: the
logprobs, entropies and normalisers, [n] each. Probabilities go into a third tensor [n, V], if there
is one."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = 1 << 25,
) -> tuple[Tensor, Tensor]:
    """See `headrace.ops.linear_cross_entropy`."""

    def project(rows: Tensor) -> Tensor:
        return rows @ weight.t()

    return projected_cross_entropy(
        *(hidden, weight, targets, project, _measure),
        temperature=temperature,
        chunk_elements=chunk_elements,
    )


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    project: Callable[[Tensor], Tensor],
    measure: Measure,
    *,
    temperature: float,
    chunk_elements: int,
) -> tuple[Tensor, Tensor]:
    """The op over a given product and softmax; its gradients are the same whatever they are.

    Args:
        hidden, weight, targets, temperature, chunk_elements: see `headrace.ops`; checked already.
        project: rows [n, D] to logits [n, V] that nobody else holds.
        measure: see there.
    """
    rows = max(1, chunk_elements // max(1, weight.shape[0]))
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(  # pyright: ignore[reportReturnType]  # of `apply`
        hidden, weight, targets, project, measure, temperature, rows, differentiable
    )


def _measure(z: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    highest = z.amax(-1, keepdim=True)
    chosen = z.gather(-1, targets[:, None])[:, 0]
    exponentials = z.sub_(highest).exp()
    total = exponentials.sum(-1)
    log_total = total.log()
    normalizers = log_total + highest[:, 0]
    if kept is not None:
        # Before the product below reuses the buffer.
        kept.copy_(exponentials / total[:, None])
    entropies = log_total - exponentials.mul_(z).sum(-1) / total
    return chosen - normalizers, entropies, normalizers


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        project: Callable[[Tensor], Tensor],
        measure: Measure,
        temperature: float,
        rows: int,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        keep = differentiable and 0 < count <= rows
        logprobs, entropies, normalizers = torch.empty(3, count).unbind()
        logits = hidden.new_empty(0)
        for begin in range(0, count, rows):
            logits = project(hidden[begin : begin + rows])
            for part in _row_blocks(logits):
                place = slice(begin + part.start, begin + part.stop)
                logprobs[place], entropies[place], normalizers[place] = measure(
                    _widen(logits[part], temperature),
                    targets[place],
                    logits[part] if keep else None,
                )
        saved = logits if keep else normalizers
        ctx.save_for_backward(hidden, weight, targets, saved, logprobs)
        ctx.temperature, ctx.rows, ctx.kept = temperature, rows, keep
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, saved, logprobs = ctx.saved_tensors
        gradients = _projection_gradients(
            *(hidden, weight, targets, saved, logprobs, grads[0]),
            temperature=ctx.temperature,
            rows=ctx.rows,
            kept=ctx.kept,
            wanted=ctx.needs_input_grad[:2],
        )
        return *gradients, None, None, None, None, None, None


def _projection_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    saved: Tensor,
    logprobs: Tensor,
    grad: Tensor,
    *,
    temperature: float,
    rows: int,
    kept: bool,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden [N, D] and weight [V, D], whichever are wanted.

    Args:
        hidden, weight, targets, temperature: of the forward.
        saved: the probabilities [N, V] if `kept`, else the normaliser of each row, [N].
        logprobs: [N], the forward's result; grad: [N], its gradient.
        rows: of a chunk; `kept` only where one chunk holds all.
        wanted: which of the two.
    """
    scaled = grad / temperature
    # 1 - p of the target, without the cancellation when p is close to 1.
    at_target = -torch.expm1(logprobs) * scaled
    count = hidden.shape[0]
    d_hidden = torch.empty_like(hidden) if wanted[0] else None
    single = count <= rows
    d_weight = None
    if wanted[1] and not single:
        # Chunks are summed in float32, or the sum would be rounded once per chunk.
        d_weight = torch.zeros(weight.shape, dtype=torch.float32)
    for begin in range(0, count, rows):
        chunk = slice(begin, min(begin + rows, count))
        logits = torch.empty_like(saved) if kept else hidden[chunk] @ weight.t()
        for part in _row_blocks(logits):
            place = slice(begin + part.start, begin + part.stop)
            if kept:
                # A new tensor: what was kept serves another backward, too.
                gradient = saved[part] * -scaled[place, None]
            else:
                z = _widen(logits[part], temperature)
                gradient = z.sub_(saved[place, None]).exp_().mul_(-scaled[place, None])
            gradient.scatter_(1, targets[place, None], at_target[place, None])
            logits[part] = gradient
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if wanted[1]:
            if single:
                d_weight = logits.t() @ hidden
            elif d_weight is not None and hidden.dtype == torch.float32:
                d_weight.addmm_(logits.t(), hidden[chunk])
            elif d_weight is not None:
                d_weight += logits.t() @ hidden[chunk]
    if wanted[1]:
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
    return d_hidden, d_weight


def _widen(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy of the logits, divided by the temperature."""
    if logits.dtype == torch.float32:
        return logits / temperature
    return logits.float().div_(temperature)


def _row_blocks(logits: Tensor) -> list[slice]:
    """Row ranges that are widened at once."""
    count, vocabulary = logits.shape
    rows = max(1, _BLOCK_ELEMENTS // max(1, vocabulary))
    return [slice(a, min(a + rows, count)) for a in range(0, count, rows)]


register("linear_cross_entropy", "cpu", linear_cross_entropy)
