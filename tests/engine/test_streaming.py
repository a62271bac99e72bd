"""What watchers of a request are told adds up to its result, whatever happens on the way."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_harness import (
    Oracle,
    ask,
    drain,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
    tiny_model,
)

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig, UpdatePolicy
from headrace.engine.local import LocalEngine
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult, Progress
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder

torch.set_num_threads(1)


class Told:
    """One watcher's notes."""

    def __init__(self) -> None:
        self.items: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.items.append(progress)

    def check(self, result: GenerationResult) -> None:
        """What was told since the last restart is what came out."""
        starts = [i for i, item in enumerate(self.items) if item.restart]
        items = self.items[starts[-1] :] if starts else self.items
        assert {item.id for item in self.items} <= {result.id}
        versions = [item.weight_version for item in items for _ in item.ids]
        assert tuple(i for item in items for i in item.ids) == output(result)
        assert tuple(p for item in items for p in item.logprobs) == logprobs(result)
        assert tuple(p for item in items for p in item.raw_logprobs) == result.raw_logprobs
        assert versions == [span.weight_version for span in result.spans for _ in span.ids]

    @property
    def restarts(self) -> int:
        return sum(item.restart for item in self.items)


def streamed(request_id: str, seed: int, length: int, **sampling: object) -> GenerationRequest:
    request = ask(request_id, random_prompt(seed, length), seed=seed, **sampling)  # type: ignore[arg-type]  # a test's shorthand
    return GenerationRequest(
        request.id, request.prompt_ids, request.sampling, stream=request_id != "silent"
    )


@pytest.mark.parametrize("policy", ["continue", "requeue"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_core_tells_every_token_once(policy: UpdatePolicy, drafts: int, tmp_path: Path) -> None:
    def model(seed: int) -> Decoder:
        return latent_model("glm_moe_dsa", seed) if drafts else tiny_model(seed)

    save_checkpoint(model(1), tmp_path / "new")
    # Too small for all: some give way, and some have sampled nothing when the weights change.
    core = new_core(
        model(0),
        cache_tokens=240 if drafts else 104,
        max_running=5,
        prefill_tokens=16,
        draft_tokens=drafts,
    )
    prompts = {f"r{i}": random_prompt(i, 12 + 5 * i) for i in range(6)}
    if drafts:
        core._drafter = Oracle(model(0), prompts, 30)  # type: ignore[assignment]  # a stand-in
    told = {name: Told() for name in prompts}
    requests = [
        streamed(name, i, 12 + 5 * i, max_tokens=30, temperature=0.0 if drafts else 1.0)
        for i, name in enumerate(told)
    ]
    for request in [*requests, streamed("silent", 9, 20)]:
        core.add(request)
    step = [0]
    seen: set[tuple[int, str]] = set()

    def watch(progress: Progress) -> None:
        told[progress.id](progress)
        key = (step[0], progress.id)
        assert key not in seen or progress.restart, "one message per step and request"
        if progress.ids:
            seen.add(key)

    def between(number: int) -> None:
        step[0] = number + 1
        if number == 12:
            core.load_weights(str(tmp_path / "new"), 7, policy)

    results = drain(core, between=between, watch=watch)
    for name, notes in told.items():
        notes.check(results[name])
    stats = core.stats()
    restarts = sum(notes.restarts for notes in told.values())
    assert stats.preemptions > 0 or drafts
    assert (restarts > 0) == (policy == "requeue")
    assert restarts <= stats.requests_restarted
    if policy == "continue":
        assert any(len(result.spans) == 2 for result in results.values())
    if drafts:
        assert max(len(item.ids) for notes in told.values() for item in notes.items) > 1


async def test_a_thread_tells_before_it_answers_and_ends_what_nobody_can_take() -> None:
    engine = LocalEngine(new_core(tiny_model(max_positions=4096), max_context=4096))
    told = Told()
    told.check(await engine.generate(ask("r", random_prompt(0, 9), max_tokens=20), told))
    assert len(told.items) == 20

    def fail(progress: Progress) -> None:
        raise LookupError(f"no room for {progress.ids}")

    with pytest.raises(LookupError, match="no room"):
        await engine.generate(ask("r", random_prompt(0, 9), max_tokens=4000), fail)
    stats = await engine.stats()
    assert (stats["running"], stats["requests_finished"]) == (0, 2)
    with pytest.raises(EngineError, match="max_tokens is 0"):
        await engine.generate(ask("r", (1,), max_tokens=0), told)
    await engine.close()


async def test_a_replaced_process_tells_to_forget_what_died_with_it(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(max_positions=2048), tmp_path / "v0")
    cluster = LocalCluster()
    config = EngineConfig(max_running=4, max_context=2048, seed=0)
    engine = ProcessEngine(cluster, config, checkpoint=str(tmp_path / "v0"))

    def watcher(told: Told) -> Callable[[Progress], None]:
        def watch(progress: Progress) -> None:
            told(progress)
            if told.restarts == 0 and len(told.items) == 5 and engine.restarts == 0:
                assert engine.pid is not None
                os.kill(engine.pid, signal.SIGKILL)

        return watch

    notes = [Told() for _ in range(3)]
    try:
        await engine.start()
        requests = [
            ask(f"r{i}", random_prompt(i, 8), max_tokens=400, temperature=1.0, seed=i)
            for i in range(3)
        ]
        async with asyncio.timeout(60):
            results = await asyncio.gather(
                *(
                    engine.generate(r, watcher(told))
                    for r, told in zip(requests, notes, strict=True)
                )
            )
        for told, result in zip(notes, results, strict=True):
            told.check(result)
            assert len(output(result)) == 400
        assert engine.restarts == 1
        assert sum(told.restarts for told in notes) >= 1
        with pytest.raises(EngineError, match="cannot be sent") as caught:
            await engine.generate(ask("\ud800", (1,)))
        assert caught.value.code == EngineError.INVALID
    finally:
        await engine.close()
        await cluster.close()


def test_progress_of_uneven_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ids but 1 logprobs and 2 raw_logprobs"):
        Progress("r", (1, 2), (0.0,), (0.0, 0.0), 0)
