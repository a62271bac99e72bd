"""Two engines that act as one: what is handed over, what is not, and who may die in between."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import (
    ask,
    greedy_reference,
    latent_model,
    new_core,
    output,
    random_prompt,
    tiny_model,
)

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig, UpdatePolicy
from headrace.engine.core import EngineCore
from headrace.engine.local import LocalEngine
from headrace.engine.split import SplitEngine
from headrace.engine.types import EngineError
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.rollout.types import FinishReason

torch.set_num_threads(1)


class ThreadRole(LocalEngine):
    """An engine in a thread; `before` and `after` are called around each `ask`, and may wait."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.core = core
        self.asked: list[str] = []
        self.updated = asyncio.Event()
        self.before: Callable[[str], Any] = _nothing
        self.after: Callable[[str], Any] = _nothing

    async def start(self) -> None:
        return

    async def ask(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        self.asked.append(method)
        await self.before(method)
        answer = await super().ask(method, payload, timeout_s)
        await self.after(method)
        return answer

    async def load_weights(
        self,
        path: str,
        version: int,
        policy: UpdatePolicy = "continue",
        *,
        checkpoint: str | None = None,
    ) -> None:
        await super().load_weights(path, version, policy)
        self.updated.set()


async def _nothing(method: str) -> None:
    return


class Pair:
    """A split engine over two threads."""

    def __init__(self, min_tokens: int = 16, **sizes: object) -> None:
        self.prefill = ThreadRole(new_core(tiny_model(), **sizes))
        self.decode = ThreadRole(new_core(tiny_model(), **sizes))
        self.engine = SplitEngine(self.prefill, self.decode, min_tokens=min_tokens)

    @property
    def files(self) -> list[Path]:
        return list(self.engine._files.folder.iterdir())

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.engine.handed_over, self.engine.kept, self.engine.fell_back


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.engine.start()
    yield pair
    # Of no test anything is left.
    assert pair.files == []
    assert not pair.engine._open
    assert not pair.engine._under_way
    assert not pair.engine._aborted
    for role in (pair.prefill, pair.decode):
        if role._connection.closed:
            continue
        stats = await role.stats()
        assert stats["running"] == stats["waiting"] == 0
        assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks"]
    folder = pair.engine._files.folder
    await pair.engine.close()
    assert not folder.exists()
    await pair.engine.close()


async def test_turns_cross_over_unless_they_are_short(pair: Pair) -> None:
    prompt = random_prompt(0, 40)
    for turn, (grown, counts) in enumerate([(5, (1, 0, 0)), (30, (1, 1, 0)), (0, (2, 1, 0))]):
        result = await pair.engine.generate(ask(f"r{turn}", prompt, max_tokens=6))
        assert output(result) == greedy_reference(tiny_model(), prompt, 6)
        assert pair.counts == counts
        prompt = (*prompt, *output(result), *random_prompt(turn, grown))
    # Either engine held the first two turns, less what its last block lacks.
    assert result.reused_tokens >= 40 + 6 + 5
    assert result.reused_tokens < len(prompt) - 30
    stats = await pair.engine.stats()
    assert stats["tokens_prefilled"] == 1 + (5 + 1) + 1
    assert stats["handovers"] == stats["prefill_engine"]["handovers"] == 2
    assert (stats["handed_over"], stats["kept"], stats["fell_back"]) == (2, 1, 0)
    # The first prompt whole; of the third only what was missing.
    assert stats["prefill_engine"]["tokens_prefilled"] == 40 + (6 + 5 + 6 + 30)


async def test_scored_prompts_stay(pair: Pair) -> None:
    prompt = random_prompt(0, 40)
    result = await pair.engine.generate(ask("r", prompt, prompt_logprobs=0))
    assert len(result.prompt_logprobs) == 40
    assert pair.counts == (0, 1, 0)
    assert pair.prefill.asked == []


async def test_one_prompt_for_many_crosses_once(pair: Pair) -> None:
    prompt = random_prompt(0, 50)
    results = await asyncio.gather(
        *(pair.engine.generate(ask(f"r{i}", prompt, temperature=1.0, seed=i)) for i in range(6))
    )
    alone = LocalEngine(new_core(tiny_model()))
    for i, result in enumerate(results):
        want = await alone.generate(ask(f"r{i}", prompt, temperature=1.0, seed=i))
        assert output(result) == output(want)
    await alone.close()
    assert pair.counts == (6, 0, 0)
    assert (await pair.decode.stats())["handovers"] == 1
    assert pair.prefill.asked == ["prefill"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_weights_change_while_a_prompt_crosses(
    pair: Pair, first: str, tmp_path: Path
) -> None:
    """Between export and adoption one engine, then both, have the new weights."""
    save_checkpoint(tiny_model(1), tmp_path / "v1")
    path, updating = str(tmp_path / "v1"), []

    async def update(method: str) -> None:
        if method == "prefill" and not updating:
            updating.append(asyncio.create_task(pair.engine.load_weights(path, 1)))
            await getattr(pair, first).updated.wait()

    pair.prefill.after = update
    prompt = random_prompt(0, 40)
    result = await pair.engine.generate(ask("r", prompt))
    await asyncio.gather(*updating)
    assert pair.engine.weight_version == 1
    written = list(prompt)
    for span in result.spans:
        written += span.ids
        want = greedy_reference(tiny_model(span.weight_version), prompt, len(span.ids))
        assert len(result.spans) > 1 or span.ids == want
    # The first one knows the new version, whichever it is; decoding, it must have refused.
    stats = await pair.decode.stats()
    assert stats["handovers"] + stats["handovers_stale"] == 1
    if first == "decode":
        assert stats["handovers_stale"] == 1
        assert pair.counts == (0, 0, 1)
    # With both at one version prompts cross over again.
    again = await pair.engine.generate(ask("s", random_prompt(1, 40)))
    assert output(again) == greedy_reference(tiny_model(1), random_prompt(1, 40), 8)
    assert pair.engine.handed_over >= 1


async def test_an_engine_that_missed_an_update_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    save_checkpoint(tiny_model(1), tmp_path / "v1")
    load = pair.prefill.load_weights

    async def fails(*_: Any, **__: Any) -> None:
        raise UserError("weights: gone")

    pair.prefill.load_weights = fails  # type: ignore[method-assign]  # an engine that cannot read
    await pair.engine.load_weights(str(tmp_path / "v1"), 1)
    prompt = random_prompt(0, 40)
    assert output(await pair.engine.generate(ask("r", prompt))) == greedy_reference(
        tiny_model(1), prompt, 8
    )
    assert pair.counts == (0, 0, 1)
    assert pair.prefill.asked == []
    pair.prefill.load_weights = load  # type: ignore[method-assign]
    with pytest.raises(UserError, match="nowhere"):
        await pair.engine.load_weights(str(tmp_path / "nowhere"), 2)
    assert pair.engine.weight_version == 1
    await pair.engine.load_weights(str(tmp_path / "v1"), 3)
    await pair.engine.generate(ask("s", prompt))
    assert pair.counts == (1, 0, 1)


class Gate:
    """Stops an `ask` of one method until it is opened."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, method: str) -> None:
        if method == self.method:
            self.reached.set()
            await self.open.wait()


@pytest.mark.parametrize(("side", "method"), [("prefill", "prefill"), ("decode", "adopt")])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_aborts_and_cancels_at_any_point(
    pair: Pair, side: str, method: str, when: str
) -> None:
    for seed, how in enumerate(("abort", "cancel")):
        gate = Gate(method)
        setattr(getattr(pair, side), when, gate)
        request = ask(how, random_prompt(seed, 40), max_tokens=5)
        task = asyncio.create_task(pair.engine.generate(request))
        follower = asyncio.create_task(pair.engine.generate(ask("f" + how, request.prompt_ids)))
        async with asyncio.timeout(30):
            await gate.reached.wait()
        if how == "abort":
            await pair.engine.abort(how)
            result = await task
            assert result.finish_reason is FinishReason.ABORTED
            assert output(result) == ()
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # Who waited for the same prompt takes care of it itself.
        gate.open.set()
        want = greedy_reference(tiny_model(), request.prompt_ids, 8)
        assert output(await follower) == want
        setattr(getattr(pair, side), when, _nothing)
    await pair.engine.abort("nobody")


async def test_deadlines_hold_while_a_prompt_crosses(pair: Pair) -> None:
    gate = Gate("prefill")
    pair.prefill.before = gate
    prompt = random_prompt(0, 40)
    slow = asyncio.create_task(pair.engine.generate(ask("slow", prompt, timeout_s=0.05)))
    await gate.reached.wait()
    follower = await pair.engine.generate(ask("late", prompt, timeout_s=0.05))
    assert follower.finish_reason is FinishReason.DEADLINE
    gate.open.set()
    result = await slow
    assert result.finish_reason is FinishReason.DEADLINE
    assert output(result) == ()
    assert result.total_s >= 0.05


async def test_refusals_are_those_of_one_engine(pair: Pair) -> None:
    for request, code in (
        (ask("long", random_prompt(0, 130)), EngineError.TOO_LONG),
        (ask("bad", (*random_prompt(0, 40), 97)), EngineError.INVALID),
        (ask("worse", (*random_prompt(0, 40), 1 << 40)), EngineError.INVALID),
        (ask("hot", random_prompt(0, 40), temperature=-1.0), EngineError.INVALID),
    ):
        with pytest.raises(EngineError) as caught:
            await pair.engine.generate(request)
        assert caught.value.code == code
    gate = Gate("prefill")
    pair.prefill.before = gate
    first = asyncio.create_task(pair.engine.generate(ask("r", random_prompt(2, 40))))
    await gate.reached.wait()
    with pytest.raises(EngineError, match="in use"):
        await pair.engine.generate(ask("r", random_prompt(1, 40)))
    gate.open.set()
    await first
    with pytest.raises(ValueError, match="min_tokens is 0"):
        SplitEngine(pair.prefill, pair.decode, min_tokens=0)


async def test_overload_is_passed_on_and_closing_is_final(pair: Pair) -> None:
    async def full(method: str) -> None:
        raise EngineError(EngineError.OVERLOADED, "too much waits")

    pair.prefill.before = full
    with pytest.raises(EngineError, match="too much waits"):
        await pair.engine.generate(ask("r", random_prompt(0, 40)))
    assert pair.counts == (0, 0, 0)
    pair.prefill.before = _nothing
    told: list[int] = []
    result = await pair.engine.generate(
        ask("s", random_prompt(0, 40)), lambda progress: told.extend(progress.ids)
    )
    assert tuple(told) == output(result)
    other = SplitEngine(pair.prefill, pair.decode)
    await pair.prefill.close()
    assert output(await pair.engine.generate(ask("t", random_prompt(1, 40)))) == greedy_reference(
        tiny_model(), random_prompt(1, 40), 8
    )
    assert pair.counts == (1, 0, 1)
    assert (await pair.engine.stats())["prefill_engine"] is None
    await other.close()
    with pytest.raises(EngineError) as caught:
        await other.generate(ask("u", random_prompt(2, 90)))
    assert caught.value.code == EngineError.CLOSED


async def new_process(engine: ProcessEngine, dead: int) -> None:
    """Return once another process than `dead` answers."""
    async with asyncio.timeout(60):
        while (await engine.stats())["pid"] == dead:
            pass


class Crossing:
    """Kills a process while a prompt is on its way: its file is there, or is about to be."""

    def __init__(self, victim: ProcessEngine, method: str, asker: ProcessEngine) -> None:
        self._victim, self._method, self._asker = victim, method, asker
        self._ask = asker.ask
        self.killed = 0
        asker.ask = self  # type: ignore[method-assign]  # a test's spy

    async def __call__(self, method: str, payload: dict[str, Any], timeout_s: float) -> Any:
        if method == self._method:
            self._asker.ask = self._ask  # type: ignore[method-assign]
            self.killed = self._victim.pid or 0
            os.kill(self.killed, signal.SIGKILL)
        return await self._ask(method, payload, timeout_s)


@pytest.mark.parametrize(
    "kills",
    [
        [("prefill", "prefill"), ("decode", "adopt")],
        pytest.param(
            [("decode", "prefill"), ("prefill", "adopt"), ("decode", "held")],
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_either_process_may_be_killed_at_any_time(
    kills: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Nothing is lost, nothing left behind, and prompts cross over again afterwards."""
    models = [latent_model("glm_moe_dsa", seed) for seed in range(2)]
    for version, model in enumerate(models):
        save_checkpoint(model, tmp_path / f"v{version}")
    cluster = LocalCluster()
    config = EngineConfig(max_running=8, max_context=256, draft_tokens=2)
    prefill, decode = (
        ProcessEngine(
            cluster, config, checkpoint=str(tmp_path / "v0"), log_path=str(tmp_path / "log")
        )
        for _ in range(2)
    )
    engine = SplitEngine(prefill, decode, min_tokens=32)
    folder = engine._files.folder
    numbers = iter(range(1000))

    async def check(version: int) -> None:
        number = next(numbers)
        prompt = random_prompt(number, 100)
        result = await engine.generate(ask(f"r{number}", prompt, max_tokens=6))
        assert output(result) == greedy_reference(models[version], prompt, 6)
        assert {span.weight_version for span in result.spans} == {version}

    try:
        await engine.start()
        await check(0)
        assert engine.handed_over == 1
        await engine.load_weights(str(tmp_path / "v1"), 1)
        for name, method in kills:
            victim = prefill if name == "prefill" else decode
            crossing = Crossing(victim, method, prefill if method == "prefill" else decode)
            await asyncio.gather(*(check(1) for _ in range(3)))
            assert list(folder.iterdir()) == []
            await new_process(victim, crossing.killed)
            before = engine.handed_over
            await check(1)
            assert engine.handed_over == before + 1
        assert prefill.restarts + decode.restarts == len(kills)
        assert (await engine.stats())["prefill_engine"]["version"] == 1
        # Closing does not wait for the process that is to replace a dead one.
        Crossing(prefill, "prefill", prefill)
        fell_back = engine.fell_back
        await check(1)
        assert engine.fell_back == fell_back + 1
    finally:
        await engine.close()
        await cluster.close()
    assert not folder.exists()
