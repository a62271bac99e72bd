"""What a sandbox is for: files in, commands, files out; and what happens when parts of it die."""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.sandbox import ServerProvider, open_provider, probe
from headrace.sandbox.isolation import IsolationError, require_kernel, user_namespace_remedy
from headrace.sandbox.types import EndReason, FileEntry, Limits, SandboxError

Processes = Callable[[str], list[int]]


def wait_for_end(pid_fd: int) -> bool:
    """Whether the process ends within half a minute."""
    poller = select.poll()
    poller.register(pid_fd, select.POLLIN)
    try:
        return bool(poller.poll(30_000))
    finally:
        os.close(pid_fd)


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


async def running_pid(find: Processes, text: str) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := find(text):
            return found[-1]
        await asyncio.sleep(0.01)
    raise AssertionError(f"no process with {text!r} appeared")


async def test_files_go_in_and_come_out(provider: ServerProvider) -> None:
    files = {
        "a.txt": FileEntry("file", 0o640, b"one\n"),
        "deep/er/b.bin": FileEntry("file", 0o755, bytes(range(256))),
        "empty": FileEntry("dir", 0o700),
        "locked": FileEntry("dir", 0o555),
        "locked/in.txt": FileEntry("file", 0o444, b"in"),
        "link": FileEntry("link", 0o777, b"deep/er"),
        "dangling": FileEntry("link", 0o777, b"nowhere"),
        "größe.txt": FileEntry("file", 0o644, b""),
    }
    box = await provider.open(files)
    expected = files | {"deep": FileEntry("dir", 0o755), "deep/er": FileEntry("dir", 0o755)}
    assert await box.tree() == expected
    assert (await box.run("cat a.txt link/../../a.txt")).output == b"one\none\n"


async def test_commands_change_the_tree_and_state_stays(provider: ServerProvider) -> None:
    box = await provider.open({"x": FileEntry("file", 0o644, b"3\n1\n2\n")})
    assert (await box.run("sort x > y; chmod 600 y; rm x; mkdir d; echo t > /tmp/t")).exit_code == 0
    assert (await box.run("pwd; cat /tmp/t")).output == b"/work\nt\n"
    assert await box.tree() == {
        "y": FileEntry("file", 0o600, b"1\n2\n3\n"),
        "d": FileEntry("dir", 0o755),
    }


async def test_odd_trees_can_be_read(provider: ServerProvider) -> None:
    box = await provider.open({})
    await box.run(
        "mkfifo pipe; echo s > secret; chmod 0 secret; mkdir -p shut/in; chmod 0 shut;"
        "touch $'bad\\xff' $'new\\nline'"
    )
    tree = await box.tree()
    assert tree["pipe"].kind == "other"
    assert tree["secret"] == FileEntry("file", 0, b"s\n")
    assert tree["shut/in"].kind == "dir"
    assert {"bad\udcff", "new\nline"} <= set(tree)
    await box.reset({})
    assert await box.tree() == {}


async def test_huge_and_deep_trees_are_bounded(kind: str) -> None:
    provider = open_provider(kind, Limits(disk_mb=2))
    try:
        box = await provider.open({})
        await box.run("for i in $(seq 50); do truncate -s 1M s$i; done")
        assert sum(len(entry.data) for entry in (await box.tree()).values()) == 2 * 2**20
        await box.run("rm s*; for i in $(seq 100); do mkdir d; cd d; done")
        assert 50 < len(await box.tree()) < 100
    finally:
        await provider.close()


async def test_bad_file_sets_are_refused(provider: ServerProvider) -> None:
    for path in ("", "/etc/x", "../x", "a/../../x", "a//b", "./a", "a\0b", "a/", "d/" * 64 + "x"):
        with pytest.raises(ValueError, match="path"):
            await provider.open({path: FileEntry("file", 0o644, b"")})
    with pytest.raises(ValueError, match="kind"):
        await provider.open({"x": FileEntry("device", 0o644)})
    through_link = {"l": FileEntry("link", 0o777, b"/tmp"), "l/x": FileEntry("file", 0o644)}
    with pytest.raises(SandboxError):
        await provider.open(through_link)
    with pytest.raises(SandboxError, match="space"):
        await provider.open({"x": FileEntry("file", 0o644, bytes(40 * 2**20))})
    with pytest.raises(SandboxError, match="space"):
        await provider.open({f"{n}": FileEntry("file", 0o644) for n in range(5000)})
    assert (await (await provider.open({})).run("echo ok")).output == b"ok\n"


async def test_output_is_bytes_and_input_is_empty(provider: ServerProvider) -> None:
    box = await provider.open({})
    assert (await box.run("printf 'a\\0b\\377'; echo err >&2")).output == b"a\0b\xfferr\n"
    result = await box.run("cat; read x; echo $?", timeout_s=3)
    assert (result.output, result.ended) == (b"1\n", EndReason.EXITED)


