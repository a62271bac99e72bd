"""Next-token loss and the token log-probabilities every other objective starts from.

Works on selected positions only, so that the [N, V] logits of unneeded tokens never exist, and in
chunks, so that they never exist all at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.ops import linear_cross_entropy

CHUNK_ELEMENTS = 1 << 25
"""Most logits (rows times vocabulary) alive at once: 128 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Tensor | Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of its distribution.

    Args:
        hidden: [N, D] final hidden states, each at the position before its target.
        targets: [N] token ids.
        head: weight [V, D] of the output projection, which takes the fused op and is faster; or
            a function from [n, D] to logits [n, V].
        temperature: logits are divided by it, as the sampler did; > 0.

    Returns:
        logprobs [N] float32 with gradient, entropies [N] float32 in nats without.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be positive")
    if isinstance(head, Tensor):
        return linear_cross_entropy(
            hidden, head, targets, temperature=temperature, chunk_elements=CHUNK_ELEMENTS
        )

    def score(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(head(rows).float() / temperature, dim=-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, ids[:, None])[:, 0], entropy

    if hidden.shape[0] == 0:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty
    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    chunk = max(1, CHUNK_ELEMENTS // vocabulary)
    if hidden.shape[0] <= chunk:
        return score(hidden, targets)
    parts = [
        # Recomputed in the backward pass: storing every chunk's logits would undo the chunking.
        checkpoint(score, rows, ids, use_reentrant=False)
        for rows, ids in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def weighted_nll(logprobs: Tensor, weights: Tensor, normalizer: float) -> Tensor:
    """Sum of -logprob times weight over `normalizer`.

    The normalizer is the whole batch's weight sum, not this micro-batch's, so that the loss does
    not depend on how the batch was cut up (law L14).

    Args:
        logprobs: [N]; weights: [N] >= 0; normalizer: > 0.
    """
    return -(logprobs * weights).sum() / normalizer
