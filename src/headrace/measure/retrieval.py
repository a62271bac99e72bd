"""Retrieval accuracy: can the model name a fact that was hidden in a long context?

An example counts as right when the model's greedy continuation is the answer, token for token;
reading the answer's own tokens tells the same with one forward pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.data.retrieval import RetrievalWriter
from headrace.model.causal import CausalAttend, Mode
from headrace.model.decoder import Decoder
from headrace.ops import Layout

_TOKENS_PER_FORWARD = 4096


class RetrievalScore(NamedTuple):
    """Right answers of `examples` at one length and number of keys."""

    length: int
    keys: int
    right: int
    examples: int


@torch.no_grad()
def retrieval_accuracy(
    model: Decoder,
    writer: RetrievalWriter,
    *,
    length: int,
    keys: int,
    examples: int,
    seed: int = 0,
    prefix: Sequence[int] = (),
    mode: Mode = "auto",
) -> RetrievalScore:
    """Ask about held-out keys; the asked fact's depth is spread evenly over the context.

    Args:
        length: tokens of an example, the prefix included.
        keys: facts in the context.
        mode: see `CausalAttend`.
    """
    right = 0
    per_forward = max(1, _TOKENS_PER_FORWARD // length)
    found = [
        writer.example(
            seed + i,
            length - len(prefix),
            keys,
            split="held_out",
            depth=(i + 0.5) / examples,
        )
        for i in range(examples)
    ]
    for start in range(0, examples, per_forward):
        batch = found[start : start + per_forward]
        rows = [[*prefix, *example.ids.tolist()] for example in batch]
        layout = Layout.packed([len(row) for row in rows])
        ids = torch.tensor([i for row in rows for i in row])
        hidden = model(ids[None], layout.positions(len(ids))[None], CausalAttend(layout, mode))[0]
        for first, example in zip(layout.query_start, batch, strict=True):
            begin, end = example.answers[-1]
            begin, end = begin + first + len(prefix), end + first + len(prefix)
            guesses = model.logits(hidden[begin - 1 : end - 1]).argmax(-1)
            right += bool((guesses == ids[begin:end]).all())
    return RetrievalScore(length, keys, right, examples)
