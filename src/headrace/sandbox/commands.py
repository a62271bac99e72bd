"""One running command inside the server: its processes, its output and its limits.

A `Command` is driven from outside: `readable` when its output pipe has something, `leader_ended`
when the launched program ended, `check` now and then. It is over when `finished` is true, and by
then every process that it ever started is gone: in a pid namespace the kernel kills them all when
the first process ends, and the first process is waited for.
"""

import contextlib
import math
import os
import signal
import time

from headrace.sandbox.launch import STATUS_FD, Launcher
from headrace.sandbox.protocol import Failed, Ran, Run
from headrace.sandbox.types import EndReason, Limits

_CHUNK = 65_536
_MOST_CHUNKS = 32
_STRAY_ROUNDS = 100
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
_OUTPUT_FACTOR = 64
_OUTPUT_FLOOR = 16 * 2**20
FIRST_CHECK_S = 0.1
"""Commands shorter than this are never looked at; most are."""
CHECK_EVERY_S = 0.1
KILL_RETRY_S = 0.005


class Command:
    """See the module text. All descriptors are non-blocking and closed on exec."""

    def __init__(
        self, request: Run, folder: str, launcher: Launcher, limits: Limits, devnull: int
    ) -> None:
        """Start it.

        Raises:
            OSError: no process or descriptor to be had.
        """
        self.id = request.id
        self.sandbox = request.sandbox
        self._folder = folder
        self._launcher = launcher
        self._limits = limits
        self._most_output = max(_OUTPUT_FLOOR, _OUTPUT_FACTOR * limits.output_bytes)
        self._kept = bytearray()
        self._seen = 0
        self._status = b""
        self._ended: EndReason | None = None
        self._killed = False
        self._exit_status: int | None = None
        self._cpu_s = 0.0
        self._wall_s = 0.0
        self._orphan = -1
        self.orphan_fd = -1
        """Process descriptor of a first process that outlives its launcher for a moment, or -1."""
        self.finished = False
        self.pid = self.pid_fd = -1
        self.output_fd, output_end = _one_sided_pipe()
        try:
            self._status_fd, status_end = _one_sided_pipe()
        except OSError:
            os.close(self.output_fd)
            os.close(output_end)
            raise
        actions = [
            (os.POSIX_SPAWN_DUP2, devnull, 0),
            (os.POSIX_SPAWN_DUP2, output_end, 1),
            (os.POSIX_SPAWN_DUP2, output_end, 2),
            (os.POSIX_SPAWN_DUP2, status_end, 2 if launcher.errors_apart else STATUS_FD),
        ]
        try:
            arguments = launcher.arguments(request.command, folder)
            self.started_at = time.monotonic()
            self.pid = os.posix_spawn(
                arguments[0],
                arguments,
                launcher.environment(folder),
                file_actions=actions,
                setsid=not launcher.isolated,
                # Python ignores these two; commands expect their defaults.
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
            self.pid_fd = os.pidfd_open(self.pid)
        except OSError:
            os.close(self.output_fd)
            os.close(self._status_fd)
            if self.pid > 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            raise
        finally:
            os.close(output_end)
            os.close(status_end)
        self._deadline = self.started_at + request.wall_s
        self.next_check = min(self._deadline, self.started_at + FIRST_CHECK_S)

    def readable(self) -> bool:
        """Take what the output pipe holds. False once nothing more can come."""
        try:
            chunk = os.read(self.output_fd, _CHUNK)
        except BlockingIOError:
            return True
        self._account(chunk)
        return bool(chunk)

    def _account(self, chunk: bytes) -> None:
        self._seen += len(chunk)
        room = self._limits.output_bytes - len(self._kept)
        if room > 0:
            self._kept += chunk[:room]
        if self._seen > self._most_output:
            self.end(EndReason.OUTPUT)

    def end(self, reason: EndReason) -> None:
        """Kill every process; the first reason given counts."""
        if self._ended is None and self._exit_status is None:
            self._ended = reason
            self.next_check = 0.0

    def check(self, now: float) -> None:
        """Apply the time and memory limits and carry out a pending kill."""
        self.next_check = now + CHECK_EVERY_S
        if self._exit_status is not None:
            return
        if self._ended is None and now >= self._deadline:
            self._ended = EndReason.TIME
        first = self._first_process()
        if self._ended is None and first is not None and self._too_much_memory(first):
            self._ended = EndReason.MEMORY
        if self._ended is None:
            self.next_check = min(self.next_check, self._deadline)
            return
        # The launcher ends by itself once the first process is gone. Before there is one, the
        # launcher is still at work and is asked again; killing it could leave a half-made child.
        if first is None:
            self.next_check = now + KILL_RETRY_S
        else:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)

    def leader_ended(self) -> None:
        """The launched program ended: collect it, and what it left to this process."""
        first = self._first_process()
        _, self._exit_status, usage = os.wait4(self.pid, 0)
        self._cpu_s += usage.ru_utime + usage.ru_stime
        os.close(self.pid_fd)
        self.pid_fd = -1
        self._status += _read_all(self._status_fd)
        os.close(self._status_fd)
        self._status_fd = -1
        first = first or self._launcher.first_process(self.pid, self._status)
        if first is not None and first != self.pid and not self._collect(first):
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
            self.orphan_fd = os.pidfd_open(first)
            self._orphan = first
            return
        self._finish()

    def orphan_ended(self) -> None:
        """The first process, left behind by its launcher, is gone with all others."""
        self._collect(self._orphan)
        os.close(self.orphan_fd)
        self.orphan_fd = -1
        self._finish()

    def release(self) -> None:
        """Close the output pipe. Only once `finished` and no longer watched."""
        os.close(self.output_fd)

    def reply(self) -> Ran | Failed:
        """What to tell the provider. Only once `finished`."""
        status = self._exit_status or 0
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        if self._killed:
            code = 128 + signal.SIGKILL  # Launchers tell of a killed child in different ways.
        if not self._killed and not self._launcher.started(self._status):
            said = self._status if self._launcher.errors_apart else bytes(self._kept)
            text = said.decode("utf-8", "replace").strip() or f"ended with code {code}"
            return Failed(self.id, f"{self._launcher.name} failed: {text[-500:]}")
        ended = self._ended or EndReason.EXITED
        if not self._killed:
            # It was over before the kill came, unless the kernel's CPU limit ended it.
            out_of_cpu = code == 128 + signal.SIGXCPU or (
                code == 128 + signal.SIGKILL and self._cpu_s >= math.ceil(self._limits.cpu_s)
            )
            ended = EndReason.TIME if out_of_cpu else EndReason.EXITED
        output = bytes(self._kept)
        return Ran(self.id, code, output, self._seen > len(output), ended, self._wall_s)

    def _first_process(self) -> int | None:
        if self._status_fd >= 0:
            self._status += _read_all(self._status_fd)
        return self._launcher.first_process(self.pid, self._status)

    def _collect(self, pid: int) -> bool:
        """Whether `pid` is over; its exit is taken if it had become this process's child."""
        try:
            done, _, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:
            return True
        self._cpu_s += usage.ru_utime + usage.ru_stime
        return done == pid

    def _finish(self) -> None:
        if not self._launcher.isolated:
            kill_strays(self.pid, self._folder)
        # Nothing can write any more, so what the pipe holds is all there is.
        self._account(_read_all(self.output_fd))
        self._wall_s = time.monotonic() - self.started_at
        self.finished = True

    def _too_much_memory(self, first: int) -> bool:
        """Whether all processes together hold more than the limit.

        Private pages are counted first because that is cheap; pages that forked processes share
        would count repeatedly, so a suspicion is confirmed by proportional set sizes.
        """
        most_kb = self._limits.memory_mb * 1024
        pids = family(first)
        if sum(_private_kb(pid) for pid in pids) <= most_kb:
            return False
        return sum(_proportional_kb(pid) for pid in pids) > most_kb


