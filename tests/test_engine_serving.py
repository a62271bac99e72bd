"""`headrace engine`: what it refuses to start with, and a real one from start to Ctrl-C."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from headrace.cli import main
from headrace.engine_serving import EngineOptions, check_exposure, engine_config
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine-serving") / "model"
    model = Decoder(
        ModelConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            max_positions=256,
        )
    )
    model.init_weights(0)
    save_checkpoint(model, path)
    return path


def test_options_reach_the_engine_and_misfits_are_named(checkpoint: Path):
    options = EngineOptions(
        dtype="bfloat16", weights="int8", max_running=3, cache_tokens=512, draft_tokens=2
    )
    config = engine_config(checkpoint, options)
    assert (config.dtype, config.weights, config.max_running) == ("bfloat16", "int8", 3)
    assert (config.cache_tokens, config.draft_tokens, config.max_context) == (512, 2, 256)
    for bad, message in (
        (EngineOptions(max_context=257), "at most 256"),
        (EngineOptions(dtype="int4"), "--dtype"),
        (EngineOptions(weights="int4"), "--weights"),
    ):
        with pytest.raises(UserError, match=message):
            engine_config(checkpoint, bad)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str):
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_everything_else_does(host: str):
    with pytest.raises(UserError, match="--api-key"):
        check_exposure(host, None)
    check_exposure(host, "k")


def test_mistakes_are_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, said in (
            (["no-such-model"], "no-such-model"),
            ([str(checkpoint), "--port", port], port),
            ([str(checkpoint), "--host", "0.0.0.0"], "--api-key"),
            ([str(checkpoint), "--api-key", "ü"], "--api-key"),
            ([str(checkpoint), "--api-key", ""], "--api-key"),
            ([str(checkpoint), "--max-context", "1000"], "--max-context"),
            ([str(checkpoint), "--threads", "100000"], "--threads"),
        ):
            assert main(["engine", *arguments]) == 2
            line = capsys.readouterr().err
            assert line.startswith("headrace: ")
            assert line.count("\n") == 1
            assert said in line


def test_an_engine_answers_until_interrupted(checkpoint: Path):
    command = [sys.executable, "-m", "headrace.cli", "engine", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--api-key", "k"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told = {}
        assert process.stdout is not None
        for line in process.stdout:
            name, _, value = line.strip().partition("  ")
            told[name] = value.strip()
            if "Ctrl-C" in line:
                break
        assert told["API key"] == "k"
        body = {"prompt_ids": [1, 2], "sampling": {"max_tokens": 3, "seed": 1}, "n": 2}
        with httpx.Client(base_url=told["URL"], timeout=60) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.post("/generate", json=body).status_code == 401
            client.headers["authorization"] = "Bearer k"
            first, second = (client.post("/generate", json=body).json() for _ in range(2))
            assert [len(output["ids"]) for output in first["outputs"]] == [3, 3]
            for one, other in zip(first["outputs"], second["outputs"], strict=True):
                assert one["ids"] == other["ids"]
            assert client.get(told["document"]).json()["info"]["title"] == "headrace engine"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        # Nothing of its session is left, the engine process in particular.
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
