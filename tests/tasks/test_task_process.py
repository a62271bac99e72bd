"""A task service in a child process and behind the command: started, restarted, ended."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cluster.local import LocalCluster
from headrace.errors import UserError
from headrace.rollout.types import Outcome
from headrace.tasks.remote import FixedPlace, ProcessPlace, RemoteSettings, RemoteTasks
from headrace.tasks.types import Endpoint, RolloutResult

MODULE = """
from headrace.rollout.types import Outcome
from headrace.tasks.types import RolloutResult, TaskInstance

class Small:
    name = "small"
    def __init__(self, word: str = "a"):
        if word == "bad":
            raise ValueError("a bad word")
        self.word = word
    def instance(self, seed):
        return TaskInstance("small", seed, self.word, 1, 1)
    def train_seed(self, index):
        return 2 * index
    def evaluation_seed(self, index):
        return 2 * index + 1
    def content_id(self, instance):
        return str(instance.seed)
    async def rollout(self, instance, endpoint):
        return RolloutResult(Outcome.OK, {"reward": 1.0}, self.word)
"""
QUICK = RemoteSettings(
    answer_s=3.0, poll_s=0.2, admission_s=30.0, first_wait_s=0.02, longest_wait_s=0.1
)
ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "k", "m", timeout_s=5.0)
WAIT_S = 180.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "small_tasks.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def place_of(cluster: LocalCluster, **options: str) -> ProcessPlace:
    arguments = {
        "name": "small",
        "options": options,
        "implementation": "small_tasks:Small",
        "sandbox": {"kind": "none", "limits": {}},
    }
    return ProcessPlace("small", arguments, cluster=cluster, log_path=None, start_s=WAIT_S)


async def test_a_process_that_is_killed_or_stopped_is_started_again_and_ends_with_the_run(folder):
    cluster = LocalCluster()
    place = place_of(cluster, word="b")
    words: list[str] = []
    task = await RemoteTasks.open(
        "small", place, QUICK, options={"word": "b"}, evaluation=3, report=words.append
    )
    try:

        async def attempt() -> RolloutResult:
            return await task.rollout(task.instance(3), ENDPOINT)

        assert (await attempt()).reason == "b"
        pids = [place.pid]
        # The second neither ends nor answers.
        for number in (signal.SIGKILL, signal.SIGSTOP):
            assert place.pid is not None
            os.kill(place.pid, number)
            async with asyncio.timeout(WAIT_S):
                while place.pid in pids or (await attempt()).outcome is not Outcome.OK:
                    await attempt()
            pids.append(place.pid)
        assert task.losses == 2
        assert words[0] == "task small is lost: process of task small ended"
        assert "no answer in time" in words[2]
    finally:
        await task.close()
        await cluster.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


async def test_what_keeps_a_process_from_serving_is_said_at_the_start(folder):
    cluster = LocalCluster()
    try:
        with pytest.raises(UserError, match="ValueError: a bad word"):
            await RemoteTasks.open("small", place_of(cluster, word="bad"), QUICK)
    finally:
        await cluster.close()


async def test_the_command_serves_until_it_is_told_to_stop(folder):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace.cli", "tasks", "serve", "small_tasks:Small"),
        *("--port", "0", "--set", "word=c", "--token-env", "TASK_TOKEN", "--no-isolation"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TASK_TOKEN": "secret"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S):
            line = (await process.stdout.readline()).decode()
            found = re.search(r"task small at (http://\S+)", line)
            assert found, line
            place = FixedPlace(found.group(1), "secret")
            task = await RemoteTasks.open("small", place, QUICK, options={"word": "c"})
            instance = await asyncio.to_thread(task.instance, 2)
            assert (await task.rollout(instance, ENDPOINT)).reason == "c"
            await task.close()
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["terminals"], "did you mean 'terminal'"),
        (["terminal", "--set", "familys=[]"], "did you mean 'families'"),
        (["terminal", "--set", "sandbox.wall=1"], "sandbox.wall: .*known: kind"),
        (["terminal", "--set", "sandbox.kind=none"], "--no-isolation"),
        (["terminal", "--token-env", "NOT_SET_HERE"], "NOT_SET_HERE: .* is not set"),
        (["terminal", "--host", "0.0.0.0"], "give a token"),
    ],
)
def test_mistakes_of_the_command_are_one_line(arguments, says, capsys):
    assert main(["tasks", "serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert error.count("\n") == 1
