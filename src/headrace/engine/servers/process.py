"""An inference server as a process of its own: started, watched, and ended with all it started.

Servers start processes of their own and leave them behind when they are killed. Between this
process and the server therefore stands a small guard (this module run as a program): it takes in
what the server orphans, and ends all of it when it is told to or when this process is gone, however
it went. Knows nothing of what a server does.
"""

import asyncio
import contextlib
import ctypes
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from headrace.errors import UserError

_POLL_S = 0.25
_TAIL_BYTES = 64 << 10
_LOOK_EVERY = 20
"""Polls between two looks at what the server shares: all of it may be killed at once."""
_SHARED = Path("/dev/shm")
_MULTIPROCESSING = ("psm_", "sem.mp-")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class ServerProcess:
    """One server.

    Args:
        name: for messages.
        command: program and arguments.
        environment: variables it gets besides this process's own.
        log_path: file that takes its output; what was there is kept.
        stop_grace_s: seconds it gets to end by itself before it is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: str | Path,
        stop_grace_s: float = 20.0,
    ) -> None:
        self.name = name
        self.log_path = Path(log_path)
        self._command = list(command)
        self._environment = dict(environment)
        self._grace_s = stop_grace_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Of the guard; None before `start` and after `stop`."""
        return self._guard.pid if self._guard is not None else None

    @property
    def ended(self) -> str | None:
        """Why the server is not there any more; None while it runs and before `start`."""
        if self._guard is None or (code := self._guard.poll()) is None:
            return None
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = self.last_words()
        return f"{self.name} ended ({how}){f': {last}' if last else ''}; see {self.log_path}"

    def last_words(self) -> str:
        """The last line of its output that tells of an error, or else the last one."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return next(iter(reversed(errors or lines)), "")[-300:]

    async def start(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Start it and wait until it is ready.

        Args:
            ready: asked again and again; must not take long.
            timeout_s: longest wait.

        Raises:
            UserError: it cannot be started, ended, or was not ready in time. It is stopped then.
        """
        if self._guard is not None:
            raise RuntimeError(f"{self.name} was started before")
        self._guard = self._spawn()
        deadline = time.monotonic() + timeout_s
        try:
            while not await ready():
                if (ended := self.ended) is not None:
                    raise UserError(ended)
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.name} was not ready within {timeout_s:.0f} s; see {self.log_path}"
                    )
                await asyncio.sleep(_POLL_S)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        try:
            log = self.log_path.open("ab")
        except OSError as error:
            raise UserError(f"log {self.log_path}: cannot be written ({error.strerror})") from error
        with log:
            self._log_start = log.tell()
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._grace_s), *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    async def wait_ended(self) -> str:
        """Wait until it is not there any more; returns why, see `ended`."""
        while (ended := self.ended) is None:  # noqa: ASYNC110  # waitpid has no event
            await asyncio.sleep(_POLL_S)
        return ended

    async def stop(self) -> None:
        """End it and everything it started. Safe to repeat."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None, "opened as a pipe"
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            await asyncio.to_thread(guard.wait, self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            await asyncio.to_thread(guard.wait)


# -- the guard, a process of its own --------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _orphans() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The name in parentheses may hold anything, spaces and parentheses too.
            after = entry.read_text().rpartition(")")[2].split()
            if int(after[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return found


def _shared_memory(session: int) -> set[Path]:
    """Segments and semaphores of Python's multiprocessing that processes of `session` have."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) != session:
                continue
            for line in (entry / "maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == _SHARED and path.name.startswith(_MULTIPROCESSING):
                    found.add(path)
    return found


def _sweep(group: int) -> None:
    """Kill the server's group and whatever left it; returns when none of it is alive."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        for pid in _orphans():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _guard(grace_s: float, command: Sequence[str]) -> int:
    """Run `command` until it ends, standard input is closed, or a signal says so."""
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.append(True))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def die_with_guard() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # No threads run in the guard, so nothing can be locked in the child.
            preexec_fn=die_with_guard,
        )
    except OSError as error:
        print(f"Error: {command[0]} cannot be run: {error.strerror}", flush=True)
        return 127
    shared: set[Path] = set()
    try:
        for poll in itertools.count():
            if server.poll() is not None or told:
                break
            if poll % _LOOK_EVERY == 0:
                shared = _shared_memory(server.pid)
            if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1):
                break
        # A killed server cannot take back what outlives processes.
        shared |= _shared_memory(server.pid)
        if server.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(grace_s)
    finally:
        code = server.poll()
        _sweep(server.pid)
        for path in shared:
            path.unlink(missing_ok=True)
    return 0 if code is None else code


def main() -> None:
    """Entry point of the guard."""
    code = _guard(float(sys.argv[1]), sys.argv[2:])
    # As a shell says it: a program that a signal ended.
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
