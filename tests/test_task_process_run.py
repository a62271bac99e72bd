"""A whole run with one task in the run's process and one in a process of its own, which is killed
in the middle of the RL stage: it comes back, and the other task notices nothing."""

import functools
import os
import signal
import sys

import pytest

import task_outages
from headrace.rollout.choosing.pausing import TaskPauses
from headrace.run import run_recipe
from small_runs import small_checkpoint, small_recipe

TASKS = """
import asyncio, itertools, os, pathlib, signal, sys
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult
from small_runs import ChatTask, ask


class Steady(ChatTask):
    name = "steady"

    def __init__(self, folder: str, kill_at: int = 0):
        self.numbers = itertools.count(1)
        self.folder = pathlib.Path(folder)
        self.kill_at = kill_at

    async def rollout(self, instance, endpoint):
        number = next(self.numbers)
        if number == self.kill_at:
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
        await ask(endpoint, f"hello {number}", max_tokens=8)
        if self.kill_at and number > self.kill_at + 8:
            async with asyncio.timeout(180):
                while not (self.folder / "back").exists():
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

    async def rollout(self, instance, endpoint):
        result = await super().rollout(instance, endpoint)
        if len((self.folder / "starts").read_text()) > 1:
            (self.folder / "back").touch()
        return result
"""


def test_a_killed_task_process_hurts_only_its_own_rollouts(tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "two_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    # Seconds matter here: the task is tried again as soon as it may.
    quick = functools.partial(TaskPauses, first_pause_s=0.05, longest_pause_s=0.1)
    monkeypatch.setattr("headrace.stages.agentic_rl.TaskPauses", quick)
    recipe = small_recipe(
        small_checkpoint(tmp_path / "model"),
        task_outages.stage("steady", "shaky", seconds=400),
        tasks={
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
        evaluation=task_outages.evaluation("shaky"),
    )
    run_dir = tmp_path / "run"
    assert run_recipe(recipe, run_dir, resume=False, no_isolation=True) == 0
    task_outages.check(run_dir, "steady", "shaky", ["lost"])
    # Nothing outlives the run.
    pid = int((folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
