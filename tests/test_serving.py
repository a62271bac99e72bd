"""Serving a checkpoint: finding it, refusing what cannot be served, keys, and a real server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from headrace.cli import main
from headrace.errors import UserError
from headrace.served_engine import ServeOptions, engine_config
from headrace.serving import find_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of random weights whose tokenizer speaks the compact chat format."""
    from headrace.model.checkpoint import save_checkpoint
    from headrace.model.config import ModelConfig
    from headrace.model.decoder import Decoder
    from headrace.tokens.training import train_tokenizer

    path = tmp_path_factory.mktemp("serving")
    tokenizer = train_tokenizer(["count the lines of a file"] * 4, 300)
    tokenizer.save(path / "tokenizer")
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        }
    )
    model = Decoder(config)
    model.init_weights(0)
    save_checkpoint(model, path / "model", tokenizer_from=path / "tokenizer")
    return path / "model"


def mistake(capsys, arguments):
    """Run the command, require exit code 2 and one line; returns the line."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# -- finding a checkpoint ------------------------------------------------------------------------


def test_a_run_directory_means_its_newest_checkpoint(tmp_path):
    for age, stage in ((20, "warmup"), (10, "rl")):
        folder = tmp_path / "checkpoints" / stage
        folder.mkdir(parents=True)
        file = folder / "config.json"
        file.write_text("{}")
        os.utime(file, (1_000_000 - age, 1_000_000 - age))
    assert find_checkpoint(str(tmp_path)) == tmp_path / "checkpoints" / "rl"


def test_a_run_without_checkpoints_and_an_empty_folder_are_told_apart(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_missing_checkpoint_is_one_line(capsys, command):
    assert "no-such-model" in mistake(capsys, [command, "no-such-model"])


# -- what does not fit ---------------------------------------------------------------------------


def test_context_defaults_to_the_model_and_may_not_exceed_it(checkpoint):
    assert engine_config(checkpoint, ServeOptions()).max_context == 256
    with pytest.raises(UserError, match="at most 256 tokens"):
        engine_config(checkpoint, ServeOptions(max_context=257))
    with pytest.raises(UserError, match="float32 or bfloat16"):
        engine_config(checkpoint, ServeOptions(dtype="int4"))


def test_an_unsupported_architecture_is_one_line(capsys, checkpoint, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(checkpoint, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "mamba" in mistake(capsys, ["serve", broken, "--port", 0])


def test_corrupt_weights_are_one_line(capsys, checkpoint, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "model.safetensors" in mistake(capsys, ["chat", broken, "-m", "hi"])


def test_a_port_in_use_is_one_line(capsys, checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert str(port) in mistake(capsys, ["serve", checkpoint, "--port", port])


def test_a_key_that_no_client_could_send_is_refused(capsys, checkpoint):
    assert "--api-key" in mistake(capsys, ["serve", checkpoint, "--api-key", " "])


# -- engines of another make ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "tensorrt"], "use embedded, vllm or sglang"),
        (["--engine-url", "http://127.0.0.1:1"], "choose the server's kind"),
        (["--engine", "sglang"], "--engine-python"),
        (["--engine", "vllm", "--engine-url", "nowhere"], "http://127.0.0.1:8000"),
        (["--engine", "vllm", "--engine-url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--engine", "vllm", "--engine-url", "http://x", "--engine-python", "p"], "leave out"),
        (["--engine", "vllm", "--engine-python", "no-such-python"], "cannot be run"),
        (["--engine", "vllm", "--engine-python", sys.executable], "No module named 'vllm'"),
    ],
)
def test_a_server_that_cannot_be_had_is_one_line(
    capsys, monkeypatch, tmp_path, checkpoint, options, words
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a log is kept for the message
    assert words in mistake(capsys, ["serve", checkpoint, "--port", 0, *options])


# -- a real server -------------------------------------------------------------------------------


def test_a_server_answers_the_openai_client_until_interrupted(checkpoint):
    from openai import AuthenticationError, OpenAI
    from openai.types.chat import ChatCompletionMessageParam

    command = [sys.executable, "-m", "headrace.cli", "serve", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, settings = {}, set()
        assert process.stdout is not None
        for line in process.stdout:
            for name in ("base URL", "API key", "model"):
                if line.strip().startswith(name):
                    told[name] = line.split()[-1]
            settings |= {line.split()[0]} & {"OpenAI", "Anthropic", "mini-swe-agent", "Codex"}
            if "Ctrl-C" in line:
                break
        assert set(told) == {"base URL", "API key", "model"}, process.stderr
        assert settings == {"OpenAI", "Anthropic", "mini-swe-agent", "Codex"}
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": "count the lines"}
        ]
        with OpenAI(base_url=told["base URL"], api_key=told["API key"], timeout=60) as client:
            assert [model.id for model in client.models.list()] == [told["model"]]
            answers = [
                client.chat.completions.create(
                    model=told["model"], messages=messages, max_tokens=8, seed=5
                )
                for _ in range(2)
            ]
        assert answers[0].usage is not None
        assert 1 <= answers[0].usage.completion_tokens <= 8
        assert answers[0].choices[0].message == answers[1].choices[0].message
        with (
            OpenAI(base_url=told["base URL"], api_key="sk-other", max_retries=0) as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.chat.completions.create(model="x", messages=messages)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert errors == ""
        # Nothing of its session is left, the engine process in particular.
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_chat_answers_once_and_ends(capfd, checkpoint):
    assert main(["chat", str(checkpoint), "-m", "count", "--max-tokens", "4", "--seed", "1"]) == 0
    assert capfd.readouterr().err == ""
