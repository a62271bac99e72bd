"""A whole run with one task in the run's process and one whose service registers, is killed in the
middle of the RL stage, and registers again at another port: it goes on there, without a restart."""

import json
import os
import socket
import sys

import pytest

import task_outages
from headrace.run import run_recipe
from small_runs import small_checkpoint, small_recipe

TASKS = """
import asyncio, itertools, pathlib, subprocess, sys
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult
from small_runs import ChatTask, ask


class Steady(ChatTask):
    name = "steady"

    def __init__(self, folder: str, register: str, kill_at: int):
        self.numbers = itertools.count(1)
        self.folder = pathlib.Path(folder)
        self.register = register
        self.kill_at = kill_at

    async def rollout(self, instance, endpoint):
        number = next(self.numbers)
        if number == self.kill_at:
            served[0].kill()
            serve(self.folder, self.register)
        await ask(endpoint, f"hello {number}", max_tokens=8)
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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
def test_a_killed_service_registers_elsewhere_and_the_run_goes_on_there(
    tmp_path, monkeypatch, capsys
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
    recipe = small_recipe(
        small_checkpoint(tmp_path / "model"),
        task_outages.stage("steady", "far", seconds=150),
        name="moved",
        gateway={"register_port": port},
        tasks={
            "steady": {
                "implementation": "far_tasks:Steady",
                "folder": str(folder),
                "register": register,
                "kill_at": 10,
            },
            "far": {"service": "registers", "token_env": "FAR_TOKEN", "register_s": 120},
        },
        evaluation=task_outages.evaluation("far"),
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
    task_outages.check(run_dir, "steady", "far", ["lost", "does not answer"])
    lines = (run_dir / "logs" / "task-far.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["url"] for line in lines)
    assert first != second
    assert "registered with run moved" in (folder / "served").read_text()
