"""Engines of every make behind one door, for tests that hold all of them to one contract."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from engine_harness import tiny_model
from sglang_fake import SglangFake
from toy_server import STEP_S, ToyServer
from vllm_fake import VllmFake

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.local import LocalEngine
from headrace.engine.servers.sglang import SglangEngine
from headrace.engine.servers.vllm import VllmEngine
from headrace.engine.types import EngineClient
from headrace.model.checkpoint import load_checkpoint, save_checkpoint

CONTEXT = 512
LONG = 400
"""Tokens of a request that is to be running when something happens to it."""
REAL_CONTEXT = 32768
REAL_LONG = 32000
"""The same for a real server, whose speed is anything: half a minute where it is fastest."""
MAX_OPEN = 6
VLLM_PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON")


def save_tiny(folder: Path, seed: int) -> Path:
    """A checkpoint whose shapes every engine takes."""
    path = folder / f"seed{seed}"
    model = tiny_model(
        seed,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_positions=REAL_CONTEXT,
    )
    save_checkpoint(model, path)
    return path


class HeldCore(EngineCore):
    """Samples up to a number of tokens, and more only after an abort or new weights: a test that
    wants to come in between is never late."""

    hold_at: int | None = None

    def step(self) -> list[Any]:
        if self.hold_at is not None and self.stats().tokens_sampled >= self.hold_at:
            time.sleep(0.001)
            return []
        time.sleep(STEP_S)  # as slow as the toy: 400 tokens outlast a short deadline
        return super().step()

    def abort(self, request_id: str) -> None:
        self.hold_at = None
        super().abort(request_id)

    def load_weights(self, *args: Any, **options: Any) -> None:
        self.hold_at = None
        super().load_weights(*args, **options)


class Rig:
    """An engine that is ready.

    Attributes:
        engine: what is tested.
        context: most tokens of a request.
        long: tokens of a request that nobody waits for.
        exact: whether it stamps versions, rather than bounding them.
        server: the fake behind it.
        core: the embedded engine.
    """

    def __init__(
        self,
        engine: Any,
        *,
        exact: bool = True,
        server: ToyServer | None = None,
        core: HeldCore | None = None,
    ) -> None:
        self.engine: EngineClient = engine
        real = server is None and core is None
        self.context = REAL_CONTEXT if real else CONTEXT
        self.long = REAL_LONG if real else LONG
        self.exact = exact
        self.server = server
        self.core = core

    async def sampled(self) -> int:
        """Tokens so far, of unfinished requests too."""
        if self.server is not None:
            return self.server.sampled
        if isinstance(self.engine, VllmEngine):
            return await sampled_by_vllm(self.engine.url)
        return (await self.engine.stats())["tokens_sampled"]

    async def running(self, tokens: int = 3) -> None:
        """Wait until that many more tokens were sampled."""
        if self.core is not None:
            # Before anything that was asked for in this step of the loop has begun.
            goal = self.core.hold_at = self.core.stats().tokens_sampled + tokens
        else:
            goal = await self.sampled() + tokens
        async with asyncio.timeout(60):
            while await self.sampled() < goal:  # noqa: ASYNC110  # counters, of servers too
                await asyncio.sleep(0.002)


async def sampled_by_vllm(url: str) -> int:
    """Tokens that a real server has sampled, of unfinished requests too."""
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"{url}/metrics")).text
    found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def vllm(fake: VllmFake, path: Path, **options: Any) -> VllmEngine:
    return VllmEngine("http://vllm", path, transport=httpx.ASGITransport(fake.app), **options)


def sglang(fake: SglangFake, path: Path, **options: Any) -> SglangEngine:
    return SglangEngine("http://sglang", path, transport=httpx.ASGITransport(fake.app), **options)


@asynccontextmanager
async def rig(kind: str, path: Path, url: str | None = None) -> AsyncIterator[Rig]:
    """An engine of a kind over the checkpoint at `path`; `url` is of a real server."""
    if kind == "embedded":
        config = EngineConfig(max_running=4, max_waiting=MAX_OPEN - 4, max_context=CONTEXT, seed=1)
        core = HeldCore(load_checkpoint(path), config)
        made = Rig(LocalEngine(core), core=core)
    elif kind == "sglang":
        fake = SglangFake(str(path), CONTEXT)
        engine = sglang(fake, path, max_open=MAX_OPEN)
        await engine.start()
        made = Rig(engine, exact=False, server=fake)
    elif kind == "vllm":
        fake = VllmFake(str(path), CONTEXT)
        engine = vllm(fake, path, max_open=MAX_OPEN)
        await engine.start()
        made = Rig(engine, server=fake)
    else:
        assert url is not None
        engine = VllmEngine(url, path, max_open=MAX_OPEN)
        await engine.start()
        made = Rig(engine)
    try:
        yield made
    finally:
        await made.engine.close()
