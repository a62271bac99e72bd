"""Accepted drafts leave the output's distribution as it was, whatever was drafted."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.sampling import SEED_MASK, Lane, SamplingBatch, invert_cdf, uniform
from headrace.engine.speculation import Acceptance, accept_drafts, matching_prefix
from headrace.engine.types import SamplingParams

VOCAB, LENGTH, DEPTH, RUNS = 4, 3, 2, 1500
Rule = Callable[[Tensor, Sequence[int], Tensor | None, int, int], Acceptance]


def chains(temperature: float) -> tuple[Tensor, Tensor]:
    """Target and draft models as [V + 1, V] probabilities after each last token (V: none yet)."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(VOCAB + 1, VOCAB, generator=generator)
    draft = target + torch.randn(VOCAB + 1, VOCAB, generator=generator)
    return torch.softmax(target / temperature, -1), torch.softmax(draft / temperature, -1)


def draw(probabilities: Tensor, seed: int, counter: int, lane: Lane) -> int:
    number = uniform(np.array([seed], np.uint64), np.array([counter], np.uint64), lane)
    return int(invert_cdf(probabilities[None], number[:, None]))


def decode(kind: str, seed: int, target: Tensor, draft: Tensor, rule: Rule) -> tuple[int, ...]:
    """LENGTH tokens by drafting up to DEPTH at a time; more on every other step."""
    tokens = [VOCAB]
    while len(tokens) <= LENGTH:
        drawn, drafts = len(tokens) - 1, []
        for i in range(DEPTH - (drawn + seed) % 2):
            q = draft[[*tokens, *drafts][-1]]
            if kind == "likeliest":
                drafts.append(int(q.argmax()))
            else:
                lane = Lane.TOKEN if kind == "shared" else Lane.DRAFT
                drafts.append(draw(q, seed, drawn + i, lane))
        path = [tokens[-1], *drafts]
        proposals = draft[path[:-1]] if kind == "proposal" else None
        result = rule(target[path], drafts, proposals, seed, drawn)
        tokens += [*drafts[: result.accepted], result.next_id]
    return tuple(tokens[1 : LENGTH + 1])


def tail_probability(sequences: Sequence[tuple[int, ...]], target: Tensor) -> float:
    """Chi-square test of whole sequences against their exact probabilities."""
    statistic, cells, rest_seen, rest_expected = 0.0, 0, len(sequences), float(len(sequences))
    for flat in range(VOCAB**LENGTH):
        sequence = tuple(flat // VOCAB**i % VOCAB for i in range(LENGTH))
        expected = float(len(sequences))
        for last, token in zip((VOCAB, *sequence), sequence, strict=False):
            expected *= float(target[last, token])
        if expected < 5:
            continue
        seen = sequences.count(sequence)
        statistic += (seen - expected) ** 2 / expected
        cells, rest_seen, rest_expected = cells + 1, rest_seen - seen, rest_expected - expected
    if rest_expected > 1:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["likeliest", "shared", "proposal"])
def test_sequences_are_distributed_as_without_drafts(kind: str, temperature: float) -> None:
    target, draft = chains(temperature)
    sequences = [decode(kind, seed, target, draft, accept_drafts) for seed in range(RUNS)]
    assert tail_probability(sequences, target) > 1e-3
    if kind != "proposal":
        plain = [decode("none", seed, target, draft, without_drafts) for seed in range(300)]
        assert sequences[:300] == plain


def without_drafts(
    target: Tensor, drafts: Sequence[int], proposals: Tensor | None, seed: int, drawn: int
) -> Acceptance:
    """Plain decoding through the sampler."""
    batch = SamplingBatch([SamplingParams(max_tokens=1)], [seed], [drawn])
    return Acceptance(0, int(batch.sample(target[:1].log()).ids), (0.0,))


def replacing_from_the_target(
    target: Tensor, drafts: Sequence[int], proposals: Tensor | None, seed: int, drawn: int
) -> Acceptance:
    """A rule that forgets the residual."""
    result = accept_drafts(target, drafts, proposals, seed, drawn)
    if result.accepted == len(drafts):
        return result
    at = result.accepted
    return result._replace(next_id=draw(target[at], seed, drawn + at, Lane.RESIDUAL))


def accepting_by_the_target_alone(
    target: Tensor, drafts: Sequence[int], proposals: Tensor | None, seed: int, drawn: int
) -> Acceptance:
    """A rule that forgets to divide by the proposal."""
    certain = torch.ones_like(target[:-1]) if proposals is None else torch.ones_like(proposals)
    for i, token in enumerate(drafts):
        if accept_drafts(target[i : i + 2], [token], certain[:1], seed, drawn + i).accepted == 0:
            return Acceptance(i, draw(target[i], seed, drawn + i, Lane.RESIDUAL), ())
    last = len(drafts)
    return Acceptance(last, draw(target[last], seed, drawn + last, Lane.TOKEN), ())


