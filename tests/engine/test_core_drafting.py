"""Speculative decoding: the tokens of plain decoding, in fewer passes."""

import random
from collections.abc import Sequence

import pytest
import torch
from engine_harness import (
    Oracle,
    ask,
    drain,
    greedy_reference,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
)

from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import MtpConfig
from headrace.model.decoder import Decoder

torch.set_num_threads(1)

KINDS = ("glm_moe_dsa", "deepseek_v32", "deepseek_v3")


def drafting_model(kind: str, seed: int = 0) -> Decoder:
    """A model whose prediction layer guesses right now and then."""
    model = latent_model(kind, seed, mtp=MtpConfig(depth=3, shared=True))
    with torch.no_grad():
        # Texts of a random model that attends weakly soon go round in circles, which is learnable
        # enough for its layer to be right sometimes and wrong sometimes.
        model.embed.weight.mul_(2.0)
    return model


def run(
    model: Decoder, requests: Sequence[GenerationRequest], **config: object
) -> tuple[EngineCore, dict[str, GenerationResult]]:
    core = new_core(model, **config)
    for request in requests:
        core.add(request)
    return core, drain(core)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(kind: str) -> None:
    model = drafting_model(kind)
    requests = [
        ask(f"r{i}", random_prompt(i, length), max_tokens=n)
        for i, (length, n) in enumerate([(5, 9), (40, 3), (1, 17), (23, 30), (60, 8), (2, 1)])
    ]
    core, results = run(model, requests, draft_tokens=3, prefill_tokens=16)
    for request in requests:
        want = greedy_reference(model, request.prompt_ids, request.sampling.max_tokens)
        assert output(results[request.id]) == want, request.id
    stats = core.stats()
    assert stats.tokens_drafted > 0
    assert stats.tokens_drafted == sum(r.drafted_tokens for r in results.values())
    assert stats.tokens_accepted == sum(r.accepted_tokens for r in results.values())


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 9},
    ],
)
def test_sampled_tokens_and_logprobs_are_those_of_plain_decoding(
    sampling: dict[str, float],
) -> None:
    model = drafting_model("glm_moe_dsa")
    requests = [
        ask(f"r{i}", random_prompt(i, 6 + 7 * i), max_tokens=25, seed=i, stop_ids=(3,), **sampling)  # type: ignore[arg-type]  # a test's shorthand
        for i in range(5)
    ]
    _, plain = run(model, requests)
    core, drafted = run(model, requests, draft_tokens=4)
    assert core.stats().tokens_drafted > 0
    for name, want in plain.items():
        assert output(drafted[name]) == output(want)
        assert drafted[name].finish_reason is want.finish_reason
        assert logprobs(drafted[name]) == pytest.approx(logprobs(want), abs=1e-4)
        assert drafted[name].raw_logprobs == pytest.approx(want.raw_logprobs, abs=1e-4)


def test_right_drafts_save_passes() -> None:
    model = drafting_model("glm_moe_dsa")
    prompts = {f"r{i}": random_prompt(i, 9 + 5 * i) for i in range(3)}
    core = new_core(model, draft_tokens=4)
    core._drafter = Oracle(model, prompts, 40)  # type: ignore[assignment]  # a stand-in
    for name, prompt in prompts.items():
        core.add(ask(name, prompt, max_tokens=30))
    passes = 0

    def count(_: int) -> None:
        nonlocal passes
        passes += 1

    results = drain(core, between=count)
    for name, prompt in prompts.items():
        assert output(results[name]) == greedy_reference(model, prompt, 30)
        assert results[name].accepted_tokens > 12
    assert passes < 20


def test_drafts_under_pressure_updates_aborts_and_prefixes_change_nothing(tmp_path) -> None:
    weights = {version: drafting_model("glm_moe_dsa", version) for version in range(2)}
    save_checkpoint(weights[1], tmp_path / "1")
    rng = random.Random(0)
    core = new_core(
        drafting_model("glm_moe_dsa", 0), draft_tokens=3, cache_tokens=96, prefill_tokens=16
    )
    prompts: dict[str, tuple[int, ...]] = {}
    results: dict[str, GenerationResult] = {}
    histories = [random_prompt(i, 20) for i in range(3)]
    for turn in range(150):
        action = rng.random()
        if turn == 60:
            core.load_weights(str(tmp_path / "1"), 1)
        elif action < 0.5 and len(prompts) < 40:
            base = rng.choice(histories)
            prompt = (*base[: rng.randint(1, len(base))], *random_prompt(turn, rng.randint(0, 5)))
            prompts[f"r{turn}"] = prompt[:60]
            core.add(ask(f"r{turn}", prompt[:60], max_tokens=rng.randint(9, 30)))
        elif action < 0.53 and prompts:
            core.abort(rng.choice(list(prompts)))
        else:
            for ended in core.step():
                assert isinstance(ended, GenerationResult)
                results[ended.id] = ended
                histories.append((*prompts[ended.id], *output(ended))[:60])
    results |= drain(core)
    assert set(results) == set(prompts)
    for name, result in results.items():
        written = list(prompts[name])
        for span in result.spans:
            model = weights[span.weight_version]
            for token in span.ids:
                with torch.inference_mode():
                    row = model.logits(model(torch.tensor([written])))[0, -1]
                assert token == int(row.argmax())
                written.append(token)
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.tokens_drafted > stats.tokens_accepted > 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks


def test_a_model_without_prediction_layers_drafts_nothing() -> None:
    model = latent_model("deepseek_v3", mtp=None)
    core, results = run(model, [ask("r", random_prompt(0, 9))], draft_tokens=3)
    assert output(results["r"]) == greedy_reference(model, random_prompt(0, 9), 8)
    assert core.stats().tokens_drafted == 0