async def test_any_text_gives_a_result(provider: ServerProvider) -> None:
    box = await provider.open({})
    for command, code, said in (
        ("exit 7", 7, b""),
        ("nosuchcommand", 127, b"bash: line 1: nosuchcommand: command not found\n"),
        ("if", 2, b"syntax error"),
        ("", 0, b""),
        ("a\0b", 126, b"NUL"),
        ("echo '" + "x" * 200_000 + "'", 126, b"too long"),
        ("echo 'héllo \udcff'", 0, "héllo ".encode() + b"\xff\n"),
        ("echo '\ud800'", 0, b"?\n"),
        ("yes | head -n 2", 0, b"y\ny\n"),
        ("set -o pipefail; yes | head -n 1", 141, b"y\n"),
    ):
        result = await box.run(command)
        assert result.exit_code == code, command
        assert said in result.output
        assert result.ended is EndReason.EXITED


async def test_fifty_at_once(provider: ServerProvider) -> None:
    async def one(number: int) -> None:
        content = f"{number}\n".encode()
        box = await provider.open({"n": FileEntry("file", 0o644, content)})
        for _ in range(2):
            assert (await box.run("cat n; cat n >> m")).output == content
        assert (await box.tree())["m"].data == content * 2
        await box.close()

    await asyncio.gather(*(one(number) for number in range(50)))


async def test_calls_on_one_sandbox_take_turns(provider: ServerProvider) -> None:
    box = await provider.open({})
    step = "n=$(cat n 2>/dev/null || echo 0); sleep 0.02; echo $((n + 1)) > n"
    await asyncio.gather(*(box.run(step) for _ in range(8)))
    assert (await box.tree())["n"].data == b"8\n"


async def test_reset_replaces_everything(provider: ServerProvider) -> None:
    box = await provider.open({"old": FileEntry("file", 0o644, b"1")})
    await box.run("echo x > /tmp/x; mkdir -p a/b; chmod 0 a")
    await box.reset({"new": FileEntry("file", 0o644, b"2")})
    assert await box.tree() == {"new": FileEntry("file", 0o644, b"2")}
    assert (await box.run("ls -A /tmp")).output == b""


async def test_cancelling_ends_the_command(
    provider: ServerProvider, host_processes: Processes
) -> None:
    box = await provider.open({})
    task = asyncio.create_task(box.run("sleep 7654"))
    await running_pid(host_processes, "sleep 7654")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await box.reset({})  # Waits for the command's end.
    assert not host_processes("sleep 7654")
    assert (await box.run("echo next")).output == b"next\n"


async def test_close_while_running(provider: ServerProvider, host_processes: Processes) -> None:
    box = await provider.open({})
    task = asyncio.create_task(box.run("sleep 7655"))
    await running_pid(host_processes, "sleep 7655")
    await box.close()
    await box.close()
    assert not host_processes("sleep 7655")
    with pytest.raises(SandboxError):
        await task
    for call in (box.run("true"), box.tree(), box.reset({})):
        with pytest.raises(SandboxError, match="closed"):
            await call


