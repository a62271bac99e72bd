"""How many drafted tokens speculative decoding would accept, without decoding speculatively.

A round of greedy speculative decoding knows the text up to token t + 1, drafts some tokens beyond
it with the prediction layers, and keeps those that are what the main model says itself. The inputs
of a chain of drafts are the text's own tokens up to the first mismatch, and what follows a mismatch
is thrown away; so one parallel pass per step over a finished greedy text tells what every round at
every position would accept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.model.causal import CausalAttend
from headrace.model.decoder import Decoder


class DraftRounds(NamedTuple):
    """What rounds of up to `len(tried)` drafts came to.

    Attributes:
        rounds: number of them, one pass of the main model each.
        tried: per step, the rounds in which every draft before it was accepted.
        kept: per step, the rounds in which it was accepted too.
    """

    rounds: int
    tried: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round: the accepted drafts and the one the main model gives anyway."""
        return 1 + sum(self.kept) / self.rounds

    @property
    def rates(self) -> tuple[float, ...]:
        """Per step, how often it is accepted where it counts; nan where it never does."""
        return tuple(
            kept / tried if tried else float("nan")
            for kept, tried in zip(self.kept, self.tried, strict=True)
        )


@torch.no_grad()
def accepted_drafts(model: Decoder, ids: Tensor, prompt_length: int, steps: int) -> Tensor:
    """Drafts accepted in a round at each position of texts that the model wrote greedily.

    Worked example, prompt a b, text a b c d e f g, 2 steps: at b (the main model has just said c)
    the steps draft d and e; 2 says that both are right, 1 that only d is, 0 that d is not. Rounds
    are judged at b, c and d; later ones would draft past the end.

    Args:
        model: with prediction layers; steps beyond the trained depth use the last one again.
        ids: int64 [B, T], prompt and greedy continuation.
        prompt_length: tokens of every prompt, >= 1.
        steps: drafts of a round, >= 1.

    Returns:
        int64 [B, R] in [0, steps], R = T - prompt_length - steps, for positions from the prompt's
        last on.

    Raises:
        ValueError: no prediction layers, no step, or no position to judge.
    """
    tokens = ids.shape[1]
    count = tokens - prompt_length - steps
    if prompt_length < 1 or steps < 1 or count < 1:
        raise ValueError(
            f"accepted_drafts: {tokens} tokens, prompt_length {prompt_length}, steps {steps}; "
            "each at least 1, and a token more than prompt and drafts needed"
        )
    first = prompt_length - 1
    attend = CausalAttend()
    hidden = model(ids, attend=attend)
    accepted = torch.ones(ids.shape[0], count, dtype=torch.bool, device=ids.device)
    total = torch.zeros_like(accepted, dtype=torch.int64)
    for step in range(steps):
        # Past the end any id will do: causal attention keeps it from all that is judged.
        next_ids = torch.cat((ids[:, step + 1 :], ids.new_zeros(ids.shape[0], step + 1)), dim=1)
        hidden = model.mtp_forward(step, hidden, next_ids, attend=attend)
        drafts = model.logits(hidden[:, first : first + count]).argmax(-1)
        accepted &= drafts == ids[:, first + step + 2 : first + step + 2 + count]
        total += accepted
    return total


def play_rounds(accepted: Tensor, steps: int) -> DraftRounds:
    """Decode every text in rounds, each going on where the one before it ended.

    Args:
        accepted: int64 [B, R], see `accepted_drafts`.
        steps: drafts of a round.

    Raises:
        ValueError: nothing to decode.
    """
    if accepted.numel() == 0:
        raise ValueError("play_rounds: no position to start a round at")
    by_count = [0] * (steps + 1)
    for row in accepted.tolist():
        position = 0
        while position < len(row):
            by_count[row[position]] += 1
            position += row[position] + 1
    at_least = [sum(by_count[n:]) for n in range(steps + 1)]
    return DraftRounds(at_least[0], tuple(at_least[:-1]), tuple(at_least[1:]))
