"""Weights that change under running requests: both policies, from shared memory, all or nothing."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import (
    LATENT_KINDS,
    ask,
    drain,
    full_logits,
    greedy_reference,
    latent_model,
    new_core,
    output,
    random_prompt,
    tiny_model,
)
from safetensors import SafetensorError, safe_open

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.core import EngineConfig, EngineCore
from headrace.engine.local import LocalEngine
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.errors import UserError
from headrace.model import checkpoint as checkpoint_module
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder
from headrace.model.shared_weights import TENSORS_FILE, SharedWeights, publish
from headrace.rollout.types import FinishReason
from headrace.training.trainer import OptimizerConfig, Trainer
from headrace.training.worker import TrainerWorker

torch.set_num_threads(1)
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


def published(model: Decoder, folder: Path, version: int) -> str:
    return str(publish(model.hf_tensors(), folder, version, config=model.config.to_hf()))


def make(kind: str, seed: int) -> Decoder:
    return tiny_model(seed) if kind == "grouped" else latent_model(kind, seed)


def versions(result: GenerationResult) -> list[int]:
    return [span.weight_version for span in result.spans]


def check_spans(
    prompt: tuple[int, ...], result: GenerationResult, old: Decoder, new: Decoder
) -> None:
    """Each token is what the weights of its span continue what stands before it with."""
    written = list(prompt)
    for span in result.spans:
        model = {0: old, 7: new}[span.weight_version]
        for token in span.ids:
            assert token == int(full_logits(model, written)[-1].argmax())
            written.append(token)


def run_with_update(
    core: EngineCore, requests: list[GenerationRequest], update: Callable[[], None], at: int
) -> dict[str, GenerationResult]:
    for request in requests:
        core.add(request)
    return drain(core, between=lambda step: update() if step == at else None)


@pytest.mark.parametrize("kind", ["grouped", *LATENT_KINDS])
def test_continue_goes_on_under_the_new_weights(kind: str, tmp_path: Path) -> None:
    old, new = make(kind, 0), make(kind, 1)
    core = new_core(make(kind, 0), prefill_tokens=16, max_running=4, cache_tokens=160)
    path = published(new, tmp_path, 7)
    prompts = [random_prompt(i, 10 + 7 * i) for i in range(6)]
    requests = [ask(f"r{i}", prompt, max_tokens=14) for i, prompt in enumerate(prompts)]
    results = run_with_update(core, requests, lambda: core.load_weights(path, 7), at=6)
    for i, prompt in enumerate(prompts):
        assert len(output(results[f"r{i}"])) == 14
        check_spans(prompt, results[f"r{i}"], old, new)
    assert sum(versions(result) == [0, 7] for result in results.values()) >= 2
    stats = core.stats()
    assert (stats.updates, stats.requests_restarted) == (1, 0)
    assert stats.update_tensors == len(new.hf_tensors())
    assert stats.update_bytes == sum(t.nbytes for t in new.hf_tensors().values())


@pytest.mark.parametrize("kind", ["grouped", *LATENT_KINDS])
@pytest.mark.parametrize("shared", [True, False])
def test_requeue_begins_again_from_the_prompt(kind: str, shared: bool, tmp_path: Path) -> None:
    new = make(kind, 1)
    # Too small for all, so that some that have sampled wait when the weights change.
    drafts = 0 if shared else 2
    core = new_core(
        make(kind, 0), prefill_tokens=24, max_running=6, cache_tokens=104, draft_tokens=drafts
    )
    path = published(new, tmp_path, 7)
    if not shared:
        path = str(tmp_path / "disk")
        save_checkpoint(new, path)
    core.add(ask("early", random_prompt(9, 12), max_tokens=3))
    assert versions(drain(core)["early"]) == [0]
    begun: list[int] = []

    def update() -> None:
        assert core.stats().preemptions > 0
        begun.append(sum(live.started is not None for live in core._open.values()))
        core.load_weights(path, 7, "requeue")

    prompts = [random_prompt(i, 18 + i) for i in range(6)]
    requests = [ask(f"r{i}", prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    results = run_with_update(core, requests, update, at=22)
    for i, prompt in enumerate(prompts):
        result = results[f"r{i}"]
        assert versions(result) == [7]
        assert output(result) == greedy_reference(new, prompt, 30)
        assert len(result.raw_logprobs) == 30
    assert begun[0] >= 2
    assert core.stats().requests_restarted == begun[0]
    assert core.stats().blocks_free + core.stats().blocks_cached == core.stats().blocks


@pytest.mark.parametrize("config", [{"compiled": False}, {"deterministic": True}])
def test_a_restarted_request_draws_what_a_new_one_would(
    config: dict[str, object], tmp_path: Path
) -> None:
    new = tiny_model(1)
    path = published(new, tmp_path, 7)
    # Draws depend on the seed, on how many there were, and on what was sampled before.
    sampling = {
        "temperature": 0.9,
        "top_k": 40,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "min_tokens": 10,
        "stop_ids": tuple(range(30)),
        "logprobs": 2,
        "prompt_logprobs": 1,
        "max_tokens": 24,
    }
    requests = [ask(f"r{i}", random_prompt(i, 9 + i), seed=i, **sampling) for i in range(5)]
    core = new_core(tiny_model(0), **config)
    results = run_with_update(core, requests, lambda: core.load_weights(path, 7, "requeue"), at=8)
    assert core.stats().requests_restarted == 5
    fresh = new_core(tiny_model(1), **config)
    for request in requests:
        fresh.add(request)
    for name, want in drain(fresh).items():
        got = results[name]
        assert output(got) == output(want)
        assert versions(got) == [7]
        for field in ("raw_logprobs", "prompt_logprobs"):
            assert getattr(got, field) == pytest.approx(getattr(want, field), abs=1e-4, nan_ok=True)
        assert [[i for i, _ in a] for a in got.alternatives] == [
            [i for i, _ in a] for a in want.alternatives
        ]


def test_a_restarted_request_keeps_id_and_deadline(tmp_path: Path) -> None:
    now = [100.0]
    config = EngineConfig(max_running=2, max_context=128, block_tokens=8)
    core = EngineCore(tiny_model(0), config, clock=lambda: now[0])
    core.add(ask("r", random_prompt(0, 9), max_tokens=100, timeout_s=5.0))
    for _ in range(4):
        core.step()
    now[0] += 4.0
    core.load_weights(published(tiny_model(1), tmp_path, 7), 7, "requeue")
    assert core.step() == []
    with pytest.raises(EngineError, match="in use"):
        core.add(ask("r", random_prompt(0, 9)))
    now[0] += 1.0
    (result,) = core.step()
    assert isinstance(result, GenerationResult)
    assert result.finish_reason is FinishReason.DEADLINE
    assert result.total_s == 5.0
    assert output(result) == greedy_reference(tiny_model(1), random_prompt(0, 9), 1)


@pytest.mark.parametrize("policy", ["continue", "requeue"])
def test_a_refused_version_leaves_the_engine_exactly_as_it_was(policy: str, tmp_path: Path) -> None:
    core = new_core(tiny_model(0))
    path = published(tiny_model(1), tmp_path, 7)
    entry = SharedWeights.open(path).manifest.tensors[DOWN]
    with (Path(path) / TENSORS_FILE).open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"?")
    prompts = [random_prompt(i, 12 + i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        core.add(ask(f"r{i}", prompt, max_tokens=12))
    for _ in range(5):
        core.step()
    for bad, version, error in (
        (path, 7, f"{DOWN} .* checksum"),
        (path, 8, "are version 7, not 8"),
        (str(tmp_path / "v00000003.weights"), 3, "cannot be read"),
    ):
        with pytest.raises(UserError, match=error):
            core.load_weights(bad, version, policy)  # type: ignore[arg-type]  # parametrised
    with pytest.raises(EngineError, match="policy is 'stop'"):
        core.load_weights(path, 7, "stop")  # type: ignore[arg-type]  # what is tested
    results = drain(core)
    for i, prompt in enumerate(prompts):
        assert versions(results[f"r{i}"]) == [0]
        assert output(results[f"r{i}"]) == greedy_reference(tiny_model(0), prompt, 12)
    stats = core.stats()
    assert (stats.version, stats.updates, stats.update_tensors) == (0, 0, 0)
    assert (stats.tokens_recomputed, stats.requests_restarted) == (0, 0)
    core.load_weights(published(tiny_model(1), tmp_path, 8), 8)
    core.add(ask("after", prompts[0]))
    assert output(drain(core)["after"]) == greedy_reference(tiny_model(1), prompts[0], 8)


@pytest.mark.parametrize(
    "config",
    [{"compiled": True}, {"compiled": False}, {"deterministic": True}, {"weights": "int8"}],
    ids=lambda config: "-".join(f"{k}={v}" for k, v in config.items()),
)
def test_only_changed_tensors_are_copied_and_all_copies_follow(
    config: dict[str, object], tmp_path: Path
) -> None:
    trained = tiny_model(1)
    core = new_core(tiny_model(0), **config)
    core.load_weights(published(trained, tmp_path, 1), 1)
    tensors = trained.hf_tensors()
    before = core.stats()
    assert before.update_tensors == len(tensors)
    tensors[NORM].mul_(torch.linspace(0.2, 3.0, len(tensors[NORM])))
    tensors[DOWN].mul_(-2.0)
    core.load_weights(published(trained, tmp_path, 2), 2)
    after = core.stats()
    assert after.update_tensors - before.update_tensors == 2
    changed = tensors[NORM].nbytes + tensors[DOWN].nbytes
    assert after.update_bytes - before.update_bytes == changed

    fresh = tiny_model(1)
    for name in (NORM, DOWN):
        fresh.hf_tensors()[name].copy_(tensors[name])
    other = new_core(fresh, **config)
    for engine in (core, other):
        for i in range(3):
            engine.add(ask(f"r{i}", random_prompt(i, 15), max_tokens=20))
    results, wanted = drain(core), drain(other)
    for name, want in wanted.items():
        assert output(results[name]) == output(want)
        assert versions(results[name]) == [2]
    # What a checkpoint brought is of unknown checksums: the next update copies all.
    save_checkpoint(trained, tmp_path / "disk")
    core.load_weights(str(tmp_path / "disk"), 3)
    assert core.stats().update_tensors - after.update_tensors == len(tensors)
    core.load_weights(published(trained, tmp_path, 4), 4)
    assert core.stats().update_tensors - after.update_tensors == 2 * len(tensors)


class Tearing:
    """An open checkpoint whose file fails when this many tensors of it have been read."""

    def __init__(self, opened: Any, readable: int) -> None:
        self._opened = opened
        self._left = readable

    def __enter__(self) -> "Tearing":
        self._opened = self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        if self._left == 0:
            raise SafetensorError("the disk is gone")
        self._left -= 1
        return self._opened.get_tensor(name)


async def test_a_checkpoint_that_fails_halfway_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long_model(seed: int) -> Decoder:
        return tiny_model(seed, max_positions=8192)

    path = str(tmp_path / "torn")
    save_checkpoint(long_model(1), path)
    engine = LocalEngine(new_core(long_model(0), max_context=8192))
    request = ask("r", random_prompt(0, 9), max_tokens=8000)
    running = asyncio.create_task(engine.generate(request))
    async with asyncio.timeout(30):
        while (await engine.stats())["tokens_sampled"] < 1:
            pass
    for readable, error, match in (
        (0, UserError, "the disk is gone"),
        (3, EngineError, "when parts of it were loaded .* of no version"),
    ):
        monkeypatch.setattr(
            checkpoint_module,
            "safe_open",
            lambda *args, n=readable, **options: Tearing(safe_open(*args, **options), n),
        )
        assert (await engine.stats())["running"] == 1
        with pytest.raises(error, match=match):
            await engine.load_weights(path, 1)
    with pytest.raises(EngineError, match="of no version"):
        await running
    assert engine.weight_version == 0
    with pytest.raises(EngineError):
        await engine.generate(ask("s", (1, 2)))


async def test_a_replaced_process_has_the_published_weights(tmp_path: Path) -> None:
    for version in range(2):
        save_checkpoint(tiny_model(version), tmp_path / f"v{version}")
    folder = tmp_path / "shared"
    cluster = LocalCluster()
    # A new engine may begin with what is published.
    engine = ProcessEngine(
        cluster,
        EngineConfig(max_running=4, max_context=256),
        checkpoint=published(tiny_model(0), folder, 3),
        version=3,
    )
    prompt = random_prompt(0, 8)
    try:
        await engine.start()
        assert output(await engine.generate(ask("a", prompt))) == greedy_reference(
            tiny_model(0), prompt, 8
        )
        running = asyncio.create_task(engine.generate(ask("b", prompt, max_tokens=240)))
        async with asyncio.timeout(30):
            while (await engine.stats())["tokens_sampled"] < 12:
                pass
        path = published(tiny_model(1), folder, 4)
        await engine.load_weights(path, 4, "requeue", checkpoint=str(tmp_path / "v1"))
        shutil.rmtree(folder)
        stats = await engine.stats()
        assert stats["update_tensors"] == len(tiny_model(1).hf_tensors())
        result = await running
        assert versions(result) in ([4], [3])
        assert stats["requests_restarted"] == (versions(result) == [4])
        with pytest.raises(UserError, match="cannot be read"):
            await engine.load_weights(path, 4)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        after = await engine.generate(ask("c", prompt))
        assert engine.restarts == 1
        assert versions(after) == [4]
        assert output(after) == greedy_reference(tiny_model(1), prompt, 8)
    finally:
        await engine.close()
        await cluster.close()


def test_a_trainer_publishes_what_its_checkpoint_would_hold(tmp_path: Path) -> None:
    worker = TrainerWorker(None)  # type: ignore[arg-type]  # no request comes through it
    worker.trainer = Trainer(latent_model("glm_moe_dsa", 1), OptimizerConfig(1e-3))
    worker._do_save(str(tmp_path / "disk"), None, False, False)
    results = []
    for way in ("shared", "disk"):
        half = Decoder(worker.trainer.model.config, dtype=torch.bfloat16)
        half.init_weights(0)
        core = new_core(half, dtype="bfloat16")
        path = str(tmp_path / "disk")
        if way == "shared":
            path = worker._do_publish(str(tmp_path / "shared"), 5, "bfloat16")
            assert path is not None
        core.load_weights(path, 5)
        core.add(ask("r", random_prompt(0, 20), max_tokens=12))
        results.append(drain(core)["r"])
        tensors = core.model.hf_tensors()
        for name, tensor in worker.trainer.model.hf_tensors().items():
            assert torch.equal(tensors[name], tensor.to(tensors[name].dtype)), name
    assert results[0].spans == results[1].spans