@pytest.mark.parametrize("rule", [replacing_from_the_target, accepting_by_the_target_alone])
def test_the_test_notices_a_wrong_rule(rule: Rule) -> None:
    target, draft = chains(1.0)
    sequences = [decode("proposal", seed, target, draft, rule) for seed in range(RUNS)]
    assert tail_probability(sequences, target) < 1e-6


def test_proposals_are_accepted_as_often_as_the_distributions_overlap() -> None:
    target, draft = chains(1.0)
    overlap = float(torch.minimum(target[VOCAB], draft[VOCAB]).sum())
    accepted = 0
    for seed in range(RUNS):
        drafted = draw(draft[VOCAB], seed, 0, Lane.DRAFT)
        result = accept_drafts(target[[VOCAB, drafted]], [drafted], draft[[VOCAB]], seed, 0)
        accepted += result.accepted
    assert 0.3 < overlap < 0.9
    assert abs(accepted / RUNS - overlap) < 4 * (overlap * (1 - overlap) / RUNS) ** 0.5


def test_equal_models_accept_everything() -> None:
    target, _ = chains(1.0)
    for seed in range(200):
        drafts = [draw(target[VOCAB], seed, 5, Lane.DRAFT)]
        drafts.append(draw(target[drafts[0]], seed, 6, Lane.DRAFT))
        rows = target[[VOCAB, *drafts]]
        assert accept_drafts(rows, drafts, rows[:2], seed, 5).accepted == 2
        shared = [draw(target[VOCAB], seed, 5, Lane.TOKEN)]
        assert accept_drafts(rows[[0, 1]], shared, None, seed, 5).accepted == 1


def test_greedy_keeps_the_exact_prefix() -> None:
    rows = torch.eye(5)[[2, 4, 0, 1]] * 0.6 + 0.08
    log = float(rows[0, 2].log())
    for drafts, accepted, next_id in (
        ([2, 4, 0], 3, 1),
        ([2, 4, 1], 2, 0),
        ([3, 4, 0], 0, 2),
    ):
        for proposals in (None, torch.full((3, 5), 0.2)):
            result = accept_drafts(rows, drafts, proposals, 1, 9, greedy=True)
            assert result[:2] == (accepted, next_id)
            assert result.logprobs == pytest.approx([log] * (accepted + 1))
    assert accept_drafts(rows[:1], [], None, 1, 9, greedy=True)[:2] == (0, 2)


def test_logprobs_are_the_targets() -> None:
    target, draft = chains(1.0)
    refused = 0
    for seed in range(50):
        drafts = [draw(draft[VOCAB], seed, 0, Lane.DRAFT)]
        rows = target[[VOCAB, *drafts]]
        result = accept_drafts(rows, drafts, draft[[VOCAB]], seed, 0)
        tokens = [*drafts[: result.accepted], result.next_id]
        want = [float(rows[i, token].log()) for i, token in enumerate(tokens)]
        assert result.logprobs == pytest.approx(want, abs=1e-6)
        refused += result.accepted == 0
    assert 0 < refused < 50


def test_rows_of_one_request_draw_what_successive_steps_draw() -> None:
    """What an engine does with predictions: k + 1 rows of one batch, each with its own history."""
    torch.manual_seed(5)
    params = SamplingParams(
        max_tokens=9, temperature=0.9, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.4
    )
    prompt, seed, logits = [1, 2, 3], SEED_MASK, torch.randn(4, 60) * 2
    stepwise = SamplingBatch([params], [seed], [0], [prompt], [[]])
    plain = [stepwise.sample(row[None]) for row in logits]
    ids = [int(step.ids) for step in plain]
    drafts = [*ids[:2], (ids[2] + 1) % 60]
    verifying = SamplingBatch(
        [params] * 4, [seed] * 4, range(4), [prompt] * 4, [drafts[:i] for i in range(4)]
    ).sample(logits)
    accepted = matching_prefix(verifying.ids.tolist(), drafts)
    assert accepted == 2
    assert verifying.ids[: accepted + 1].tolist() == ids[:3]
    assert verifying.logprobs[:3].tolist() == [float(step.logprobs) for step in plain[:3]]


def test_wrong_shapes_and_impossible_drafts_are_refused() -> None:
    target, draft = chains(1.0)
    with pytest.raises(ValueError, match=r"2 drafts need target probabilities \[3, V\]"):
        accept_drafts(target[:2], [0, 1], None, 0, 0)
    with pytest.raises(ValueError, match="draft probabilities are"):
        accept_drafts(target[:2], [0], draft[:2], 0, 0)
    impossible = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="draft 0 is id 2, which has probability 0"):
        accept_drafts(target[:2], [2], impossible, 0, 0)
