"""The core against plain full forwards: what it generates, stamps, reuses and refuses."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import (
    VOCAB,
    ask,
    drain,
    full_logits,
    greedy_reference,
    logprobs,
    new_core,
    output,
    random_prompt,
    tiny_model,
)
from test_sampling import reference
from transformers import LlamaForCausalLM

from headrace.engine.core import EngineConfig, EngineCore, GenerationFailure
from headrace.engine.types import EngineError, GenerationResult, SamplingParams
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder
from headrace.rollout.types import FinishReason

torch.set_num_threads(1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def check_greedy(
    prompt: Sequence[int], result: GenerationResult, weights: Mapping[int, Decoder]
) -> None:
    """Every token is the best one, with its logprob, under the weights its span names."""
    written = list(prompt)
    for span in result.spans:
        for token, logprob in zip(span.ids, span.logprobs, strict=True):
            row = full_logits(weights[span.weight_version], written)[-1].log_softmax(-1)
            assert token == int(row.argmax())
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)
            written.append(token)


def test_greedy_equals_transformers_generate(tmp_path: Path) -> None:
    model = tiny_model()
    save_checkpoint(model, tmp_path / "model")
    theirs: Any = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    prompts = [random_prompt(i, 20) for i in range(4)]
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        want = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )[:, 20:]
    core = new_core(model)
    for i, prompt in enumerate(prompts):
        core.add(ask(f"r{i}", prompt, max_tokens=24))
    results = drain(core)
    assert [list(output(results[f"r{i}"])) for i in range(4)] == want.tolist()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("kv_heads", "prefill_tokens", "max_running"), [(2, 512, 8), (4, 16, 4), (1, 7, 3)]
)
def test_joining_and_leaving_at_any_step_changes_nothing(
    kv_heads: int, prefill_tokens: int, max_running: int, compiled: bool
) -> None:
    model = tiny_model(num_kv_heads=kv_heads)
    core = new_core(
        model,
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        compiled=compiled,
    )
    shapes = [(5, 9), (40, 3), (1, 17), (23, 12), (60, 8), (2, 1), (31, 20), (12, 5), (33, 11)]
    pending = [
        ask(f"r{i}", random_prompt(i, length), max_tokens=n) for i, (length, n) in enumerate(shapes)
    ]
    queue = list(pending)
    for request in [queue.pop(0), queue.pop(0)]:
        core.add(request)
    results = drain(core, between=lambda step: core.add(queue.pop(0)) if queue else None)
    assert not queue
    for request in pending:
        got = results[request.id]
        want = greedy_reference(model, request.prompt_ids, request.sampling.max_tokens)
        assert output(got) == want, request.id
        assert got.finish_reason is FinishReason.LENGTH
    assert core.stats().requests_finished == len(shapes)
    assert core.stats().tokens_sampled == sum(n for _, n in shapes)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.8},
    ],
)
def test_logprobs_equal_a_full_forward(sampling: dict[str, float]) -> None:
    model = tiny_model()
    core = new_core(model, prefill_tokens=24)
    for i in range(4):
        core.add(ask(f"r{i}", random_prompt(i, 10 + 9 * i), max_tokens=15, seed=i, **sampling))  # type: ignore[arg-type]  # test's shorthand
    results = drain(core)
    params = SamplingParams(max_tokens=15, **sampling)  # type: ignore[arg-type]  # test's shorthand
    for i in range(4):
        prompt, result = random_prompt(i, 10 + 9 * i), results[f"r{i}"]
        logits = full_logits(model, [*prompt, *output(result)])[len(prompt) - 1 : -1]
        want = [
            float(reference(row, params)[token].log())
            for row, token in zip(logits, output(result), strict=True)
        ]
        assert logprobs(result) == pytest.approx(want, abs=1e-4)


def test_a_seeded_request_ignores_its_neighbours() -> None:
    model = tiny_model()

    def run(neighbours: int, reorder: bool) -> tuple[int, ...]:
        core = new_core(model)
        requests = [
            ask(f"n{i}", random_prompt(50 + i, 9 + i), temperature=1.0, max_tokens=4 + i)
            for i in range(neighbours)
        ]
        requests.insert(
            0 if reorder else len(requests),
            ask("mine", random_prompt(1, 14), temperature=1.0, seed=5, max_tokens=20),
        )
        for request in requests:
            core.add(request)
        return output(drain(core)["mine"])

    alone = run(0, False)
    assert run(5, False) == alone
    assert run(6, True) == alone
    core = new_core(model)
    core.add(ask("mine", random_prompt(1, 14), temperature=1.0, seed=6, max_tokens=20))
    assert output(drain(core)["mine"]) != alone


def test_same_engine_seed_same_unseeded_tokens() -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        core = new_core(tiny_model(), seed=seed)
        for i in range(3):
            core.add(ask(f"r{i}", random_prompt(0, 8), temperature=1.0))
        results = drain(core)
        return [output(results[f"r{i}"]) for i in range(3)]

    first = run(3)
    assert run(3) == first
    assert len(set(first)) > 1
    assert run(4) != first


def test_stop_ids_max_tokens_and_context_limit() -> None:
    model = tiny_model()
    prompt = random_prompt(3, 10)
    greedy = greedy_reference(model, prompt, 30)
    stop = greedy[6]
    core = new_core(model, max_context=24)
    core.add(ask("stop", prompt, max_tokens=30, stop_ids=(VOCAB + 5, stop)))
    core.add(ask("one", prompt, max_tokens=1))
    core.add(ask("context", prompt, max_tokens=30))
    core.add(ask("last", random_prompt(4, 23), max_tokens=30))
    results = drain(core)
    assert output(results["stop"]) == greedy[: greedy.index(stop) + 1]
    assert results["stop"].finish_reason is FinishReason.STOP
    assert output(results["one"]) == greedy[:1]
    assert output(results["context"]) == greedy[:14]
    assert results["context"].finish_reason is FinishReason.LENGTH
    assert len(output(results["last"])) == 1


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (ask("r", ()), EngineError.INVALID, "empty"),
        (ask("r", (VOCAB,)), EngineError.INVALID, "vocabulary"),
        (ask("r", (-1,)), EngineError.INVALID, "vocabulary"),
        (ask("r", (1,), max_tokens=0), EngineError.INVALID, "max_tokens is 0"),
        (ask("r", (1,), temperature=-1.0), EngineError.INVALID, "temperature is -1"),
        (ask("r", (1,), temperature=float("nan")), EngineError.INVALID, "temperature"),
        (ask("r", (1,), temperature=1e-12), EngineError.INVALID, "greedy"),
        (ask("r", (1,), top_p=0.0), EngineError.INVALID, "top_p is 0"),
        (ask("r", (1,), top_k=-2), EngineError.INVALID, "top_k is -2"),
        (ask("r", (1,), timeout_s=0.0), EngineError.INVALID, "timeout_s"),
        (ask("r", (1,) * 128), EngineError.TOO_LONG, "128 tokens"),
        (ask("busy", (1,)), EngineError.INVALID, "in use"),
    ],
)
def test_refusals_leave_nothing_behind(request_: object, code: str, text: str) -> None:
    core = new_core(tiny_model())
    core.add(ask("busy", (1, 2)))
    with pytest.raises(EngineError, match=text) as caught:
        core.add(request_)  # type: ignore[arg-type]  # parametrized as object
    assert caught.value.code == code
    assert list(drain(core)) == ["busy"]


def test_overload_refuses_and_recovers() -> None:
    core = new_core(tiny_model(), max_running=2, max_waiting=3)
    for i in range(5):
        core.add(ask(f"r{i}", (1 + i, 2)))
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            core.add(ask("r5", (1, 2)))
        assert caught.value.code == EngineError.OVERLOADED
        core.step()
    assert core.stats().waiting == 3
    core.abort("r4")
    core.add(ask("r6", (1, 2)))
    assert set(drain(core)) == {"r0", "r1", "r2", "r3", "r4", "r6"}


def test_abort_running_waiting_finished_and_unknown() -> None:
    model = tiny_model()
    core = new_core(model, max_running=2)
    for i in range(4):
        core.add(ask(f"r{i}", random_prompt(i, 6), max_tokens=12))
    for _ in range(4):
        core.step()
    core.abort("r0")
    core.abort("r3")
    core.abort("unknown")
    results = drain(core)
    assert results["r0"].finish_reason is FinishReason.ABORTED
    assert 0 < len(output(results["r0"])) < 12
    assert (
        output(results["r0"])
        == greedy_reference(model, random_prompt(0, 6), 12)[: len(output(results["r0"]))]
    )
    assert results["r3"].finish_reason is FinishReason.ABORTED
    assert results["r3"].spans == ()
    for i in (1, 2):
        assert output(results[f"r{i}"]) == greedy_reference(model, random_prompt(i, 6), 12)
    core.abort("r1")
    assert not core.has_work
    core.add(ask("r1", (4,)))
    assert list(drain(core)) == ["r1"]


def test_deadlines_end_running_and_waiting_requests() -> None:
    clock = Clock()
    core = EngineCore(tiny_model(), EngineConfig(max_running=1, max_context=64), clock=clock)
    core.add(ask("running", (1, 2, 3), max_tokens=50, timeout_s=5.0))
    core.add(ask("waiting", (1, 2, 3), timeout_s=2.0))
    core.add(ask("patient", (1, 2, 3), timeout_s=50.0))
    core.step()
    clock.now = 2.5
    assert [(r.id, r.finish_reason) for r in core.step()] == [("waiting", FinishReason.DEADLINE)]  # type: ignore[union-attr]  # no failures here
    clock.now = 5.0
    (ended,) = core.step()
    assert isinstance(ended, GenerationResult)
    assert ended.finish_reason is FinishReason.DEADLINE
    assert len(output(ended)) == 2
    assert ended.total_s == 5.0
    patient = drain(core)["patient"]
    assert patient.finish_reason is FinishReason.LENGTH
    assert patient.queue_s == 5.0


def test_prefix_of_a_finished_request_is_reused_exactly() -> None:
    model = tiny_model()
    core = new_core(model)
    prompt = random_prompt(0, 30)
    core.add(ask("turn1", prompt, max_tokens=10))
    first = output(drain(core)["turn1"])
    before = core.stats()
    longer = (*prompt, *first, *random_prompt(1, 7))
    core.add(ask("turn2", longer, max_tokens=10))
    assert output(drain(core)["turn2"]) == greedy_reference(model, longer, 10)
    after = core.stats()
    # The last token sampled in turn 1 was never an input, so it is computed now.
    assert after.tokens_reused - before.tokens_reused == 39
    assert after.tokens_prefilled - before.tokens_prefilled == 8


def test_rollouts_of_one_prompt_compute_it_once_and_forks_keep_their_source() -> None:
    model = tiny_model()
    core = new_core(model)
    prompt = random_prompt(0, 50)
    for i in range(6):
        core.add(ask(f"r{i}", prompt, max_tokens=12, temperature=1.0, seed=i))
    core.add(ask("other", random_prompt(9, 20)))
    results = drain(core)
    stats = core.stats()
    # Six whole blocks are shared while the prompt is computed; of the seventh two tokens are left.
    assert stats.tokens_prefilled == 50 + 20 + 5 * 2
    assert stats.tokens_reused == 5 * 48
    for i in range(6):
        ids = output(results[f"r{i}"])
        logits = full_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1].log_softmax(-1)
        want = [float(row[token]) for row, token in zip(logits, ids, strict=True)]
        assert logprobs(results[f"r{i}"]) == pytest.approx(want, abs=1e-4)
    turns = {i: (*prompt, *output(results[f"r{i}"]), 3, 4, 5) for i in range(6)}
    for i, turn in turns.items():
        core.add(ask(f"s{i}", turn, max_tokens=5))
    results = drain(core)
    assert core.stats().tokens_reused - stats.tokens_reused == 6 * (50 + 11)
    for i, turn in turns.items():
        assert output(results[f"s{i}"]) == greedy_reference(model, turn, 5)


def test_held_prefixes_give_way_oldest_first() -> None:
    model = tiny_model()
    core = new_core(model, max_running=2, max_context=64, cache_tokens=72)
    prompts = [random_prompt(i, 20) for i in range(4)]
    for i, prompt in enumerate(prompts):
        core.add(ask(f"a{i}", prompt, max_tokens=2))
        drain(core)
    start = core.stats().tokens_reused
    core.add(ask("gone", (*prompts[0], 1), max_tokens=2))
    drain(core)
    assert core.stats().tokens_reused == start
    core.add(ask("kept", (*prompts[3], 1), max_tokens=2))
    assert output(drain(core)["kept"]) == greedy_reference(model, (*prompts[3], 1), 2)
    assert core.stats().tokens_reused > start


@pytest.mark.parametrize("compiled", [True, False])
def test_update_mid_request_gives_two_spans_and_recomputes(tmp_path: Path, compiled: bool) -> None:
    old, new = tiny_model(0), tiny_model(1)
    save_checkpoint(new, tmp_path / "v7")
    model = tiny_model(0)
    core = new_core(model, prefill_tokens=16, max_running=4, compiled=compiled)
    core.add(ask("early", random_prompt(9, 30), max_tokens=3))
    drain(core)
    prompts = [random_prompt(i, 10 + 7 * i) for i in range(5)]
    for i, prompt in enumerate(prompts):
        core.add(ask(f"r{i}", prompt, max_tokens=14))

    def update(step: int) -> None:
        if step == 5:
            core.load_weights(str(tmp_path / "v7"), 7)

    results = drain(core, between=update)
    split = 0
    for i, prompt in enumerate(prompts):
        spans = results[f"r{i}"].spans
        assert [s.weight_version for s in spans] in ([0, 7], [7], [0])
        split += len(spans) == 2
        check_greedy(prompt, results[f"r{i}"], {0: old, 7: new})
        assert len(output(results[f"r{i}"])) == 14
    assert split >= 2
    stats = core.stats()
    assert stats.version == 7
    assert stats.updates == 1
    assert stats.last_update_pause_s > 0
    assert stats.tokens_recomputed > 0
    reused = stats.tokens_reused
    core.add(ask("again", (*random_prompt(9, 30), 1), max_tokens=3))
    assert output(drain(core)["again"]) == greedy_reference(new, (*random_prompt(9, 30), 1), 3)
    assert core.stats().tokens_reused == reused


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_keep_every_promise(seed: int, tmp_path: Path) -> None:
    """Arrivals (many extending earlier ones), aborts, updates and steps in random order."""
    rng = random.Random(seed)
    weights = {version: tiny_model(version) for version in range(3)}
    for version, model in weights.items():
        save_checkpoint(model, tmp_path / str(version))
    core = new_core(
        tiny_model(0),
        max_running=rng.randint(1, 6),
        # Room for one long request, or for a few: blocks are evicted and requests preempted.
        cache_tokens=rng.choice([80, 160, 640]),
        max_context=80,
        prefill_tokens=rng.choice([5, 16, 64]),
        compiled=seed % 2 == 0,
    )
    prompts: dict[str, tuple[int, ...]] = {}
    results: dict[str, GenerationResult] = {}
    histories = [random_prompt(i, rng.randint(1, 30)) for i in range(4)]
    version = 0
    for turn in range(90):
        action = rng.random()
        if action < 0.3 and len(prompts) < 22:
            base = rng.choice(histories)
            prompt = (*base[: rng.randint(1, len(base))], *random_prompt(turn, rng.randint(0, 5)))
            prompts[f"r{turn}"] = prompt
            core.add(ask(f"r{turn}", prompt, max_tokens=rng.randint(1, 12)))
        elif action < 0.36 and prompts:
            core.abort(rng.choice(list(prompts)))
        elif action < 0.4 and version < 2:
            version += 1
            core.load_weights(str(tmp_path / str(version)), version)
        else:
            for ended in core.step():
                assert isinstance(ended, GenerationResult)
                results[ended.id] = ended
                histories.append((*prompts[ended.id], *output(ended))[:80])
    results |= drain(core)
    assert set(results) == set(prompts)
    for request_id, result in results.items():
        check_greedy(prompts[request_id], result, weights)
        versions = [span.weight_version for span in result.spans]
        assert versions == sorted(set(versions))
    stats = core.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.tokens_sampled == sum(len(output(r)) for r in results.values())


def test_refused_weights_leave_the_old_ones(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(1, num_layers=1), tmp_path / "other")
    core = new_core(tiny_model())
    core.add(ask("r", random_prompt(0, 12), max_tokens=9))
    core.step()
    with pytest.raises(UserError, match="architecture"):
        core.load_weights(str(tmp_path / "other"), 3)
    with pytest.raises(EngineError, match="version is -1"):
        core.load_weights(str(tmp_path / "other"), -1)
    (span,) = drain(core)["r"].spans
    assert span.weight_version == 0
    assert span.ids == greedy_reference(tiny_model(), random_prompt(0, 12), 9)


def test_non_finite_weights_fail_requests_and_leave_no_trace(tmp_path: Path) -> None:
    broken = tiny_model(1)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
        broken.layers[0].attention.qkv.weight[0, 0] = float("nan")  # type: ignore[union-attr,index]  # ModuleList is untyped
    save_checkpoint(broken, tmp_path / "bad")
    save_checkpoint(tiny_model(2), tmp_path / "good")
    core = new_core(tiny_model())
    core.add(ask("r", random_prompt(0, 12), max_tokens=30))
    core.add(ask("s", random_prompt(1, 60), max_tokens=30))
    core.step()
    core.load_weights(str(tmp_path / "bad"), 1)
    ended = core.step()
    assert [type(e) for e in ended] == [GenerationFailure] * 2
    assert "version 1" in ended[0].message  # type: ignore[union-attr]  # asserted above
    assert core.stats().requests_failed == 2
    core.load_weights(str(tmp_path / "good"), 2)
    for i in range(8):
        core.add(ask(f"t{i}", random_prompt(20 + i, 3 + 5 * i), max_tokens=5))
    results = drain(core)
    for i in range(8):
        want = greedy_reference(tiny_model(2), random_prompt(20 + i, 3 + 5 * i), 5)
        assert output(results[f"t{i}"]) == want


def test_what_an_aborted_request_wrote_under_broken_weights_is_gone(tmp_path: Path) -> None:
    broken = tiny_model(1)
    with torch.no_grad():
        broken.embed.weight.fill_(float("nan"))
    save_checkpoint(broken, tmp_path / "bad")
    save_checkpoint(tiny_model(2), tmp_path / "good")
    # Torch attends over masked positions too, so it is the one that stale NaN could reach.
    core = new_core(tiny_model(), prefill_tokens=40, compiled=False)
    core.load_weights(str(tmp_path / "bad"), 1)
    core.add(ask("r", random_prompt(0, 60)))
    assert core.step() == []
    core.abort("r")
    core.load_weights(str(tmp_path / "good"), 2)
    core.add(ask("short", random_prompt(1, 4)))
    core.add(ask("long", random_prompt(2, 39)))
    results = drain(core)
    assert output(results["short"]) == greedy_reference(tiny_model(2), random_prompt(1, 4), 8)
    assert output(results["long"]) == greedy_reference(tiny_model(2), random_prompt(2, 39), 8)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="positions"):
        EngineCore(tiny_model(), EngineConfig(max_context=257))
    with pytest.raises(ValueError, match="max_running is 0"):
        EngineConfig(max_running=0)
    with pytest.raises(ValueError, match="step_tokens 4 must exceed"):
        EngineConfig(max_running=4, step_tokens=4)
    with pytest.raises(ValueError, match="dtype"):
        EngineConfig(dtype="int8")
