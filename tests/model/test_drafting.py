"""Acceptance of drafts against a speculative decoding that really feeds its own drafts."""

import pytest
import torch
from torch import Tensor

from headrace.model.config import MtpConfig
from headrace.model.decoder import Decoder
from headrace.model.drafting import accepted_drafts, play_rounds
from headrace.model.presets import preset

PROMPT, TOKENS = 5, 40


def new_model(depth: int, *, shared: bool, sparse: bool, seed: int) -> Decoder:
    """Few tokens, so that drafts of random weights are right now and then."""
    indexer = {"num_heads": 2, "head_dim": 16, "topk": 6} if sparse else None
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "max_positions": 64}
    mtp = MtpConfig(depth, shared=shared)
    shape |= {"indexer": indexer, "moe": None, "mtp": mtp, "tie_embeddings": False}
    model = Decoder(preset("glm5-tiny", 2, **shape))
    model.init_weights(seed)
    with torch.no_grad():
        # As initialised, every text would soon repeat one token.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def greedy_ids(model: Decoder, ids: list[int]) -> list[int]:
    """What the main model says after each of `ids`."""
    return model.logits(model(torch.tensor([ids])))[0].argmax(-1).tolist()


def drafts_after(model: Decoder, known: list[int], steps: int) -> list[int]:
    """One round's drafts, each step reading those before it."""
    read = len(known) - 1
    hidden = model(torch.tensor([known[:read]]))
    drafts: list[int] = []
    for step in range(steps):
        next_ids = [*known, *drafts][step + 1 : step + 1 + read]
        hidden = model.mtp_forward(step, hidden, torch.tensor([next_ids]))
        drafts.append(int(model.logits(hidden)[0, -1].argmax()))
    return drafts


@torch.no_grad()
def decode_speculatively(model: Decoder, prompt: list[int], steps: int) -> tuple[Tensor, list[int]]:
    """The text, at least TOKENS long, and how many drafts each round kept."""
    known = [*prompt, greedy_ids(model, prompt)[-1]]
    kept = []
    while len(known) < TOKENS:
        drafts = drafts_after(model, known, steps)
        said = greedy_ids(model, [*known, *drafts])[len(known) - 1 :]
        right = 0
        while right < steps and drafts[right] == said[right]:
            right += 1
        kept.append(right)
        known += said[: right + 1]
    return torch.tensor([known]), kept


@pytest.mark.parametrize(("depth", "shared"), [(3, True), (3, False), (1, True)])
def test_parallel_pass_equals_decoding_with_own_drafts(depth: int, shared: bool) -> None:
    steps = 4
    seen = set()
    for seed in (0, 4):
        model = new_model(depth, shared=shared, sparse=False, seed=seed)
        prompt = torch.randint(2, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        text, kept = decode_speculatively(model, prompt, steps)
        accepted = accepted_drafts(model, text, PROMPT, steps)
        rounds = play_rounds(accepted, steps)
        # The last rounds draft past the text's end and are not judged.
        assert kept[: rounds.rounds] == rounds_kept(accepted[0].tolist())
        assert len(kept) - rounds.rounds <= steps
        assert sum(rounds.kept) == sum(kept[: rounds.rounds])
        seen |= set(kept)
    assert len(seen) >= 4, "too few different outcomes to tell anything"


def rounds_kept(accepted: list[int]) -> list[int]:
    kept, position = [], 0
    while position < len(accepted):
        kept.append(accepted[position])
        position += accepted[position] + 1
    return kept


def test_later_steps_of_a_sparse_model_share_the_selection() -> None:
    model = new_model(3, shared=True, sparse=True, seed=1)
    ids = torch.randint(2, (2, 24), generator=torch.Generator().manual_seed(2))
    together = accepted_drafts(model, ids, PROMPT, 4)
    assert together.shape == (2, 24 - PROMPT - 4)
    # A text's drafts depend on that text alone and on no token after those that are judged.
    for row in range(2):
        longer = torch.cat((ids[row : row + 1], torch.tensor([[1, 1, 0]])), dim=1)
        alone = accepted_drafts(model, longer, PROMPT, 4)
        assert torch.equal(alone[0, : together.shape[1]], together[row])


def test_rounds_advance_by_what_they_accept() -> None:
    # Rounds at 0 (accepts 2), 3 (0), 4 (1) of the first text and at 0, 1 of the second.
    accepted = torch.tensor([[2, 9, 9, 0, 1, 9], [0, 4, 9, 9, 9, 9]])
    rounds = play_rounds(accepted, 4)
    assert rounds.rounds == 5
    assert rounds.tried == (5, 3, 2, 1)
    assert rounds.kept == (3, 2, 1, 1)
    assert rounds.acceptance_length == pytest.approx(1 + 7 / 5)
    assert rounds.rates == pytest.approx((3 / 5, 2 / 3, 1 / 2, 1.0))


def test_bad_input_is_refused() -> None:
    model = new_model(1, shared=True, sparse=False, seed=0)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    assert accepted_drafts(model, ids, PROMPT, 3).shape == (1, 1)
    for prompt_length, steps in ((PROMPT, 4), (0, 2), (PROMPT, 0)):
        with pytest.raises(ValueError, match="accepted_drafts"):
            accepted_drafts(model, ids, prompt_length, steps)
    with pytest.raises(ValueError, match="no position"):
        play_rounds(torch.zeros(1, 0, dtype=torch.int64), 4)
