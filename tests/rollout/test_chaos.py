"""Replicas killed, stopped, slowed and given other weights under load: every session ends, and what
is recorded keeps the laws."""

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.types import EngineClient, EngineError
from headrace.errors import UserError
from headrace.gateway.gateway import Gateway
from headrace.gateway.turn import ApiError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.replicas.health import HealthPolicy
from headrace.rollout.replicas.replica import Weights
from headrace.rollout.replicas.router import Router
from headrace.rollout.segments import accounting, segments
from headrace.rollout.types import Call, Outcome, Session
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.training import train_tokenizer

TURNS = 10
POLICY = HealthPolicy(
    beat_interval_s=0.25,
    beat_timeout_s=2.0,
    missed_beats=2,
    stuck_s=20.0,
    start_timeout_s=120.0,
    backoff_s=0.2,
    backoff_most_s=2.0,
)


class Zoo:
    """Replicas in processes, and what has been done to them."""

    def __init__(self, folder: Path) -> None:
        self.cluster = LocalCluster()
        self.engines: dict[str, ProcessEngine] = {}
        self.folder = folder
        self.faults: list[str] = []

    async def start(self, name: str, checkpoint: str, version: int) -> EngineClient:
        config = EngineConfig(engine_id=name, max_running=16, max_context=1024, max_waiting=64)
        engine = ProcessEngine(
            self.cluster, config, checkpoint=checkpoint, version=version, retries=0, one_life=True
        )
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        self.engines[name] = engine
        return engine

    async def harm(self, chance: random.Random) -> None:
        """One fault of a random kind to a random replica."""
        name = chance.choice(sorted(self.engines))
        engine = self.engines[name]
        kind = chance.choice(["kill", "stop", "slow", "version"])
        pid = engine.pid
        self.faults.append(kind)
        try:
            if kind == "version":
                async with asyncio.timeout(5):
                    await engine.load_weights(str(self.folder), 99)
            elif pid is not None:
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                if kind == "slow":
                    await asyncio.sleep(0.5)
                    os.kill(pid, signal.SIGCONT)
        except (EngineError, UserError, ProcessLookupError, TimeoutError):
            return  # It was gone already.


@pytest.fixture
async def zoo(tmp_path: Path) -> AsyncIterator[Zoo]:
    config = ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=1024,
        tie_embeddings=True,
    )
    model = Decoder(config)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "model")
    made = Zoo(tmp_path / "model")
    yield made
    await made.cluster.close()


async def talk(
    gateway: Gateway, name: str, over: asyncio.Event, seed: int, answered: list[float]
) -> Outcome:
    """A session of some turns; returns how it ended, notes when each turn was answered."""
    key = gateway.open_session(name, seed=seed)
    messages = [{"role": "user", "content": f"hello {name}"}]
    for _ in range(TURNS):
        for _ in range(20):
            try:
                body = {"messages": messages, "max_tokens": 12}
                response = await gateway.chat(key, body)
                break
            except ApiError as error:
                if error.status not in (429, 500, 503, 504):
                    return Outcome.AGENT_FAILED
                await asyncio.sleep(0.2)
        else:
            return Outcome.ENV_FAILED
        answered.append(time.monotonic())
        messages += [response["choices"][0]["message"], {"role": "user", "content": "go on"}]
        if over.is_set():
            break
    return Outcome.OK


def check(name: str, calls: tuple[Call, ...]) -> None:
    """Laws L1, L2, L4 and L5 of one session, and versions that never go back within a call."""
    paths: dict[str, int] = {}
    for call in calls:
        versions = [span.weight_version for span in call.spans]
        assert versions == sorted(versions)
        assert set(versions) <= {0, 99}
        held = paths.get(call.parent_id or "", 0)
        paths[call.id] = held + len(call.prompt_delta) + len(call.output_ids)
        assert call.index == 0 or call.parent_id is not None, "a faithful client never forks"
    session = Session(name, "rl", "train", "t", {}, "g", Outcome.OK, calls=calls)
    account = accounting(session)
    trained = sum(sum(segment.train_mask) for segment in segments(session))
    assert account.sampled == sum(len(call.output_ids) for call in calls) == trained


