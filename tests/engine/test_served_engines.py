"""`headrace serve --engine` from its options to a server on a socket."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn
from adapter_rigs import REAL_CONTEXT, REAL_LONG, VLLM_PYTHON, sampled_by_vllm, save_tiny
from engine_harness import ask, output, tiny_model
from tokenizers import Tokenizer
from toy_server import until
from vllm_fake import VllmFake

from headrace.engine.servers.engine import HttpEngine
from headrace.engine.types import EngineError, GenerationRequest, SamplingParams
from headrace.model.checkpoint import save_checkpoint
from headrace.rollout.types import FinishReason
from headrace.served_engine import ServeOptions, open_engine


async def test_a_running_server_is_used_as_an_engine(tmp_path):
    """The whole way: options, adapter, a real socket, and nothing left of it afterwards."""
    checkpoint = save_tiny(tmp_path, 0)
    fake = VllmFake(str(checkpoint), 64)
    config = uvicorn.Config(fake.app, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    options = ServeOptions(engine="vllm", engine_urls=(f"http://127.0.0.1:{port}",))
    try:
        async with open_engine(checkpoint, options) as engine:
            await engine.start()
            assert engine.max_context == 64
            request = GenerationRequest("a", (1, 2), SamplingParams(max_tokens=5))
            result = await engine.generate(request)
            assert sum(len(span.ids) for span in result.spans) == 5
            # A client that goes away ends its request at the server.
            long = GenerationRequest("b", (1, 2), SamplingParams(max_tokens=60))
            asked = asyncio.create_task(engine.generate(long))
            await until(lambda: bool(fake.requests))
            asked.cancel()
            await until(lambda: not fake.requests)
    finally:
        server.should_exit = True
        await serving


# -- a real vLLM -----------------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(VLLM_PYTHON is None, reason="HEADRACE_VLLM_PYTHON is not set")


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A checkpoint with a tokenizer, of shapes that vLLM takes."""
    from headrace.tokens.training import train_tokenizer

    folder = tmp_path_factory.mktemp("talking")
    train_tokenizer(["count the lines of a file"] * 4, 300).save(folder / "tokenizer")
    sizes = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    sizes["max_positions"] = REAL_CONTEXT
    model = tiny_model(0, vocab_size=300, **sizes)
    save_checkpoint(model, folder / "model", tokenizer_from=folder / "tokenizer")
    return folder / "model"


def processes_naming(path: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@needs_vllm
@pytest.mark.slow
async def test_real_vllm_stops_at_a_text_and_its_death_is_noticed(talking):
    options = ServeOptions(
        engine="vllm",
        engine_python=VLLM_PYTHON,
        engine_options=("--enforce-eager",),
        threads=1,
        max_running=2,
    )
    async with open_engine(talking, options) as engine:
        await engine.start()
        assert isinstance(engine, HttpEngine)
        assert engine.server is not None
        server = engine.server
        letter = Tokenizer.from_file(str(talking / "tokenizer.json")).token_to_id("l")
        result = await engine.generate(
            ask("stop", (1, 2, 3), max_tokens=40, logit_bias={letter: 100.0}, stop=("x", "lll"))
        )
        assert output(result) == (letter,) * 3
        assert (result.finish_reason, result.stop) == (FinishReason.STOP, "lll")
        goal = await sampled_by_vllm(engine.url) + 1
        lost = ask("lost", (1, 2, 3), max_tokens=REAL_LONG)
        asked = asyncio.create_task(engine.generate(lost))
        async with asyncio.timeout(60):
            while await sampled_by_vllm(engine.url) < goal:  # noqa: ASYNC110  # a server's counter
                await asyncio.sleep(0.01)
        for pid in processes_naming(talking):
            if pid != server.pid:
                os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(server.wait_ended(), 30)
        with pytest.raises(EngineError) as caught:
            await asked
        assert caught.value.code in (EngineError.CLOSED, EngineError.FAILED)
        with pytest.raises(EngineError, match="vllm ended") as caught:
            await engine.generate(ask("late", (1, 2, 3)))
        assert caught.value.code == EngineError.CLOSED
    assert processes_naming(talking) == []


@needs_vllm
@pytest.mark.slow
def test_serve_starts_vllm_and_takes_it_along(talking):
    from openai import OpenAI

    command = [sys.executable, "-m", "headrace.cli", "serve", str(talking), "--port", "0"]
    command += ["--engine", "vllm", "--engine-python", str(VLLM_PYTHON), "--threads", "1"]
    command += ["--engine-option=--enforce-eager"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        told = ""
        assert process.stdout is not None
        for line in process.stdout:
            told += line
            if "Ctrl-C" in line:
                break
        found = re.search(r"base URL +(\S+)\s+API key +(\S+)", told)
        assert found is not None, (told, process.stderr)
        with OpenAI(base_url=found[1], api_key=found[2], timeout=60) as client:
            answers = [
                client.chat.completions.create(
                    model="headrace",
                    messages=[{"role": "user", "content": "count the lines"}],
                    max_tokens=8,
                    seed=5,
                )
                for _ in range(2)
            ]
        assert answers[0].choices[0].message == answers[1].choices[0].message
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert processes_naming(talking) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
