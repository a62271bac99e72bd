"""The HTTP surface over a real engine process that gets killed while everything is under way."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from engine_harness import VOCAB, greedy_reference, random_prompt, tiny_model

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.serving.app import create_engine_app
from headrace.engine.serving.doorway import Limits
from headrace.http.server import HttpServer
from headrace.model.checkpoint import save_checkpoint

TOKENS = 800
CONTEXT = 1024
SHORT = {"prompt_ids": [1], "sampling": {"max_tokens": 1}}


class Rig(NamedTuple):
    """A served engine and a client of it."""

    engine: ProcessEngine
    http: httpx.AsyncClient
    folder: Path


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    for version in (0, 1):
        save_checkpoint(tiny_model(version, max_positions=CONTEXT), tmp_path / f"v{version}")
    async with contextlib.AsyncExitStack() as stack:
        cluster = LocalCluster()
        stack.push_async_callback(cluster.close)
        config = EngineConfig(max_running=4, max_context=CONTEXT, max_waiting=8)
        engine = ProcessEngine(
            cluster, config, checkpoint=str(tmp_path / "v0"), log_path=str(tmp_path / "log")
        )
        stack.push_async_callback(engine.close)
        await engine.start()
        server = await HttpServer.start(create_engine_app(engine, limits=Limits(status_s=0.2)))
        stack.push_async_callback(server.stop)
        http = httpx.AsyncClient(base_url=server.url, timeout=600)
        yield Rig(engine, await stack.enter_async_context(http), tmp_path)


HUGE = 2**31 - 1
HOSTILE: dict[str, tuple[str, dict[str, Any], int]] = {
    "a byte that ends strings, in a path": ("/weights", {"path": "a\0b", "version": 1}, 422),
    "a path longer than paths": ("/weights", {"path": "/x" * 2000, "version": 1}, 422),
    "a path that is no directory": ("/weights", {"path": "/dev/zero", "version": 1}, 422),
    "a path of surrogate pairs": ("/weights", {"path": "\U0001f600", "version": 1}, 422),
    "the process itself": ("/weights", {"path": "/proc/self", "version": 1}, 422),
    "a folder of something else": ("/weights", {"path": "FOLDER", "version": 1}, 422),
    "the largest version": ("/weights", {"path": "nowhere", "version": 2**63 - 1}, 422),
    "ids beyond every vocabulary": ("/generate", {"prompt_ids": [HUGE]}, 422),
    "a prompt that fills the context": ("/generate", {"prompt_ids": [1] * CONTEXT}, 422),
    "ten thousand tokens": ("/generate", {"prompt_ids": [1] * 10_000}, 422),
    "as many outputs as can be asked for": ("/generate", {"n": 64}, 429),
    "a bias beyond the vocabulary": ("/generate", {"sampling": {"logit_bias": {"97": 1}}}, 422),
    "a bias that bans everything": (
        "/generate",
        {"sampling": {"logit_bias": {str(i): -100 for i in range(VOCAB)}}},
        200,
    ),
    "every filter at its end": (
        "/generate",
        {
            "sampling": {
                "top_k": HUGE,
                "top_p": 5e-324,
                "min_p": 1.0,
                "repetition_penalty": 0.01,
                "presence_penalty": -2,
                "frequency_penalty": 2,
                "temperature": 1e6,
                "seed": -(2**63),
                "logprobs": 20,
                "prompt_logprobs": 20,
            }
        },
        200,
    ),
    "more tokens than fit": ("/generate", {"sampling": {"max_tokens": HUGE}}, 200),
    "fewer at most than at least": ("/generate", {"sampling": {"min_tokens": HUGE}}, 422),
    "stops beyond the vocabulary": ("/generate", {"sampling": {"stop_ids": [HUGE, 0]}}, 200),
    "texts without a tokenizer": ("/generate", {"sampling": {"stop": ["\0", "é" * 128]}}, 422),
    "a text of too many bytes": ("/generate", {"sampling": {"stop": ["é" * 256]}}, 422),
    "no time at all": ("/generate", {"timeout_s": 5e-324}, 200),
    "an id of everything": ("/generate", {"id": "\0\U0001f600/../\n\u202e"}, 200),
    "extreme priority": ("/generate", {"priority": -HUGE, "session": "\0"}, 200),
    "an id that is not there": ("/abort", {"id": "\0"}, 200),
}


async def test_hostile_requests_are_answered_and_change_nothing(rig: Rig):
    (rig.folder / "config.json").mkdir()
    for what, (path, changes, status) in HOSTILE.items():
        body = dict(changes)
        if path == "/generate":
            sampling = {"max_tokens": 3, **body.pop("sampling", {})}
            body = {"prompt_ids": [1, 2], "sampling": sampling, **body}
        elif body.get("path") == "FOLDER":
            body["path"] = str(rig.folder)
        response = await rig.http.post(path, json=body)
        assert response.status_code == status, (what, response.text[:300])
        if status != 200:
            assert response.json()["error"]["message"], what
    health = (await rig.http.get("/health")).json()
    assert (health["status"], health["restarts"], health["weight_version"]) == ("ok", 0, 0)


async def test_a_killed_engine_costs_time_and_no_request(rig: Rig):
    engine, http, tmp_path = rig
    update = {"path": str(tmp_path / "v1"), "version": 1}
    assert (await http.post("/weights", json=update)).json()["version"] == 1
    begun = [asyncio.Event() for _ in range(4)]

    async def watch(number: int) -> tuple[list[int], bool, dict[str, Any]]:
        """(ids told, whether it began again, the answer) of a streamed request."""
        body = {
            "prompt_ids": random_prompt(number, 8),
            "sampling": {"max_tokens": TOKENS, "temperature": 0},
            "stream": True,
            "timeout_s": 600,
        }
        ids, again, name = [], False, ""
        async with http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                if not line.startswith("data: "):
                    continue
                data = json.loads(line.removeprefix("data: "))
                if name == "done":
                    return ids, again, data
                if name == "restart":
                    ids, again = [], True
                else:
                    ids += data["ids"]
                    begun[number].set()
        raise AssertionError("the stream ended without an end")

    tasks = [asyncio.create_task(watch(number)) for number in range(4)]
    for event in begun:
        await asyncio.wait_for(event.wait(), 60)
    killed = engine.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    # A caller that loses patience must not take the process down that is just starting.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await http.post("/generate", json={"prompt_ids": [1], "sampling": {"max_tokens": 1}})
    seen = set()
    async with asyncio.timeout(180):
        while "ok" not in seen:
            health = await http.get("/health")
            assert health.status_code == (200 if health.json()["status"] == "ok" else 503)
            seen.add(health.json()["status"])
    assert seen == {"unresponsive", "ok"}
    assert (await http.get("/health")).json()["restarts"] == 1
    assert "headrace_engine_restarts_total 1.0" in (await http.get("/metrics")).text
    streams = await asyncio.gather(*tasks)
    for number, (ids, _, answer) in enumerate(streams):
        (output,) = answer["outputs"]
        assert ids == output["ids"]
        assert len(ids) == TOKENS
        assert [span["weight_version"] for span in output["spans"]] == [1]
        prompt = random_prompt(number, 8)
        assert tuple(ids[:20]) == greedy_reference(tiny_model(1, max_positions=CONTEXT), prompt, 20)
    assert any(again for _, again, _ in streams), "what the dead process said is taken back"
    assert (engine.restarts, engine.pid != killed) == (1, True)
