"""Keeping experts busy: the sequence-wise balance loss and the router's selection bias.

The bias does the balancing without a gradient; the loss, with a tiny weight, keeps single documents
from leaning on few experts. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

import torch
from torch import Tensor

from headrace.ops.layout import Layout


def balance_loss(scores: Tensor, experts_per_token: int, layout: Layout) -> Tensor:
    """Sum over documents of (tokens T_d) * sum_i f_i P_i, equations 17 to 20 without alpha.

    f_i = E / (K T) * (tokens of the document that have expert i among their K best scores) and
    P_i = 1/T * sum_t s_it / sum_j s_jt. The selection bias takes no part. Perfect balance gives 1
    per token. Weighting a document by its tokens makes the sum over a batch, divided by the batch's
    tokens, independent of how documents are packed (law L14).

    Args:
        scores: [N, E] router affinities after the sigmoid, > 0, with gradient.
        experts_per_token: K.
        layout: the documents, as query rows; rows of no document count as nothing.

    Returns:
        Scalar float32 (float64 for float64 input).
    """
    rows, experts = scores.shape
    if not 0 < experts_per_token <= experts:
        raise ValueError(f"balance_loss: {experts_per_token} experts per token of {experts}")
    scores = scores if scores.dtype == torch.float64 else scores.float()
    documents, lengths = _documents(layout, rows, scores.device)
    with torch.no_grad():
        chosen = torch.zeros_like(scores)
        chosen.scatter_(1, scores.topk(experts_per_token, dim=-1).indices, 1.0)
    normalised = scores / scores.sum(-1, keepdim=True)
    shape = (layout.num_sequences + 1, experts)
    counts = scores.new_zeros(shape).index_add_(0, documents, chosen)[:-1]
    shares = scores.new_zeros(shape).index_add(0, documents, normalised)[:-1]
    per_document = (counts * shares).sum(-1) / lengths.to(scores.dtype)
    return per_document.sum() * (experts / experts_per_token)


def updated_router_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """bias + rate * sign(mean load - load): busy experts become less attractive.

    Args:
        bias: float32 [E].
        load: [E] tokens sent to each expert, summed over the whole batch.
        rate: >= 0.
    """
    load = load.to(torch.float64)
    return bias + rate * torch.sign(load.mean() - load).to(bias.dtype)


def _documents(layout: Layout, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Document of every row (the number of documents for padding), and their lengths, >= 1."""
    documents = torch.full((rows,), layout.num_sequences, dtype=torch.int64)
    for index, (start, length) in enumerate(
        zip(layout.query_start, layout.query_length, strict=True)
    ):
        documents[start : start + length] = index
    lengths = torch.tensor(layout.query_length, dtype=torch.int64).clamp(min=1)
    return documents.to(device), lengths.to(device)