def family(first: int) -> list[int]:
    """`first` and all its descendants. Source: proc(5), task/children."""
    found = [first]
    for pid in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found.extend(int(child) for child in file.read().split())
    return found


def kill_strays(session: int, folder: str) -> None:
    """Without a pid namespace: kill what a command left behind, as far as it can be recognised.

    Args:
        session: the command's session id.
        folder: the sandbox's folder, part of the environment of all its processes.
    """
    marker = f"HOME={folder}/work\0".encode()
    for _ in range(_STRAY_ROUNDS):
        strays = [
            pid
            for pid in family(os.getpid())[1:]
            if _session_of(pid) == session or _environment_holds(pid, marker)
        ]
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _session_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return -1


def _environment_holds(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read()
    except OSError:
        return False


def _private_kb(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_KB


def _proportional_kb(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _one_sided_pipe() -> tuple[int, int]:
    """A pipe whose reading end alone does not block: commands expect blocking writes."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return read_end, write_end


def _read_all(fd: int) -> bytes:
    chunks = []
    with contextlib.suppress(BlockingIOError):
        # A pipe holds at most 1 MiB; more could only come from a writer that does not stop.
        while len(chunks) < _MOST_CHUNKS and (chunk := os.read(fd, _CHUNK)):
            chunks.append(chunk)
    return b"".join(chunks)
