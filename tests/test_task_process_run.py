"""A whole run with one task in the run's process and one in a process of its own, which is killed
in the middle of the RL stage: it comes back, and the other task notices nothing."""

import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.recipe import parse_recipe
from headrace.rollout.audit import audit
from headrace.rollout.ledger import Ledger
from headrace.rollout.pausing import TaskPauses
from headrace.rollout.types import Outcome
from headrace.run import run_recipe
from headrace.tokens.training import train_tokenizer

TASKS = """
import asyncio, itertools, os, pathlib, signal, sys
from openai import AsyncOpenAI
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult, TaskInstance


class Steady:
    name = "steady"

    def __init__(self, folder: str, kill_at: int = 0):
        self.numbers = itertools.count(1)
        self.folder = pathlib.Path(folder)
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
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": f"hello {number}"}],
                max_tokens=8,
            )
        if self.kill_at and number > self.kill_at + 8:
            async with asyncio.timeout(60):
                while len((self.folder / "starts").read_text()) < 2:
                    await asyncio.sleep(0.02)  # another process's file
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})


class Shaky(Steady):
    name = "shaky"

    def __init__(self, folder: str):
        super().__init__(folder)
        if sys.modules["__main__"].__spec__ and "worker" in sys.modules["__main__"].__spec__.name:
            # In a process of its own, not where the recipe is looked over.
            (self.folder / "pid").write_text(str(os.getpid()))
            with (self.folder / "starts").open("a") as starts:
                starts.write("x")
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


def test_a_killed_task_process_hurts_only_its_own_rollouts(checkpoint, tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "two_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    # Seconds matter here: the task is tried again as soon as it may.
    quick = functools.partial(TaskPauses, first_pause_s=0.05, longest_pause_s=0.1)
    monkeypatch.setattr("headrace.stages.agentic_rl.TaskPauses", quick)
    recipe = parse_recipe(
        {
            "name": "shaken",
            "model": {"path": str(checkpoint), "renderer": "compact"},
            "engine": {"max_running": 8, "max_context": 128},
            "tasks": {
                "steady": {
                    "implementation": "two_tasks:Steady",
                    "folder": str(folder),
                    "kill_at": 10,
                },
                "shaky": {
                    "where": "process",
                    "implementation": "two_tasks:Shaky",
                    "folder": str(folder),
                },
            },
            "evaluation": {"tasks": ["shaky"], "instances": 4, "before": False},
            "stages": [
                {
                    "kind": "agentic_rl",
                    "name": "rl",
                    "tasks": {"steady": 1.0, "shaky": 1.0},
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
    run_dir = tmp_path / "run"
    assert run_recipe(recipe, run_dir, resume=False, no_isolation=True) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["laws"].values()) == {"held"}
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger).values())
        assert ledger.conservation("rl").closes
        ended = [s for s in ledger.sessions(stage="rl") if s.outcome is not Outcome.CANCELLED]
        assert len(ledger.batches("rl")) == 6
    assert {s.outcome for s in ended if s.task == "steady"} == {Outcome.OK}
    shaky = [s for s in ended if s.task == "shaky"]
    lost = [s for s in shaky if s.outcome is Outcome.ENV_FAILED]
    assert lost
    assert all("lost" in s.reason for s in lost)
    assert all(not s.rewards for s in lost)
    fell = max(s.dispatched_at for s in lost)
    assert any(s.outcome is Outcome.OK and s.dispatched_at > fell for s in shaky)  # it came back
    (measured,) = summary["evaluations"]
    assert (measured["task"], measured["n"]) == ("shaky", 4)
    # Nothing outlives the run.
    pid = int((folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
