"""Full load over a real server and a real engine process, with clients that behave badly.

A minute by default (HEADRACE_SOAK_S sets it), ten when slow tests are asked for. Clients abort,
hang up, repeat themselves, read slowly and send rubbish while weights change under them. Whatever
they do: each request ends exactly once, with a result or a clean error, tokens are those that were
told, versions never go back, memory stays where it was after the warm-up, and nothing is left.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_harness import VOCAB, tiny_model

from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.config import EngineConfig
from headrace.engine.serving.app import create_engine_app
from headrace.engine.serving.doorway import Limits
from headrace.http.server import ConnectionLimits, HttpServer
from headrace.model.checkpoint import save_checkpoint

SHORT_S = float(os.environ.get("HEADRACE_SOAK_S", "60"))
CLIENTS = 14
CHECKPOINTS = 3
GROWTH_BYTES = 20 * 1024 * 1024
"""What either process may grow by after the warm-up; a few are usual."""
CODES = {"overloaded", "invalid_request", "context_length_exceeded"}
CONFIG = EngineConfig(
    max_running=6,
    max_waiting=10,
    max_context=192,
    # Less than the running requests can come to need: some have to give way.
    cache_tokens=640,
    block_tokens=8,
    prefill_tokens=48,
)


def resident(pid: int) -> int:
    """Bytes of memory a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_answer(answer: dict[str, Any], n: int, max_tokens: int) -> None:
    assert [output["index"] for output in answer["outputs"]] == list(range(n))
    for output in answer["outputs"]:
        count = len(output["ids"])
        assert count <= max_tokens
        assert count == len(output["logprobs"]) == len(output["raw_logprobs"])
        assert all(value is not None for value in output["logprobs"])
        versions = [span["weight_version"] for span in output["spans"]]
        assert versions == sorted(set(versions)), "versions go up within a request"
        edges = [0, *(span["end"] for span in output["spans"])]
        assert edges[:-1] == [span["start"] for span in output["spans"]]
        assert edges[-1] == count
        if output["finish_reason"] == "length":
            assert count >= 1


class Told:
    """What one stream said so far."""

    def __init__(self, n: int) -> None:
        self.ids: dict[int, list[int]] = {index: [] for index in range(n)}
        self.versions: dict[int, int] = {}
        self.ends: list[dict[str, Any]] = []

    def add(self, name: str, data: dict[str, Any]) -> None:
        assert not self.ends, "nothing comes after the end"
        if name == "restart":
            self.ids[data["index"]] = []
        elif name == "token":
            index = data["index"]
            assert len(data["ids"]) == len(data["logprobs"]) == len(data["raw_logprobs"]) > 0
            assert data["weight_version"] >= self.versions.get(index, 0)
            self.versions[index] = data["weight_version"]
            self.ids[index] += data["ids"]
        else:
            assert name in ("done", "error")
            self.ends.append(data)


