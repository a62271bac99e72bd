"""Commands that try to get out, to stay, or to use up the machine. None may succeed."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.sandbox import ServerProvider
from headrace.sandbox.types import EndReason, FileEntry

Limited = Callable[..., ServerProvider]
Processes = Callable[[str], list[int]]

SOON_S = 20.0
"""Less than any command here would take if nothing ended it, and plenty for a busy machine."""


async def test_fork_bomb_is_bounded_and_leaves_others_alone(limited: Limited) -> None:
    provider = limited(processes=24, wall_s=1.0)
    bomber, bystander = await asyncio.gather(provider.open({}), provider.open({}))
    bomb = asyncio.create_task(bomber.run("bomb() { bomb & bomb & wait; }; bomb"))
    while not bomb.done():
        calm = await bystander.run("echo fine | cat")
        assert (calm.exit_code, calm.output) == (0, b"fine\n")
    result = await bomb
    assert b"Resource temporarily unavailable" in result.output
    assert result.wall_s < SOON_S
    assert (await bomber.run("echo alive")).output == b"alive\n"


async def test_process_limit_counts_processes(limited: Limited) -> None:
    box = await limited(processes=12, wall_s=1.0).open({})
    few = await box.run("for i in $(seq 11); do sleep 0.1 & done; wait; echo ok")
    assert few.output == b"ok\n"
    many = await box.run("for i in $(seq 40); do sleep 30 & done; wait; echo ok")
    assert b"ok" not in many.output
    assert b"Resource temporarily unavailable" in many.output


async def test_disk_fill_stops_at_the_limit(limited: Limited) -> None:
    box = await limited(disk_mb=4).open({})
    one = await box.run(
        "head -c 50M /dev/zero > /tmp/one; stat -c %s /tmp/one; truncate -s 2M /tmp/one"
    )
    assert int(one.output.split()[-1]) <= 4 * 2**20
    many = await box.run("for i in 1 2 3 4 5 6; do head -c 1M /dev/zero > /work/$i; done")
    assert b"No space left" in many.output
    held = await box.run("du -sk /work /tmp | awk '{s += $1} END {print s}'")
    assert int(held.output) <= 4 * 1024
    await box.reset({})
    fresh = await box.run("head -c 3M /dev/zero > x && echo room")
    assert fresh.output == b"room\n"


async def test_inode_fill_stops_at_the_limit(limited: Limited) -> None:
    box = await limited(files=50).open({})
    result = await box.run("for i in $(seq 100); do : > $i; done 2>/dev/null; ls /work | wc -l")
    assert 0 < int(result.output) <= 50
    assert b"No space left" in (await box.run("touch another /tmp/another")).output


async def test_the_system_cannot_be_changed(provider: ServerProvider) -> None:
    box = await provider.open({})
    for path in ("/", "/usr", "/etc", "/dev", "/bin", "/run", "/dev/pts", "/proc"):
        result = await box.run(f"echo x > {path}/planted || ln -s /work {path}/planted")
        assert result.exit_code != 0, path
    for path in ("/usr/bin/env", "/etc/limits.sh", "/etc/passwd", "/proc/sys/kernel/core_pattern"):
        result = await box.run(f"echo x >> {path}; rm -f {path}; chmod 777 {path}")
        assert result.exit_code != 0
        assert (await box.run(f"test -e {path}")).exit_code == 0


async def test_endless_output_is_cut_and_killed(limited: Limited) -> None:
    box = await limited(output_bytes=1000, wall_s=10.0).open({})
    result = await box.run("yes")
    assert result.ended is EndReason.OUTPUT
    assert result.truncated
    assert result.output == b"y\n" * 500
    assert result.exit_code == 137


async def test_more_output_than_kept_is_no_failure(limited: Limited) -> None:
    box = await limited(output_bytes=10).open({})
    exact = await box.run("printf 0123456789")
    assert (exact.output, exact.truncated) == (b"0123456789", False)
    more = await box.run("seq 20000; exit 3")
    assert (more.output, more.truncated) == (b"1\n2\n3\n4\n5\n", True)
    assert (more.exit_code, more.ended) == (3, EndReason.EXITED)


async def test_background_processes_end_with_the_command(
    provider: ServerProvider, host_processes: Processes
) -> None:
    box = await provider.open({})
    for daemon in (
        "sleep 8601 &",
        "setsid -f sleep 8601",
        "nohup bash -c 'while :; do echo x; sleep 8601; done' & disown",
        "(trap '' HUP TERM INT; exec 0<&- 1>&- 2>&-; setsid bash -c 'sleep 8601; :') & disown",
    ):
        result = await box.run(f"{daemon}\necho started")
        assert not host_processes("sleep 8601"), daemon
        assert b"started" in result.output
        assert (result.exit_code, result.ended) == (0, EndReason.EXITED)


async def test_signals_reach_nothing_outside(provider: ServerProvider) -> None:
    box = await provider.open({})
    pid = provider.server_pid
    for attack in ("kill -9 -1", "kill -9 1", "kill -9 $PPID", f"kill -9 {pid}", "kill -9 $$"):
        await box.run(attack)
    assert (await box.run("echo $$; kill -0 1 && echo alive")).output.endswith(b"alive\n")
    assert provider.server_pid == pid


async def test_own_signals_give_shell_exit_codes(provider: ServerProvider) -> None:
    box = await provider.open({})
    for signal, code in (("KILL", 137), ("TERM", 143), ("SEGV", 139)):
        result = await box.run(f"kill -{signal} $$; sleep 5")
        assert (result.exit_code, result.ended) == (code, EndReason.EXITED)


async def test_host_files_are_invisible(provider: ServerProvider, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    secret.chmod(0o644)
    box = await provider.open({})
    here = Path(__file__)
    for path in (secret, here):
        climbing = "../" * 20 + str(path).lstrip("/")
        for name in (str(path), climbing, f"/proc/self/root{path}", f"/proc/1/root{path}"):
            result = await box.run(f"cat {name}")
            assert result.exit_code != 0
            assert b"answer" not in result.output
    found = await box.run("ls /root /home /boxes /base /old /sys /proc/1/cwd/boxes 2>/dev/null")
    assert found.output == b""


async def test_a_link_out_leads_nowhere(provider: ServerProvider, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    box = await provider.open({})
    await box.run(f"ln -s {secret} file; ln -s / root; ln -s /proc/self/environ env; mkdir d")
    await box.run(f"ln -s {tmp_path} d/folder; ln -s ../../.. d/up")
    tree = await box.tree()
    assert set(tree) == {"file", "root", "env", "d", "d/folder", "d/up"}
    assert {tree[name].kind for name in ("file", "root", "env", "d/folder", "d/up")} == {"link"}
    assert tree["file"].data == str(secret).encode()


async def test_sandboxes_do_not_see_each_other(provider: ServerProvider) -> None:
    mine = await provider.open({"mine.txt": FileEntry("file", 0o644, b"mine")})
    other = await provider.open({})
    await mine.run("cp mine.txt /tmp/mine.txt")
    seen = await other.run("ls -A /work /tmp /dev/shm/; ls -d /proc/[0-9]* | wc -l; ls /boxes")
    assert b"mine" not in seen.output


async def test_no_network(provider: ServerProvider) -> None:
    reached = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        box = await provider.open({})
        for address in (f"127.0.0.1/{port}", "192.0.2.1/80", "1.1.1.1/53"):
            result = await box.run(f"exec 3<>/dev/tcp/{address} && echo connected")
            assert result.exit_code != 0
            assert result.ended is EndReason.EXITED, "refused, not waited for"
        assert not reached.is_set()


async def test_memory_of_one_process(limited: Limited) -> None:
    box = await limited(memory_mb=64).open({})
    result = await box.run("head -c 300M /dev/zero | tail -n 1 | wc -c")
    assert b"314572800" not in result.output
    assert b"memory exhausted" in result.output


async def test_memory_of_all_processes(limited: Limited) -> None:
    box = await limited(memory_mb=64, wall_s=10.0, cpu_s=10.0).open({})
    hog = "(head -c 40M /dev/zero; sleep 20) | tail -n 1 > /dev/null &"
    result = await box.run(f"{hog} {hog} {hog} {hog} wait")
    assert result.ended is EndReason.MEMORY
    assert result.exit_code == 137
    assert (await box.run("echo alive")).output == b"alive\n"


@pytest.mark.skipif(shutil.which("python3", path="/usr/bin") is None, reason="needs python3")
@pytest.mark.parametrize("opened", ["os.memfd_create('x')", "os.open('/dev/shm/x', 66)"])
async def test_memory_files_are_refused_or_count_as_disk(limited: Limited, opened: str) -> None:
    box = await limited(disk_mb=4, memory_mb=256).open({})
    fill = f"f = {opened}; print([os.write(f, bytes(1 << 20)) for _ in range(9)])"
    result = await box.run(f'/usr/bin/python3 -c "import os; {fill}"')
    assert result.exit_code == 1
    assert b"Error" in result.output


async def test_cpu_limit(limited: Limited) -> None:
    box = await limited(cpu_s=0.5, wall_s=60.0).open({})
    result = await box.run("while :; do :; done")
    assert result.ended is EndReason.TIME
    assert result.exit_code == 152, "by the limit of its processor time"


async def test_cpu_limit_cannot_be_ignored_or_raised(limited: Limited) -> None:
    box = await limited(cpu_s=0.5, wall_s=60.0).open({})
    result = await box.run("ulimit -t unlimited; trap '' XCPU; while :; do :; done")
    assert result.ended is EndReason.TIME
    assert result.exit_code == 137
    assert result.wall_s < 50.0


@pytest.mark.parametrize("command", ["sleep 60", "trap '' TERM INT HUP; sleep 60 & wait; sleep 60"])
async def test_wall_limit(provider: ServerProvider, command: str) -> None:
    box = await provider.open({})
    began = time.monotonic()
    result = await box.run(f"echo before; {command}; echo after", timeout_s=0.3)
    assert time.monotonic() - began < SOON_S
    assert (result.ended, result.exit_code) == (EndReason.TIME, 137)
    assert result.output == b"before\n"


async def test_no_way_to_more_rights(provider: ServerProvider) -> None:
    box = await provider.open({})
    for attempt in (
        "mount -t tmpfs none /work",
        "mount --bind / /work",
        "umount /tmp",
        "umount /proc",
        "unshare -Ur true",
        "unshare -m true",
        "chroot / true",
        "mknod disk b 8 0",
        "hostname other",
        "nice -n -5 true 2>&1 | grep . && false",
        "ulimit -u 1000",
        "ulimit -v unlimited",
    ):
        assert (await box.run(attempt)).exit_code != 0, attempt
    caps = await box.run("grep -E 'CapEff|CapPrm|NoNewPrivs|Seccomp:' /proc/self/status")
    assert caps.output.split() == (
        b"CapPrm: 0000000000000000 CapEff: 0000000000000000 NoNewPrivs: 1 Seccomp: 2".split()
    )
    setuid = await box.run("cp /usr/bin/id . && chmod u+s id && ./id -u")
    assert setuid.output.strip() == b"1000"


async def test_nothing_of_the_host_leaks(
    provider: ServerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SECRET_KEY", "hunter2")
    box = await provider.open({})
    seen = await box.run("env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'")
    assert b"hunter2" not in seen.output
    names = {line.split(b"=")[0] for line in (await box.run("env")).output.splitlines()}
    allowed = b"SHELL PWD HOME LANG TMPDIR TERM USER SHLVL LC_ALL PATH _ OLDPWD".split()
    assert names <= set(allowed)
    pids = await box.run("ls /proc | grep -c '^[0-9]'")
    assert int(pids.output) < 8
    fds = await box.run("echo /proc/self/fd/*")
    assert fds.output.split()[:3] == b"/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2".split()
    assert len(fds.output.split()) <= 4