class Throughput(NamedTuple):
    """Turns per second in two windows of one length under one load."""

    before: float
    """Of any fault."""
    after: float
    """The last fault, and every replica's return."""
    recovered_s: float
    """From the last fault until every replica served again."""


async def chaos(
    zoo: Zoo,
    seconds: float,
    seed: int,
    *,
    replicas: int = 4,
    sessions: int = 64,
    window_s: float = 0.0,
) -> Throughput:
    """Sessions without a pause, with faults for some time; all laws are checked.

    Args:
        sessions: how many go on at any time.
        window_s: seconds to measure before and after the faults, after as many to settle.
    """
    chance = random.Random(seed)
    router = Router(Weights(str(zoo.folder), 0), policy=POLICY, retries=20)
    for i in range(replicas):
        name = f"engine-{i}"
        router.add(name, lambda path, version, name=name: zoo.start(name, path, version))
    gateway = Gateway(router, CompactRenderer(train_tokenizer([], 512)), request_timeout_s=60.0)
    answered: list[float] = []
    outcomes: list[Outcome] = []
    numbers = itertools.count(1)
    over = asyncio.Event()

    async def agent() -> None:
        while not over.is_set():
            number = next(numbers)
            name = f"session-{number}"
            outcome = await talk(gateway, name, over, number, answered)
            calls = await gateway.close_session(name)
            router.release(name)
            outcomes.append(outcome)
            check(name, calls)

    async def rate() -> float:
        """Turns per second, of the sessions that are going on anyway."""
        await asyncio.sleep(window_s / 2)
        begin = time.monotonic()
        await asyncio.sleep(window_s)
        return sum(begin <= at < begin + window_s for at in answered) / window_s

    async def play() -> Throughput:
        before = await rate() if window_s else 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await zoo.harm(chance)
            last = time.monotonic()
            await asyncio.sleep(chance.uniform(0.5, 3.0))
        # A stopped replica is found out by its heartbeats only.
        await asyncio.sleep(
            POLICY.missed_beats * POLICY.beat_timeout_s + 2 * POLICY.beat_interval_s
        )
        await router.ready(replicas, timeout_s=120.0)
        recovered_s = time.monotonic() - last
        after = await rate() if window_s else 0.0
        over.set()
        return Throughput(before, after, recovered_s)

    try:
        await router.ready(replicas)
        async with asyncio.timeout(3 * seconds + 4 * window_s + 180), asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(agent())
            played = group.create_task(play())
        assert outcomes
        assert set(outcomes) == {Outcome.OK}, "only engines failed, and they were replaced"
        stats = await router.stats()
        assert stats["running"] == stats["waiting"] == 0
        told = router.counters
        assert sum(told[f"fault.{kind}"] for kind in ("died", "missed_heartbeats", "wrong_version"))
        return played.result()
    finally:
        await gateway.close()
        await router.close()


async def test_every_session_ends_and_the_laws_hold(zoo: Zoo) -> None:
    await chaos(zoo, 5.0, seed=1, replicas=3, sessions=32)
    assert zoo.faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
async def test_a_minute_of_chaos_and_throughput_comes_back(
    zoo: Zoo, seed: int, tmp_path: Path
) -> None:
    found = await chaos(zoo, 60.0, seed, window_s=20.0)
    figures = {
        "turns_per_s_before": found.before,
        "turns_per_s_after": found.after,
        "ratio": found.after / found.before,
        "recovered_s": found.recovered_s,
        "faults": dict(Counter(zoo.faults)),
    }
    (tmp_path / "chaos.json").write_text(json.dumps(figures))
    print(json.dumps(figures))
    assert found.after >= 0.9 * found.before, figures
