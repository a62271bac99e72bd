"""A whole run with one task in the run's process and one whose service registers, is killed in the
middle of the RL stage, and registers again at another port: it goes on there, without a restart."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.recipe import parse_recipe
from headrace.rollout.audit import audit
from headrace.rollout.ledger import Ledger
from headrace.rollout.types import Outcome
from headrace.run import run_recipe
from headrace.tokens.training import train_tokenizer

TASKS = """
import asyncio, itertools, pathlib, subprocess, sys
from openai import AsyncOpenAI
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult, TaskInstance


class Steady:
    name = "steady"

    def __init__(self, folder: str, register: str, kill_at: int):
        self.numbers = itertools.count(1)
        self.folder = pathlib.Path(folder)
        self.register = register
        self.kill_at = kill_at

    def instance(self, seed):
        return TaskInstance(self.name, seed, "chat", 1, 1)

    def train_seed(self, index):
        return 2 * index

    def evaluation_seed(self, index):
        return 2 * index + 1

    def content_id(self, instance):
        return str(instance.seed)

    async def rollout(self, instance, endpoint):
        number = next(self.numbers)
        if number == self.kill_at:
            served[0].kill()
            serve(self.folder, self.register)
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": f"hello {number}"}],
                max_tokens=8,
            )
        if self.kill_at and number > self.kill_at + 8:
            async with asyncio.timeout(60):
                while len((self.folder / "registered").read_text().split("\\n")) < 3:
                    await asyncio.sleep(0.02)  # another process has to start
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})


class Far(Steady):
    name = "far"

    def __init__(self):
        super().__init__("", "", 0)


served = []


def serve(folder, register):
    command = [sys.executable, "-m", "headrace.cli", "tasks", "serve", "far_tasks:Far"]
    command += ["--port", "0", "--token-env", "FAR_TOKEN", "--register", register]
    with (folder / "served").open("a") as output:
        served.append(subprocess.Popen([*command, "--no-isolation"], stdout=output))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = ModelConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
        tie_embeddings=True,
    )
    model = Decoder(config)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "model")
    train_tokenizer(["hello, go on"] * 20, 400).save(tmp_path / "model")
    return tmp_path / "model"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
def test_a_killed_service_registers_elsewhere_and_the_run_goes_on_there(
    checkpoint, tmp_path, monkeypatch, capsys
):
    folder, run_dir = tmp_path / "tasks", tmp_path / "run"
    folder.mkdir()
    (run_dir / "logs").mkdir(parents=True)
    (folder / "registered").symlink_to(run_dir / "logs" / "task-far.jsonl")
    (folder / "far_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.setenv("FAR_TOKEN", "secret")
    port = free_port()
    register = f"http://127.0.0.1:{port}"
    recipe = parse_recipe(
        {
            "name": "moved",
            "model": {"path": str(checkpoint), "renderer": "compact"},
            "engine": {"max_running": 8, "max_context": 128},
            "gateway": {"register_port": port},
            "tasks": {
                "steady": {
                    "implementation": "far_tasks:Steady",
                    "folder": str(folder),
                    "register": register,
                    "kill_at": 10,
                },
                "far": {"service": "registers", "token_env": "FAR_TOKEN", "register_s": 120},
            },
            "evaluation": {"tasks": ["far"], "instances": 4, "before": False},
            "stages": [
                {
                    "kind": "agentic_rl",
                    "name": "rl",
                    "tasks": {"steady": 1.0, "far": 1.0},
                    "updates": 6,
                    "group_size": 4,
                    "groups_per_batch": 2,
                    "concurrency": 16,
                    "seconds": 150,
                }
            ],
        },
        "test",
    )
    import far_tasks  # type: ignore[import-not-found] # written above

    far_tasks.serve(folder, register)
    try:
        assert run_recipe(recipe, run_dir, resume=False, no_isolation=True) == 0
    finally:
        sys.modules.pop("far_tasks")
        for process in far_tasks.served:
            process.kill()
            process.wait()
    told = capsys.readouterr().out
    assert "waiting up to 120 s for the service of task far to register" in told
    assert f"--token-env FAR_TOKEN --register {register}" in told
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["laws"].values()) == {"held"}
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger).values())
        assert ledger.conservation("rl").closes
        ended = [s for s in ledger.sessions(stage="rl") if s.outcome is not Outcome.CANCELLED]
        assert len(ledger.batches("rl")) == 6
    assert {s.outcome for s in ended if s.task == "steady"} == {Outcome.OK}
    far = [s for s in ended if s.task == "far"]
    lost = [s for s in far if s.outcome is Outcome.ENV_FAILED]
    assert lost
    assert all("lost" in s.reason or "does not answer" in s.reason for s in lost)
    assert all(not s.rewards for s in lost)
    fell = max(s.dispatched_at for s in lost)
    assert any(s.outcome is Outcome.OK and s.dispatched_at > fell for s in far)  # it came back
    lines = (run_dir / "logs" / "task-far.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["url"] for line in lines)
    assert first != second
    (measured,) = summary["evaluations"]
    assert (measured["task"], measured["n"]) == ("far", 4)
    assert "registered with run moved" in (folder / "served").read_text()
