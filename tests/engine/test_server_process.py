"""A server process: ready or explained, watched, and gone with everything it started."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.engine.servers.process import ServerProcess
from headrace.errors import UserError

SERVER = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
# One that leaves the group, and whose parent ends.
subprocess.run([sys.executable, "-c", '''
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
far = subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1], "w").write(str(far.pid))
''', folder + "/far"], check=True)
far = open(folder + "/far").read()
if "last" in sys.argv:
    print("RuntimeError: no room for weights", flush=True)
    print("something after it", flush=True)
    sys.exit(3)
with open(folder + "/draft", "w") as file:
    file.write(f"{os.getpid()} {child.pid} {far}")
os.rename(folder + "/draft", folder + "/pids")
time.sleep(300)
"""


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-c", SERVER, str(folder), *options]


def process(folder: Path, *options: str, grace_s: float = 10.0) -> ServerProcess:
    return ServerProcess(
        "toy",
        command(folder, *options),
        environment={"TOY": "1"},
        log_path=folder / "toy.log",
        stop_grace_s=grace_s,
    )


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def alive(pid: int) -> bool:
    try:
        # A zombie is as good as gone; whoever is its parent has not looked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(processes: list[int], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(alive(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in processes)


def ready_when(file: Path):
    async def ready() -> bool:
        return os.path.exists(file)  # noqa: ASYNC240  # of a local file

    return ready


@pytest.mark.parametrize("options", [(), ("stubborn",)])
async def test_it_ends_with_everything_it_started(tmp_path, options):
    server = process(tmp_path, *options, grace_s=0.3 if options else 10.0)
    await server.start(ready_when(tmp_path / "pids"), 30)
    started = pids(tmp_path)
    assert all(alive(pid) for pid in started)
    assert server.ended is None
    await server.stop()
    await server.stop()
    assert not any(alive(pid) for pid in started)
    assert server.pid is None


async def test_death_is_noticed_and_explained(tmp_path):
    server = process(tmp_path)
    await server.start(ready_when(tmp_path / "pids"), 30)
    started = pids(tmp_path)
    os.kill(started[0], signal.SIGKILL)
    ended = await asyncio.wait_for(server.wait_ended(), 10)
    assert ended.startswith("toy ended (exit code 137)")
    assert str(tmp_path / "toy.log") in ended
    assert wait_gone(started)
    await server.stop()


async def test_shared_memory_of_a_killed_server_is_removed(tmp_path):
    program = """
import mmap, os, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *arguments: None
segment = shared_memory.SharedMemory(create=True, size=64)
open(sys.argv[1] + "/draft", "w").write(segment.name)
os.rename(sys.argv[1] + "/draft", sys.argv[1] + "/pids")
time.sleep(300)
"""
    server = ServerProcess(
        "toy",
        [sys.executable, "-c", program, str(tmp_path)],
        environment={},
        log_path=tmp_path / "log",
    )
    await server.start(ready_when(tmp_path / "pids"), 30)
    segment = Path("/dev/shm") / (tmp_path / "pids").read_text()
    assert segment.exists()
    await server.stop()
    assert not segment.exists()


async def test_an_end_before_it_is_ready_tells_its_last_error(tmp_path):
    (tmp_path / "toy.log").write_text("ValueError: of an earlier run\n")
    server = process(tmp_path, "last")
    with pytest.raises(UserError, match=r"exit code 3\): RuntimeError: no room for weights"):
        await server.start(ready_when(tmp_path / "pids"), 30)
    assert wait_gone([int((tmp_path / "far").read_text())])


async def test_a_command_that_is_not_there(tmp_path):
    server = ServerProcess(
        "toy", [str(tmp_path / "no-python")], environment={}, log_path=tmp_path / "log"
    )
    with pytest.raises(UserError, match="no-python cannot be run: No such file"):
        await server.start(ready_when(tmp_path / "never"), 30)


async def test_one_that_is_never_ready_is_stopped(tmp_path):
    server = process(tmp_path)

    async def never() -> bool:
        # Its processes exist before time is up.
        while not (tmp_path / "pids").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return False

    with pytest.raises(UserError, match="not ready within 0 s"):
        await server.start(never, 0.0)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_killed_owner_leaves_nothing_behind(tmp_path):
    program = """
import asyncio, sys
from pathlib import Path
from headrace.engine.servers.process import ServerProcess
async def main():
    folder = Path(sys.argv[1])
    server = ServerProcess("toy", sys.argv[2:], environment={}, log_path=folder / "log")
    async def ready():
        return (folder / "pids").exists()
    await server.start(ready, 30)
    print(server.pid, flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), *command(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    guard = int(owner.stdout.readline())
    started = [guard, *pids(tmp_path)]
    assert all(alive(pid) for pid in started)
    owner.kill()
    owner.communicate(timeout=60)
    assert wait_gone(started)
