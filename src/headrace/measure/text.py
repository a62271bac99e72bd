"""Bits per byte of held-out text: what a tokenizer cannot flatter.

Every document is read in windows of a fixed context; each token but a window's first is predicted
from what stands before it in the window. The bits of all predicted tokens are divided by the bytes
they spell, so models with different tokenizers compare.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from headrace.data.documents import Document
from headrace.model.causal import CausalAttend
from headrace.model.decoder import Decoder
from headrace.ops import Layout, linear_cross_entropy

_TOKENS_PER_FORWARD = 4096


class TextEncoder(Protocol):
    """The part of a tokenizer that is needed."""

    def encode_text(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int] | int) -> str: ...


class TextScore(NamedTuple):
    """Result of `bits_per_byte`.

    Attributes:
        bits_per_byte: mean information of a byte.
        tokens: predicted tokens; text_bytes: bytes they spell.
        nats_per_token: mean negative log-likelihood.
    """

    bits_per_byte: float
    tokens: int
    text_bytes: int
    nats_per_token: float


@torch.no_grad()
def bits_per_byte(
    model: Decoder,
    tokenizer: TextEncoder,
    documents: Iterable[Document],
    *,
    context: int,
    max_bytes: int,
    prefix: Sequence[int] = (),
) -> TextScore:
    """Score about `max_bytes` bytes of text.

    Args:
        documents: held-out text.
        context: tokens of a window, the prefix included.
        prefix: ids every window starts with, as documents did in training.

    Raises:
        ValueError: nothing to predict.
    """
    step = context - len(prefix)
    windows: list[list[int]] = []
    text_bytes = 0
    for document in documents:
        ids = tokenizer.encode_text(document.text)
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            # Without a prefix nothing predicts a window's first token, so its bytes do not count.
            predicted = piece if prefix else piece[1:]
            if not predicted:
                continue
            windows.append([*prefix, *piece])
            text_bytes += len(tokenizer.decode(predicted).encode("utf-8", "replace"))
            if text_bytes >= max_bytes:
                break
        if text_bytes >= max_bytes:
            break
    if not windows:
        raise ValueError("bits_per_byte: the text holds no token to predict")
    nats, tokens = 0.0, 0
    skipped = max(len(prefix), 1)
    for batch in _batches(windows):
        layout = Layout.packed([len(w) for w in batch])
        ids = torch.tensor([i for w in batch for i in w])
        hidden = model(ids[None], layout.positions(len(ids))[None], CausalAttend(layout))[0]
        targets = torch.tensor(
            [
                start + offset
                for start, w in zip(layout.query_start, batch, strict=True)
                for offset in range(skipped, len(w))
            ]
        )
        logprobs, _ = linear_cross_entropy(hidden[targets - 1], model.output_weight, ids[targets])
        nats -= float(logprobs.double().sum())
        tokens += targets.numel()
    return TextScore(nats / math.log(2) / text_bytes, tokens, text_bytes, nats / tokens)


def _batches(windows: Sequence[list[int]]) -> Iterable[list[list[int]]]:
    batch: list[list[int]] = []
    size = 0
    for window in windows:
        if batch and size + len(window) > _TOKENS_PER_FORWARD:
            yield batch
            batch, size = [], 0
        batch.append(window)
        size += len(window)
    if batch:
        yield batch
