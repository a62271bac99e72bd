"""Several engines behind `headrace serve` and `headrace engine`: they share cores and requests, one
of them may be killed while requests run, and everybody can see how each of them is."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from openai import AsyncOpenAI

from headrace.cli import main
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.replicas import share_cores
from headrace.served_engine import ServeOptions, open_engine
from headrace.tokens.training import train_tokenizer

LONG = 600
"""Tokens of an answer: nobody is done before the replica is killed at the first token of all."""

_COMMAND = (sys.executable, "-m", "headrace.cli")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicas") / "model"
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=1024,
    )
    model = Decoder(config)
    model.init_weights(0)
    save_checkpoint(model, path)
    train_tokenizer(["count the lines of a file"] * 4, 300).save(path)
    return path


def test_cores_are_divided_and_misfits_are_named():
    assert share_cores(range(4), None, 1) == ((0, 1, 2, 3),)
    assert share_cores(range(4), None, 2) == ((0, 1), (2, 3))
    assert share_cores(range(4), 3, 2) == ((0, 1), (2,))
    assert share_cores(range(2), None, 3) == ((0,), (1,), (0,)), "one core each, shared"
    for threads, replicas, words in (
        (5, 2, "--threads 5: only 4"),
        (2, 3, "--threads 2: 3 replicas"),
        (None, 0, "--replicas 0"),
        (None, 65, "--replicas 65"),
    ):
        with pytest.raises(UserError, match=words):
            share_cores(range(4), threads, replicas)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine", "--replicas", "2", "--threads", "1"], "fewer --replicas"),
        (["serve", "--replicas", "2", "--threads", "1"], "fewer --replicas"),
        (["serve", "--replicas", "2", "--engine", "vllm"], "name each with an --engine-url"),
        (["serve", *["--engine", "vllm"], *["--engine-url", "http://x"] * 2], "each server once"),
        (
            ["serve", "--engine", "vllm", "--engine-url", "http://x", "--engine-url", "y"],
            "http://127.0.0.1:8000",
        ),
        (["serve", "--engine-url", "http://x", "--engine-url", "http://y"], "choose the server's"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, arguments: list[str], words: str
):
    assert main([arguments[0], str(checkpoint), "--port", "0", *arguments[1:]]) == 2
    line = capsys.readouterr().err
    assert line.startswith("headrace: ")
    assert line.count("\n") == 1
    assert words in line


class Server:
    """A command that serves, and what it has printed."""

    def __init__(self, out: IO[str], pid: int) -> None:
        self.told: dict[str, str] = {}
        self.pid = pid
        self._out = out
        while "Ctrl-C" not in (line := self.line()):
            name, _, value = line.strip().partition("  ")
            self.told[name] = value.strip()

    def line(self) -> str:
        line = self._out.readline()
        assert line, "it has ended"
        return line

    def engines(self) -> list[int]:
        """Processes of its replicas, in the order in which they started."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        return sorted(pid for pid, words in commands.items() if b"headrace.cluster.worker" in words)


