"""Drafts leave the output's distribution as it was: the engine against exact probabilities."""

from collections.abc import Sequence

import pytest
import torch
from engine_harness import ask, drain, full_logits, latent_model, new_core, output

from headrace.engine import core as core_module
from headrace.engine.sampling.batch import SEED_MASK, SamplingBatch
from headrace.engine.speculation import matching_prefix
from headrace.engine.types import SamplingParams
from headrace.model.config import MtpConfig
from headrace.model.decoder import Decoder

torch.set_num_threads(1)

VOCAB, LENGTH, RUNS = 4, 4, 1500
PROMPT = (1, 2)


def small_model() -> Decoder:
    """Four tokens, of which several are likely, and a layer that guesses one of them."""
    model = latent_model("glm_moe_dsa", 3, vocab_size=VOCAB, mtp=MtpConfig(depth=2, shared=True))
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
    return model


def exact(model: Decoder, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*ids, token): p * float(q)
            for ids, p in found.items()
            for token, q in enumerate(
                torch.softmax(full_logits(model, (*PROMPT, *ids))[-1].double() / temperature, -1)
            )
        }
    return found


def sampled(model: Decoder, temperature: float, drafts: int) -> list[tuple[int, ...]]:
    core = new_core(model, max_running=50, max_context=16, max_waiting=RUNS, draft_tokens=drafts)
    for seed in range(RUNS):
        core.add(ask(str(seed), PROMPT, max_tokens=LENGTH, temperature=temperature, seed=seed))
    results = drain(core, limit=40_000)
    if drafts:
        # Both happen often, else this shows nothing.
        assert core.stats().tokens_accepted > RUNS / 2
        assert core.stats().tokens_drafted - core.stats().tokens_accepted > RUNS / 2
    return [output(results[str(seed)]) for seed in range(RUNS)]


def tail_probability(
    sequences: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> float:
    """Chi-square test of whole sequences against their exact probabilities."""
    statistic, cells, rest_seen, rest_expected = 0.0, 0, len(sequences), float(len(sequences))
    for ids, probability in expected.items():
        wanted = probability * len(sequences)
        if wanted < 5:
            continue
        seen = sequences.count(ids)
        statistic += (seen - wanted) ** 2 / wanted
        cells, rest_seen, rest_expected = cells + 1, rest_seen - seen, rest_expected - wanted
    if rest_expected > 1:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_outputs_are_distributed_as_without_drafts(temperature: float) -> None:
    model = small_model()
    drafted = sampled(model, temperature, drafts=2)
    assert tail_probability(drafted, exact(model, temperature)) > 1e-3
    assert drafted == sampled(small_model(), temperature, drafts=0)


def test_the_test_notices_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Lets every other first guess stand whatever was drawn."""
        wrong = bool(drafts) and sum(ids) % 2 == 0
        if wrong:
            return 1
        return matching_prefix(ids, drafts)

    model = small_model()
    monkeypatch.setattr(core_module, "matching_prefix", lenient)
    assert tail_probability(sampled(model, 1.0, drafts=2), exact(model, 1.0)) < 1e-6


def test_rows_of_one_request_draw_what_successive_steps_draw() -> None:
    """k + 1 rows of one batch, each with its own history."""
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


def test_a_guess_stands_up_to_the_first_that_does_not() -> None:
    assert matching_prefix([2, 4, 0, 1], [2, 4, 0]) == 3
    assert matching_prefix([2, 4, 0, 1], [2, 3, 0]) == 1
    assert matching_prefix([2], []) == 0
