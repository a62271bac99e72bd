"""The core over models that cache latents, against plain full forwards of the same models."""

import random
from pathlib import Path

import pytest
import torch
from engine_harness import (
    LATENT_KINDS,
    ask,
    drain,
    full_logits,
    greedy_reference,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
)
from test_core import check_greedy
from test_sampling import reference

from headrace.engine.cache.latent import LatentCache
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationFailure, GenerationResult, SamplingParams
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.decoder import Decoder
from headrace.model.trace import SelectionTrace
from headrace.rollout.types import FinishReason

torch.set_num_threads(1)


def cache_of(core: EngineCore) -> LatentCache:
    cache = core._cache
    assert isinstance(cache, LatentCache)
    return cache


@pytest.mark.parametrize("kind", LATENT_KINDS)
@pytest.mark.parametrize(("prefill_tokens", "max_running"), [(512, 8), (16, 4), (7, 3)])
def test_joining_and_leaving_at_any_step_changes_nothing(
    kind: str, prefill_tokens: int, max_running: int
) -> None:
    model = latent_model(kind)
    core = new_core(model, max_running=max_running, prefill_tokens=prefill_tokens)
    shapes = [(5, 9), (40, 3), (1, 17), (23, 12), (60, 8), (2, 1), (31, 20), (12, 5), (33, 11)]
    pending = [
        ask(f"r{i}", random_prompt(i, length), max_tokens=n) for i, (length, n) in enumerate(shapes)
    ]
    queue = list(pending)
    for request in [queue.pop(0), queue.pop(0)]:
        core.add(request)
    results = drain(core, between=lambda step: core.add(queue.pop(0)) if queue else None)
    for request in pending:
        got = results[request.id]
        want = greedy_reference(model, request.prompt_ids, request.sampling.max_tokens)
        assert output(got) == want, request.id
        assert got.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_logprobs_equal_a_full_forward(kind: str) -> None:
    model = latent_model(kind)
    core = new_core(model, prefill_tokens=24)
    settings = [{"temperature": 0.0}, {}, {"temperature": 1.3, "top_k": 7}, {"top_p": 0.7}]
    fields = [{"temperature": 1.0, **setting} for setting in settings]
    for i, sampling in enumerate(fields):
        core.add(ask(f"r{i}", random_prompt(i, 10 + 9 * i), max_tokens=15, seed=i, **sampling))
    results = drain(core)
    for i, sampling in enumerate(fields):
        params = SamplingParams(max_tokens=15, **sampling)  # type: ignore[arg-type]  # test's shorthand
        prompt, result = random_prompt(i, 10 + 9 * i), results[f"r{i}"]
        logits = full_logits(model, [*prompt, *output(result)])[len(prompt) - 1 : -1]
        want = [
            float(reference(row, params)[token].log())
            for row, token in zip(logits, output(result), strict=True)
        ]
        assert logprobs(result) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_prefixes_are_taken_over_and_copied(kind: str) -> None:
    model = latent_model(kind)
    core = new_core(model)
    prompt = random_prompt(0, 50)
    for i in range(4):
        core.add(ask(f"r{i}", prompt, max_tokens=12, temperature=1.0, seed=i))
    first = drain(core)
    stats = core.stats()
    assert stats.tokens_reused == 3 * 48
    turns = {i: (*prompt, *output(first[f"r{i}"]), 3, 4, 5) for i in range(4)}
    for i, turn in turns.items():
        core.add(ask(f"s{i}", turn, max_tokens=5))
    second = drain(core)
    assert core.stats().tokens_reused - stats.tokens_reused == 4 * (50 + 11)
    for i, turn in turns.items():
        assert output(second[f"s{i}"]) == greedy_reference(model, turn, 5)


def selected_while_decoding(model: Decoder, neighbours: int) -> list[list[list[int]]]:
    """Per decoded token, the positions that each layer with an indexer selected for "mine"."""
    core = new_core(model)
    core.add(ask("mine", random_prompt(1, 30), max_tokens=20))
    for i in range(neighbours):
        core.add(ask(f"n{i}", random_prompt(50 + i, 9 + 17 * i), max_tokens=4 + 9 * i))
    cache, seen = cache_of(core), []
    attend = cache.attend_latent

    def spy(layer: int, query: object) -> object:
        out = attend(layer, query)  # type: ignore[arg-type]  # passed on as it came
        sequence = core._open["mine"].sequence
        if sequence.decoding:
            assert cache.selection is not None
            place = {
                block * cache.block_tokens + row: i * cache.block_tokens + row
                for i, block in enumerate(sequence.blocks)
                for row in range(cache.block_tokens)
            }
            # Decoding sequences come first, the oldest of them foremost.
            per_layer.append([place[row] for row in cache.selection[0].tolist() if row >= 0])
        return out

    cache.attend_latent = spy  # type: ignore[method-assign,assignment]  # a test's spy
    while "mine" in core._open:
        per_layer: list[list[int]] = []
        core.step()
        if per_layer:
            seen.append(per_layer)
    return seen