@contextlib.contextmanager
def serving(command: str, checkpoint: Path) -> Iterator[Server]:
    """The command with two replicas; it has to end well, and to leave nothing behind."""
    process = subprocess.Popen(
        [*_COMMAND, command, str(checkpoint), "--port", "0", "--replicas", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield Server(process.stdout, process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


async def test_chats_outlive_a_killed_replica(checkpoint: Path):
    with serving("serve", checkpoint) as server:
        assert server.told["replicas"].startswith("2 on cores")
        base = server.told["base URL"]
        async with AsyncOpenAI(base_url=base, api_key=server.told["API key"]) as client:
            begun: asyncio.Queue[int] = asyncio.Queue()

            async def answer(number: int) -> tuple[str, str | None]:
                stream = await client.chat.completions.create(
                    model="headrace",
                    messages=[{"role": "user", "content": f"count {number}"}],
                    max_tokens=LONG,
                    seed=number,
                    stream=True,
                    logit_bias={"0": -100, "1": -100, "2": -100},
                )
                text, reason, told = "", None, False
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason or reason
                    if text and not told:
                        told = True
                        begun.put_nowait(number)
                return text, reason

            async def ask_all(kill: bool) -> list[tuple[str, str | None]]:
                asked = [asyncio.create_task(answer(i)) for i in range(6)]
                for _ in asked:
                    await begun.get()
                if kill:
                    os.kill(server.engines()[0], signal.SIGKILL)
                return await asyncio.gather(*asked)

            undisturbed = await ask_all(kill=False)
            disturbed = await ask_all(kill=True)
            assert disturbed == undisturbed, "the same tokens, whoever samples them"
            assert len({text for text, _ in disturbed}) == 6
            lines = [await asyncio.to_thread(server.line) for _ in range(2)]
            assert "died; starts again" in lines[0]
            assert "serves again" in lines[1]
            (model,) = (await client.models.list()).data
            async with httpx.AsyncClient() as http:
                health = await http.get(base.removesuffix("v1") + "health")
        assert model.id == "headrace"
        replicas: list[dict[str, Any]] = getattr(model, "replicas")  # noqa: B009  # an extra field
        assert [one["name"] for one in replicas] == ["engine-0", "engine-1"]
        assert {one["state"] for one in replicas} == {"serving"}
        assert sorted(one["restarts"] for one in replicas) == [0, 1]
        assert {one["last_fault"] for one in replicas} == {None, "died"}
        assert health.json()["replicas"] == replicas
        assert len(server.engines()) == 2


async def test_generations_outlive_a_killed_replica_and_metrics_tell(checkpoint: Path):
    with serving("engine", checkpoint) as server:
        async with httpx.AsyncClient(base_url=server.told["URL"], timeout=60) as client:

            async def ask(number: int, begun: asyncio.Event | None = None) -> dict[str, Any]:
                body = {
                    "prompt_ids": [5, number],
                    "sampling": {"max_tokens": LONG, "seed": number},
                    "stream": True,
                }
                done = None
                async with client.stream("POST", "/generate", json=body) as response:
                    async for line in response.aiter_lines():
                        if begun is not None and line.startswith("event: token"):
                            begun.set()
                        if line.startswith("data: "):
                            done = json.loads(line.removeprefix("data: "))
                assert done is not None
                return done["outputs"][0]

            undisturbed = [await ask(i) for i in range(4)]
            assert {o["spans"][0]["engine_id"] for o in undisturbed} <= {"engine-0", "engine-1"}
            events = [asyncio.Event() for _ in range(4)]
            asked = [asyncio.create_task(ask(i, event)) for i, event in enumerate(events)]
            await asyncio.gather(*(event.wait() for event in events))
            os.kill(server.engines()[0], signal.SIGKILL)
            for one, other in zip(await asyncio.gather(*asked), undisturbed, strict=True):
                assert one["ids"] == other["ids"]
                assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
                assert (one["spans"][0]["start"], one["spans"][-1]["end"]) == (0, LONG)
            lines = [await asyncio.to_thread(server.line) for _ in range(2)]
            assert "serves again" in lines[1]
            health = (await client.get("/health")).json()
            assert (health["status"], health["restarts"]) == ("ok", 1)
            assert [one["name"] for one in health["replicas"]] == ["engine-0", "engine-1"]
            metrics = (await client.get("/metrics")).text
            for name in ("engine-0", "engine-1"):
                assert f'headrace_engine_replica_up{{replica="{name}"}} 1.0' in metrics
            sums = [
                float(line.split()[-1])
                for line in metrics.splitlines()
                if line.startswith("headrace_engine_replica_restarts_total{")
            ]
            assert sorted(sums) == [0.0, 1.0]


async def test_servers_share_requests_and_one_that_was_gone_is_used_again(checkpoint: Path):
    """Two servers of another make: one goes away and comes back on its port."""
    import uvicorn
    from vllm_fake import VllmFake

    from headrace.engine.types import GenerationRequest, SamplingParams

    async def start(port: int = 0) -> tuple[uvicorn.Server, asyncio.Task[None], int]:
        fake = VllmFake(str(checkpoint), 64)
        server = uvicorn.Server(
            uvicorn.Config(fake.app, port=port, log_level="warning", lifespan="off")
        )
        task = asyncio.create_task(server.serve())
        async with asyncio.timeout(20):
            while not server.started:  # noqa: ASYNC110  # it has no event to wait for
                await asyncio.sleep(0)
        return server, task, server.servers[0].sockets[0].getsockname()[1]

    running = [await start(), await start()]
    urls = tuple(f"http://127.0.0.1:{port}" for _, _, port in running)
    said: asyncio.Queue[str] = asyncio.Queue()
    options = ServeOptions(engine="vllm", engine_urls=urls)
    try:
        async with open_engine(checkpoint, options, report=said.put_nowait) as engine:
            assert engine.max_context == 1024, "the model's, until the servers have told theirs"
            await engine.start()
            assert engine.max_context == 64

            async def ask(number: int) -> str:
                prompt = tuple(range(number, number + 40))
                result = await engine.generate(
                    GenerationRequest(f"r{number}", prompt, SamplingParams(max_tokens=5))
                )
                assert sum(len(span.ids) for span in result.spans) == 5
                return result.spans[0].engine_id

            served = [await ask(i) for i in range(12)]
            assert set(served) == {"engine-0", "engine-1"}
            server, task, port = running[0]
            server.should_exit = True
            await task
            assert {await ask(i) for i in range(12)} == {"engine-1"}
            assert "engine-0" in await asyncio.wait_for(said.get(), 20)
            running[0] = await start(port)
            while "engine-0 serves again" not in await asyncio.wait_for(said.get(), 60):
                pass
            assert [await ask(i + 50) for i in range(12)].count("engine-0") >= 3
    finally:
        for server, task, _ in running:
            server.should_exit = True
            await task
