"""Which drafted tokens may stand, so that the output is distributed as if nothing had been drafted.

A prediction layer guesses k tokens, and the model computes its distributions at all k + 1 positions
in one pass. Every position is then sampled as ever, with the number that the request's seed and its
index give: `SamplingBatch.sample` over k + 1 rows, each with the guesses before it as its history.
A guess stands while it equals what was drawn in its place, and what was drawn behind the first that
does not is thrown away. So the tokens are those of plain decoding, one by one.

That is rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) with
proposals that are certain: a guess d stands with probability p(d), and what replaces it has the
distribution of p without d. Guesses drawn at random from known probabilities q would stand more
often, with probability sum(min(p, q)), but the tokens would depend on what was guessed, hence on
what runs beside the request.
"""

from collections.abc import Sequence


def matching_prefix(ids: Sequence[int], drafts: Sequence[int]) -> int:
    """How many first drafts equal what the model drew at their positions."""
    for count, (token, draft) in enumerate(zip(ids, drafts, strict=False)):
        if token != draft:
            return count
    return min(len(ids), len(drafts))