class Soak:
    """Clients, an operator and what they saw."""

    def __init__(self, server: HttpServer, http: httpx.AsyncClient, until: float) -> None:
        self._server = server
        self._http = http
        self._until = until
        self.seen: Counter[str] = Counter()

    @property
    def on(self) -> bool:
        return time.monotonic() < self._until

    async def client(self, number: int) -> None:
        """One request after the other, each with a fate drawn beforehand."""
        draw = random.Random(number)
        turn = 0
        while self.on:
            turn += 1
            n = draw.choice((1, 1, 1, 4))
            prompt = [7] * draw.randrange(1, 60) + draw.choices(range(VOCAB), k=draw.randrange(40))
            body = {
                "id": f"client-{number}/{turn}",
                "prompt_ids": prompt,
                "sampling": {"max_tokens": draw.randrange(1, 60), "temperature": 1.0},
                "n": n,
                "priority": draw.randrange(3),
                "session": f"s{number % 5}",
                "timeout_s": draw.choice((0.3, 30.0, 30.0)),
            }
            if draw.random() < 0.05:
                body["prompt_ids"] = [VOCAB] if draw.random() < 0.5 else [1] * 500
            fate = draw.choice(("wait", "wait", "watch", "watch", "abort", "leave", "hang up"))
            await getattr(self, "_" + fate.replace(" ", "_"))(body, draw)

    async def _wait(self, body: dict[str, Any], draw: random.Random) -> None:
        headers = {"idempotency-key": body["id"]} if draw.random() < 0.2 else {}
        response = await self._http.post("/generate", json=body, headers=headers)
        self._ended(response.status_code, response.json(), body)
        if headers and response.status_code == 200:
            again = await self._http.post("/generate", json=body, headers=headers)
            assert again.json() == response.json()
            self.seen["replayed"] += 1

    async def _leave(self, body: dict[str, Any], draw: random.Random) -> None:
        """Hang up after a while without having read anything."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.random() * 0.3):
                await self._http.post("/generate", json=body)
        self.seen["left"] += 1

    async def _watch(self, body: dict[str, Any], draw: random.Random) -> None:
        await self._stream(body, draw, leave_after=None)

    async def _hang_up(self, body: dict[str, Any], draw: random.Random) -> None:
        await self._stream(body, draw, leave_after=draw.randrange(1, 12))

    async def _abort(self, body: dict[str, Any], draw: random.Random) -> None:
        request = asyncio.create_task(self._http.post("/generate", json=body))
        await asyncio.wait({request}, timeout=draw.random() * 0.3)
        answer = await self._http.post("/abort", json={"id": body["id"]})
        assert answer.status_code == 200
        response = await request
        self._ended(response.status_code, response.json(), body)
        if response.status_code == 200:
            reasons = {output["finish_reason"] for output in response.json()["outputs"]}
            self.seen["aborted"] += "aborted" in reasons

    async def _stream(
        self, body: dict[str, Any], draw: random.Random, leave_after: int | None
    ) -> None:
        told, name, slow = Told(body["n"]), "", draw.random() < 0.1
        async with self._http.stream(
            "POST", "/generate", json={**body, "stream": True}
        ) as response:
            if response.status_code != 200:
                self._ended(response.status_code, json.loads(await response.aread()), body)
                return
            count = 0
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    told.add(name, json.loads(line.removeprefix("data: ")))
                    count += 1
                    if slow:
                        await asyncio.sleep(0.05)
                    if count == leave_after:
                        self.seen["hung up"] += 1
                        return
        (end,) = told.ends
        # Of several outputs, one may be refused when another has begun: that is told by an event.
        self._ended(429 if "error" in end else 200, end, body)
        if "outputs" in end:
            assert [output["ids"] for output in end["outputs"]] == list(told.ids.values())
            self.seen["watched"] += 1

    def _ended(self, status: int, answer: dict[str, Any], body: dict[str, Any]) -> None:
        if status == 200:
            assert answer["id"] == body["id"]
            check_answer(answer, body["n"], body["sampling"]["max_tokens"])
            for output in answer["outputs"]:
                self.seen[output["finish_reason"]] += 1
                self.seen["spans"] += len(output["spans"]) > 1
        else:
            assert answer["error"]["code"] in CODES, answer
            assert status in (422, 429), answer
            self.seen[answer["error"]["code"]] += 1

    async def updater(self, folder: Path) -> None:
        """New weights, again and again."""
        draw, version = random.Random(99), 0
        while self.on:
            version += 1
            body = {
                "path": str(folder / f"v{version % CHECKPOINTS}"),
                "version": version,
                "policy": draw.choice(("continue", "requeue")),
            }
            response = await self._http.post("/weights", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["version"] == version
            self.seen["updates"] += 1
            await asyncio.sleep(0.7)

    async def vandal(self) -> None:
        """Bytes that are no requests, and requests that never end."""
        draw = random.Random(98)
        heads = (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{",
            b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffff\r\n[[[",
            b"GET /metrics HTTP/1.1\r\nx-a: ",
            b"\x16\x03\x01",
        )
        while self.on:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection(self._server.host, self._server.port)
                writer.write(draw.choice(heads) + draw.randbytes(draw.randrange(2000)))
                await asyncio.sleep(0.05)
                writer.close()
            self.seen["vandalised"] += 1

    async def operator(self, engine: ProcessEngine) -> list[tuple[int, int]]:
        """Looks at everything now and then; returns (server, engine) bytes of each look."""
        sizes = []
        while self.on:
            health = await self._http.get("/health")
            assert health.json()["status"] in ("ok", "updating", "unresponsive")
            assert (await self._http.get("/metrics")).status_code == 200
            assert engine.pid is not None
            sizes.append((resident(os.getpid()), resident(engine.pid)))
            await asyncio.sleep(0.5)
        return sizes


@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(600.0, marks=pytest.mark.slow)])
async def test_full_load_with_every_kind_of_client(
    tmp_path: Path, seconds: float, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    for version in range(CHECKPOINTS):
        save_checkpoint(tiny_model(version), tmp_path / f"v{version}")
    async with contextlib.AsyncExitStack() as stack:
        cluster = LocalCluster()
        stack.push_async_callback(cluster.close)
        engine = ProcessEngine(
            cluster, CONFIG, checkpoint=str(tmp_path / "v0"), log_path=str(tmp_path / "log")
        )
        stack.push_async_callback(engine.close)
        await engine.start()
        server = await HttpServer.start(
            create_engine_app(engine, limits=Limits(body_s=2.0, replays=16)),
            limits=ConnectionLimits(head_s=2.0, linger_s=0.5),
        )
        stack.push_async_callback(server.stop)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits())
        )
        soak = Soak(server, http, time.monotonic() + seconds)
        async with asyncio.timeout(seconds + 90), asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(soak.client(number))
            group.create_task(soak.updater(tmp_path))
            group.create_task(soak.vandal())
            looks = group.create_task(soak.operator(engine))
        # What was abandoned is given up a moment later: each look is a round trip.
        async with asyncio.timeout(30):
            while (stats := await engine.stats())["running"] + stats["waiting"] > 0:
                continue
        health = (await http.get("/health")).json()
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks"]
    assert health["restarts"] == engine.restarts == 0
    assert (health["status"], health["running"], health["waiting"]) == ("ok", 0, 0)
    assert stats["requests_failed"] == 0
    assert not caplog.records, [record.getMessage() for record in caplog.records]
    # Everything that was meant to happen did.
    kinds = ("length", "aborted", "left", "hung up", "watched", "updates", "spans", "vandalised")
    assert all(soak.seen[kind] for kind in (*kinds, "replayed", "overloaded")), soak.seen
    assert stats["requests_restarted"] > 0
    assert stats["preemptions"] > 0
    sizes = looks.result()
    fifth = max(1, len(sizes) // 5)
    for who, held in zip(("server", "engine"), zip(*sizes, strict=True), strict=True):
        warm, last = (statistics.median(part) for part in (held[fifth : 3 * fifth], held[-fifth:]))
        assert last - warm < GROWTH_BYTES, f"{who} grew from {warm:.0f} to {last:.0f} bytes"
    print({**soak.seen, "requests": stats["requests_finished"], "sizes": sizes[:: 3 * fifth]})