def test_a_neighbour_never_changes_a_selection() -> None:
    model = latent_model("glm_moe_dsa")
    alone = selected_while_decoding(model, 0)
    assert len(alone) == 19
    assert selected_while_decoding(model, 4) == alone
    # And it is what one forward over the whole sequence selects.
    ids = torch.tensor(
        [[*random_prompt(1, 30), *greedy_reference(model, random_prompt(1, 30), 19)]]
    )
    trace = SelectionTrace()
    with torch.inference_mode():
        model(ids, trace=trace)
    for i, layers in enumerate(alone):
        assert layers == [trace.selections[layer][30 + i].tolist() for layer in (0, 0, 2)]
    topk = model.config.indexer.topk  # type: ignore[union-attr]  # the kind has one
    newest = [list(range(31 + i - topk, 31 + i)) for i in range(len(alone))]
    assert all(row not in layers for row, layers in zip(newest, alone, strict=True))


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_random_histories_with_updates_keep_every_promise(kind: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    weights = {version: latent_model(kind, version) for version in range(3)}
    for version, model in weights.items():
        save_checkpoint(model, tmp_path / str(version))
    core = new_core(latent_model(kind), max_running=4, cache_tokens=400, prefill_tokens=16)
    prompts: dict[str, tuple[int, ...]] = {}
    results: dict[str, GenerationResult] = {}
    histories = [random_prompt(i, rng.randint(1, 30)) for i in range(4)]
    version = 0
    for turn in range(110):
        action = rng.random()
        if action < 0.3 and len(prompts) < 20:
            base = rng.choice(histories)
            prompt = (*base[: rng.randint(1, len(base))], *random_prompt(turn, rng.randint(0, 5)))
            prompts[f"r{turn}"] = prompt
            core.add(ask(f"r{turn}", prompt, max_tokens=rng.randint(1, 12)))
        elif action < 0.36 and prompts:
            core.abort(rng.choice(list(prompts)))
        elif action > 0.95 and version < 2:
            version += 1
            core.load_weights(str(tmp_path / str(version)), version)
        else:
            for ended in core.step():
                assert isinstance(ended, GenerationResult)
                results[ended.id] = ended
                histories.append((*prompts[ended.id], *output(ended))[:80])
    results |= drain(core)
    assert set(results) == set(prompts)
    assert version == 2
    for request_id, result in results.items():
        check_greedy(prompts[request_id], result, weights)
    stats = core.stats()
    assert stats.tokens_reused > 0
    assert stats.tokens_recomputed > 0


def test_non_finite_weights_fail_requests_and_leave_no_trace(tmp_path: Path) -> None:
    broken = latent_model("glm_moe_dsa", 1)
    with torch.no_grad():
        broken.embed.weight.fill_(float("nan"))
    save_checkpoint(broken, tmp_path / "bad")
    save_checkpoint(latent_model("glm_moe_dsa", 2), tmp_path / "good")
    core = new_core(latent_model("glm_moe_dsa"), prefill_tokens=40)
    core.load_weights(str(tmp_path / "bad"), 1)
    core.add(ask("fails", random_prompt(0, 12)))
    assert [type(ended) for ended in core.step()] == [GenerationFailure]
    core.add(ask("aborted", random_prompt(0, 60)))
    assert core.step() == []
    core.abort("aborted")
    core.load_weights(str(tmp_path / "good"), 2)
    good = latent_model("glm_moe_dsa", 2)
    prompts = {"short": random_prompt(1, 4), "long": random_prompt(2, 39)}
    for name, prompt in prompts.items():
        core.add(ask(name, prompt))
    results = drain(core)
    for name, prompt in prompts.items():
        assert output(results[name]) == greedy_reference(good, prompt, 8)


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_bfloat16_runs_and_stays_close(kind: str, tmp_path: Path) -> None:
    model = latent_model(kind)
    save_checkpoint(model, tmp_path / "model")
    prompt = random_prompt(0, 40)
    half = load_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    core = new_core(half, prefill_tokens=16)
    core.add(ask("r", prompt, max_tokens=6))
    result = drain(core)["r"]
    logits = full_logits(model, [*prompt, *output(result)])[len(prompt) - 1 : -1].log_softmax(-1)
    want = [float(row[token]) for row, token in zip(logits, output(result), strict=True)]
    assert logprobs(result)[0] == pytest.approx(want[0], abs=0.3)
    assert cache_of(core).rows.dtype == torch.bfloat16
