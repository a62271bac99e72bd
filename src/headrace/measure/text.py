"""Bits per byte of held-out text: what a tokenizer cannot flatter.

Every document is read in windows of a fixed context; each token is predicted from what stands
before it in its window. The bits of all predicted tokens are divided by the bytes they spell, so
models with different tokenizers compare. Bytes are counted in the text itself: a window may end
inside a character, and half a character cannot be decoded.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from headrace.data.documents import Document
from headrace.errors import UserError
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
    """Score up to `max_bytes` bytes of text.

    Args:
        documents: held-out text.
        context: tokens of a window, the prefix included.
        prefix: ids every window starts with, as documents did in training. Without any, a window
            starts with the token before it, and a document's first token is not predicted.

    Raises:
        UserError: the context has no room, or there is nothing to predict.
    """
    if context < len(prefix) + 2:
        raise UserError(
            f"bits per byte: a context of {context} tokens has no room for text; "
            f"make it at least {len(prefix) + 2}"
        )
    windows: list[list[int]] = []
    text_bytes = 0
    for document in documents:
        if text_bytes >= max_bytes:
            break
        found, count = _windows(tokenizer, document.text, context, max_bytes - text_bytes, prefix)
        windows += found
        text_bytes += count
    if not windows:
        raise UserError(
            "bits per byte: the held-out text holds no token to predict; "
            "raise held_out of its [data] table or give more text"
        )
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


def _windows(
    tokenizer: TextEncoder, text: str, context: int, max_bytes: int, prefix: Sequence[int]
) -> tuple[list[list[int]], int]:
    """Windows of the text's first `max_bytes` bytes, and how many bytes they predict."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > max_bytes:
        encoded = encoded[:max_bytes]
        text = encoded.decode("utf-8", "ignore")
        encoded = text.encode("utf-8")
    ids = tokenizer.encode_text(text)
    if prefix:
        step = context - len(prefix)
        windows = [[*prefix, *ids[start : start + step]] for start in range(0, len(ids), step)]
        return windows, len(encoded)
    # What stays unpredicted has to be whole characters, or its bytes could not be told.
    first = next(
        (n for n in range(1, len(ids)) if text.startswith(tokenizer.decode(ids[:n]))), len(ids)
    )
    if first == len(ids):
        return [], 0
    unpredicted = len(tokenizer.decode(ids[:first]).encode("utf-8"))
    windows = [
        ids[start : start + context] for start in range(first - 1, len(ids) - 1, context - 1)
    ]
    return windows, len(encoded) - unpredicted


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