async def test_closing_leaves_nothing(kind: str, host_processes: Processes) -> None:
    before = mounts()
    provider = open_provider(kind)
    pid = provider.server_pid
    assert pid is not None
    boxes = [await provider.open({}) for _ in range(3)]
    task = asyncio.create_task(boxes[0].run("sleep 7656"))
    await running_pid(host_processes, "sleep 7656")
    assert mounts() == before
    await provider.close()
    await provider.close()
    with pytest.raises(SandboxError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not host_processes("sleep 7656")
    with pytest.raises(SandboxError, match="closed"):
        await provider.open({})


@pytest.mark.parametrize("victim", ["keeper", "server"])
async def test_a_killed_server_fails_its_calls_and_is_replaced(
    provider: ServerProvider, host_processes: Processes, victim: str
) -> None:
    box = await provider.open({})
    task = asyncio.create_task(box.run("sleep 7657"))
    # The kill may come at any moment of the start: only the launcher is sure to be there.
    launcher = os.pidfd_open(await running_pid(host_processes, "sleep 7657"))
    keeper = provider.server_pid
    assert keeper is not None
    os.kill(keeper if victim == "keeper" else only_child(keeper), signal.SIGKILL)
    with pytest.raises(SandboxError, match="ended"):
        await task
    assert wait_for_end(launcher)
    with pytest.raises(SandboxError):
        await box.run("true")
    await box.close()
    fresh = await provider.open({"f": FileEntry("file", 0o644, b"f")})
    assert not host_processes("sleep 7657")
    assert (await fresh.run("cat f")).output == b"f"
    assert provider.server_pid != keeper


def test_the_server_dies_with_its_provider(kind: str) -> None:
    program = f"""
import asyncio, os
from headrace.sandbox import open_provider
async def main():
    provider = open_provider({kind!r})
    box = await provider.open({{}})
    # A forked child keeps a copy of the socket: its end is not seen as the connection's.
    if os.fork() == 0:
        import time; time.sleep(20); os._exit(0)
    print(provider.server_pid, flush=True)
    await box.run("sleep 4")
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        try:
            server = os.pidfd_open(int(process.stdout.readline()))
            process.kill()
            assert wait_for_end(server)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_probe_names_every_kind() -> None:
    found = probe()
    assert set(found) == {"bwrap", "unshare", "none"}
    assert all(found.values())
    assert found["none"] == "ok"


@pytest.mark.usefixtures("kind")
async def test_auto_prefers_bubblewrap() -> None:
    provider = open_provider()
    await provider.close()
    assert provider.kind == ("bwrap" if shutil.which("bwrap") else "unshare")


async def test_auto_falls_back_to_unshare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = shutil.which("unshare")
    if program is None:
        pytest.skip("unshare is not installed")
    (tmp_path / "unshare").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    provider = open_provider()
    try:
        assert provider.kind == "unshare"
        assert (await (await provider.open({})).run("echo hi | cat")).output == b"hi\n"
    finally:
        await provider.close()


def test_no_isolation_is_an_error_with_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError) as caught:
        open_provider()
    message = str(caught.value)
    for part in ("bwrap", "unshare", "apt-get install bubblewrap", "none"):
        assert part in message
    assert "\n" not in message


def test_refused_namespaces_are_explained() -> None:
    """In a user namespace of our own we may forbid further ones, as some machines do."""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
    probe_it = (
        "import headrace.sandbox as s; p = s.probe(); print(p['bwrap'], p['unshare'], p['none'])"
    )
    inner = f'{forbid} && exec "$0" -c "$1"'
    outcome = subprocess.run(
        ["unshare", "-Ur", "bash", "-c", inner, sys.executable, probe_it],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    if "unshare:" in outcome.stderr or "max_user_namespaces" in outcome.stderr:
        pytest.skip("this machine refuses user namespaces already")
    said = "CAP_SETUID" if os.getuid() == 0 else "sysctl -w user.max_user_namespaces=10000"
    # Of bubblewrap, where it is installed, and of unshare.
    assert outcome.stdout.count(said) == 1 + (shutil.which("bwrap") is not None)
    assert outcome.stdout.endswith(" ok\n")
    assert outcome.stderr == ""


@pytest.mark.parametrize(
    ("switch", "value", "said"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "100", "container"),
    ],
)
def test_the_remedy_fits_the_machine(tmp_path: Path, switch: str, value: str, said: str) -> None:
    path = tmp_path / "sys" / switch
    path.parent.mkdir(parents=True)
    path.write_text(value + "\n")
    assert said in user_namespace_remedy(str(tmp_path))


def test_old_kernels_are_refused() -> None:
    for good in ("5.14.0", "6.18.44-fc-v769", "10.0", "strange"):
        require_kernel(good)
    for bad in ("5.13.9", "4.19.0-21-amd64"):
        with pytest.raises(IsolationError, match=r"5\.14"):
            require_kernel(bad)


@pytest.mark.parametrize(
    ("kind", "limits", "said"),
    [
        ("docker", {}, "docker"),
        ("auto", {"wall_s": 0.0}, "wall_s"),
        ("auto", {"memory_mb": 0}, "memory_mb"),
        ("auto", {"wall_s": float("nan")}, "wall_s"),
    ],
)
def test_bad_arguments(kind: str, limits: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_provider(kind, Limits(**limits))  # pyright: ignore[reportArgumentType]


async def test_none_is_plain_processes_with_limits(host_processes: Processes) -> None:
    provider = open_provider("none", Limits(output_bytes=100, memory_mb=64))
    try:
        box = await provider.open({"a": FileEntry("file", 0o644, b"a\n")})
        assert (await box.run("cat a; echo b > b")).output == b"a\n"
        assert (await box.tree())["b"].data == b"b\n"
        slow = await box.run("sleep 60", timeout_s=0.2)
        assert (slow.ended, slow.exit_code) == (EndReason.TIME, 137)
        assert (await box.run("yes | head -c 1000")).truncated
        left = await box.run("sleep 7658 & setsid -f sleep 7658; echo ok")
        assert left.output == b"ok\n"
        assert not host_processes("sleep 7658")
        hog = await box.run("head -c 300M /dev/zero | tail -n 1 | wc -c")
        assert b"memory exhausted" in hog.output
        folder = Path((await box.run("pwd")).output.decode().strip())
        await box.run("mkdir -p d/e; chmod 0 d")
        await box.reset({})
        assert await box.tree() == {}
    finally:
        await provider.close()
    assert not folder.parent.parent.exists()
