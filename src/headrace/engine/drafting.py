"""Guesses at the next tokens of running sequences, from the model's own prediction layer.

After a pass the layer reads the new hidden states, each with the token that followed it, and keeps
latents of its own in one more layer of the cache. Its last row then guesses a token, and feeding
the guess back at the next position gives another. So several steps use one set of rows, those of
the first step: what deployments of such models do, since a cache per step would multiply its work
on every token. Guesses only decide how many passes a text takes, never what it says.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.cache.paged import PagedBatch, PagedCache, block_tables
from headrace.engine.sequence import Sequence
from headrace.model.decoder import Decoder


class Computed(NamedTuple):
    """Tokens of one sequence that the last pass computed and that stand.

    Attributes:
        sequence: whose; it knows the token after each of them.
        start: position of the first.
        hidden: [rows, D], their hidden states.
        depth: how many tokens to draft after them; 0 only keeps the layer's cache complete.
    """

    sequence: Sequence
    start: int
    hidden: Tensor
    depth: int


class Drafter:
    """Drafts with step 0 of the model's prediction layers, over and over.

    Args:
        model: has prediction layers.
        cache: holds one layer more than the model.
        logits: hidden states [n, D] to logits [n, V].
    """

    def __init__(
        self, model: Decoder, cache: PagedCache, logits: Callable[[Tensor], Tensor]
    ) -> None:
        self._model = model
        self._cache = cache
        self._logits = logits

    def draft(self, parts: list[Computed]) -> None:
        """Set `drafts` of every part's sequence, as far as it has blocks for their positions."""
        if not parts:
            return
        starts, counts = [p.start for p in parts], [len(p.hidden) for p in parts]
        ids = [
            int(i)
            for part, count in zip(parts, counts, strict=True)
            for i in part.sequence.tokens[part.start + 1 : part.start + 1 + count]
        ]
        hidden = self._step(parts, starts, counts, torch.cat([p.hidden for p in parts]), ids)
        last = torch.tensor(counts).cumsum(0) - 1
        size = self._cache.block_tokens
        open_ = [i for i, part in enumerate(parts) if part.depth > 0]
        hidden = hidden[last[open_]]
        ends = [starts[i] + counts[i] for i in open_]
        step = 0
        while open_:
            guesses = self._logits(hidden).argmax(-1).tolist()
            for i, guess in zip(open_, guesses, strict=True):
                parts[i].sequence.drafts.append(guess)
            step += 1
            going = [
                k
                for k, i in enumerate(open_)
                if parts[i].depth > step and ends[k] < len(parts[i].sequence.blocks) * size
            ]
            if not going:
                return
            open_, positions = [open_[k] for k in going], [ends[k] for k in going]
            hidden = self._step(
                [parts[i] for i in open_],
                positions,
                [1] * len(open_),
                hidden[going],
                [guesses[k] for k in going],
            )
            ends = [position + 1 for position in positions]

    def _step(
        self,
        parts: list[Computed],
        starts: list[int],
        counts: list[int],
        hidden: Tensor,
        ids: list[int],
    ) -> Tensor:
        """One pass of the layer over rows [S, D] of these sequences, with the tokens after them."""
        tables = block_tables([part.sequence.blocks for part in parts])
        batch = PagedBatch.of(starts, counts, tables, self._cache.block_tokens)
        self._cache.begin(batch)
        following = torch.tensor(ids)[None]
        return self._model.mtp_forward(
            0, hidden[None], following, batch.positions[None], self._cache
        )[0]
