"""The asyncio clients: many callers at once, updates in flight, and a process that gets killed."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_harness import (
    VOCAB,
    ask,
    greedy_reference,
    latent_model,
    new_core,
    output,
    random_prompt,
    tiny_model,
)

from headrace.cluster.local import LocalCluster, LocalHandle
from headrace.cluster.pending import PendingRequests
from headrace.cluster.types import Reply, WorkerDied, WorkerSpec
from headrace.engine.client import ProcessEngine
from headrace.engine.core import EngineConfig, EngineCore
from headrace.engine.local import LocalEngine
from headrace.engine.types import EngineError
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.rollout.types import FinishReason

LONG = 4000
"""Tokens that no test waits for: enough to be still running whatever the machine is doing."""


def long_core(**config: object) -> EngineCore:
    return new_core(tiny_model(max_positions=4096), max_context=4096, **config)


@pytest.fixture
async def local() -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(long_core(max_running=4, max_waiting=4))
    yield engine
    await engine.close()


async def until_sampling(engine: LocalEngine | ProcessEngine, tokens: int) -> None:
    """Return once the engine has drawn `tokens` tokens; each look is a round trip through it."""
    async with asyncio.timeout(30):
        while (await engine.stats())["tokens_sampled"] < tokens:
            pass


async def test_local_engine_serves_concurrent_requests(local: LocalEngine) -> None:
    prompts = [random_prompt(i, 5 + i) for i in range(7)]
    results = await asyncio.gather(
        *(local.generate(ask(f"r{i}", prompt)) for i, prompt in enumerate(prompts))
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert output(result) == greedy_reference(tiny_model(), prompt, 8)
    stats = await local.stats()
    assert stats["requests_finished"] == 7
    assert stats["busy_s"] > 0
    assert local.max_context == stats["max_context"] == 4096


async def test_local_engine_aborts_updates_and_refuses(local: LocalEngine, tmp_path: Path) -> None:
    save_checkpoint(tiny_model(1, max_positions=4096), tmp_path / "v1")
    task = asyncio.create_task(local.generate(ask("r", (1, 2, 3), max_tokens=LONG)))
    await until_sampling(local, 2)
    await local.load_weights(str(tmp_path / "v1"), 1)
    assert local.weight_version == 1
    await local.abort("r")
    result = await task
    assert result.finish_reason is FinishReason.ABORTED
    assert {span.weight_version for span in result.spans} <= {0, 1}
    with pytest.raises(EngineError) as caught:
        await local.generate(ask("bad", (VOCAB,)))
    assert caught.value.code == EngineError.INVALID
    with pytest.raises(UserError, match="nowhere"):
        await local.load_weights(str(tmp_path / "nowhere"), 2)
    assert local.weight_version == 1


async def test_cancelled_caller_frees_its_slot(local: LocalEngine) -> None:
    task = asyncio.create_task(local.generate(ask("r", (1, 2, 3), max_tokens=LONG)))
    await until_sampling(local, 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    # The abort was queued before this look at the engine.
    stats = await local.stats()
    assert stats["running"] == 0
    assert output(await local.generate(ask("r", (4, 5)))) == greedy_reference(
        tiny_model(), (4, 5), 8
    )


async def test_a_cancellation_that_comes_with_the_answer_is_kept(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PendingRequests.take

    def take_and_cancel(pending: PendingRequests, reply: Reply) -> None:
        take(pending, reply)
        asking.cancel()

    monkeypatch.setattr(PendingRequests, "take", take_and_cancel)
    asking = asyncio.create_task(local.stats())
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_closed_local_engine_fails_what_is_open() -> None:
    engine = LocalEngine(long_core())
    task = asyncio.create_task(engine.generate(ask("r", (1, 2, 3), max_tokens=LONG)))
    await until_sampling(engine, 1)
    await engine.close()
    with pytest.raises(EngineError) as caught:
        await task
    assert caught.value.code == EngineError.CLOSED
    with pytest.raises(EngineError):
        await engine.generate(ask("s", (1,)))


class CountingCluster(LocalCluster):
    """A cluster that tells when and how often it starts something."""

    def __init__(self) -> None:
        super().__init__()
        self.started: asyncio.Queue[WorkerSpec] = asyncio.Queue(10)

    async def start(self, spec: WorkerSpec) -> LocalHandle:
        handle = await super().start(spec)
        self.started.put_nowait(spec)
        return handle


async def test_an_impatient_caller_does_not_end_a_start(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(0), tmp_path / "v0")
    cluster = CountingCluster()
    engine = ProcessEngine(
        cluster,
        EngineConfig(max_context=128),
        checkpoint=str(tmp_path / "v0"),
        log_path=str(tmp_path / "log"),
    )
    try:
        impatient = asyncio.create_task(engine.generate(ask("a", (1,))))
        await asyncio.wait_for(cluster.started.get(), 30)
        patient = asyncio.create_task(engine.generate(ask("b", (1, 2, 3))))
        impatient.cancel()
        assert output(await patient) == greedy_reference(tiny_model(0), (1, 2, 3), 8)
        assert cluster.started.empty()
        assert (await engine.stats())["restarts"] == engine.restarts == 0
    finally:
        await engine.close()
        await cluster.close()


async def test_an_engine_closed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(0), tmp_path / "v0")
    cluster = CountingCluster()
    engine = ProcessEngine(
        cluster,
        EngineConfig(max_context=128),
        checkpoint=str(tmp_path / "v0"),
        log_path=str(tmp_path / "log"),
    )
    waiting = asyncio.create_task(engine.generate(ask("a", (1,))))
    await asyncio.wait_for(cluster.started.get(), 30)
    await engine.close()
    with pytest.raises(EngineError) as caught:
        await waiting
    assert caught.value.code == EngineError.CLOSED
    assert not any(handle.alive for handle in cluster._handles)
    await cluster.close()


async def test_killed_process_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(0), tmp_path / "v0")
    save_checkpoint(tiny_model(1), tmp_path / "v1")
    cluster = LocalCluster()
    engine = ProcessEngine(
        cluster,
        EngineConfig(engine_id="engine-7", max_running=4, max_context=256),
        checkpoint=str(tmp_path / "v0"),
        log_path=str(tmp_path / "engine.log"),
    )
    try:
        await engine.start()
        first = await engine.generate(ask("warm", (1, 2, 3)))
        assert output(first) == greedy_reference(tiny_model(0), (1, 2, 3), 8)
        assert first.spans[0].engine_id == "engine-7"
        await engine.load_weights(str(tmp_path / "v1"), 1)
        assert engine.weight_version == 1
        prompts = [random_prompt(i, 8) for i in range(6)]
        tasks = [
            asyncio.create_task(engine.generate(ask(f"r{i}", prompt, max_tokens=100)))
            for i, prompt in enumerate(prompts)
        ]
        doomed = asyncio.create_task(engine.generate(ask("doomed", (9,), max_tokens=100)))
        await until_sampling(engine, 40)
        killed = engine.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await engine.abort("doomed")
        results = await asyncio.gather(*tasks)
        assert engine.restarts == 1
        assert engine.pid != killed
        for prompt, result in zip(prompts, results, strict=True):
            assert result.finish_reason is FinishReason.LENGTH
            assert [span.weight_version for span in result.spans] == [1]
            assert output(result)[:20] == greedy_reference(tiny_model(1), prompt, 20)
        assert (await doomed).finish_reason is FinishReason.ABORTED
        with pytest.raises(UserError, match="gone"):
            await engine.load_weights(str(tmp_path / "gone"), 2)
        assert engine.weight_version == 1
    finally:
        await engine.close()
        await cluster.close()
    with pytest.raises(EngineError) as caught:
        await engine.generate(ask("late", (1,)))
    assert caught.value.code == EngineError.CLOSED


async def test_process_serves_a_latent_checkpoint(tmp_path: Path) -> None:
    models = [latent_model("glm_moe_dsa", seed) for seed in range(2)]
    for version, model in enumerate(models):
        save_checkpoint(model, tmp_path / f"v{version}")
    cluster = LocalCluster()
    config = EngineConfig(max_running=2, max_context=64)
    engine = ProcessEngine(cluster, config, checkpoint=str(tmp_path / "v0"))
    try:
        await engine.start()
        for version, model in enumerate(models):
            if version:
                await engine.load_weights(str(tmp_path / f"v{version}"), version)
            result = await engine.generate(ask("r", random_prompt(version, 20)))
            assert output(result) == greedy_reference(model, random_prompt(version, 20), 8)
    finally:
        await engine.close()
        await cluster.close()


async def test_unusable_checkpoint_is_the_users_error(tmp_path: Path) -> None:
    cluster = LocalCluster()
    engine = ProcessEngine(cluster, EngineConfig(), checkpoint=str(tmp_path / "missing"))
    try:
        with pytest.raises(UserError, match="missing"):
            await engine.start()
    finally:
        await engine.close()
        await cluster.close()


class DyingHandle:
    """A worker that ends whenever it is asked to generate."""

    name = "dying"
    pid = 0

    def __init__(self) -> None:
        self.alive = True

    async def request(
        self,
        method: str,
        payload: dict[str, object] | None = None,
        *,
        timeout_s: float = 60.0,
        on_part: object = None,
    ) -> object:
        if method == "generate":
            self.alive = False
            raise WorkerDied("dying (pid 0) ended")
        return {}

    async def wait_dead(self) -> None:
        return

    async def stop(self, *, grace_s: float = 5.0) -> None:
        self.alive = False


class DyingCluster:
    def __init__(self) -> None:
        self.started = 0

    async def start(self, spec: object) -> DyingHandle:
        self.started += 1
        return DyingHandle()

    async def close(self) -> None:
        return


async def test_a_request_that_keeps_killing_the_engine_is_given_up() -> None:
    cluster = DyingCluster()
    engine = ProcessEngine(cluster, EngineConfig(), checkpoint="unused", retries=3)
    with pytest.raises(EngineError, match="died 4 times") as caught:
        await engine.generate(ask("r", (1,)))
    assert caught.value.code == EngineError.FAILED
    assert cluster.started == 4
    await engine.close()
