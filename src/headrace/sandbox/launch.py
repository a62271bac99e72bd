"""How one command is started under each kind of isolation, and how its kernel objects are found.

A `Launcher` turns a command into an argument list and reads what the isolating program reports on
a status pipe. It starts no command itself; commands.py does.
"""

import os
import re
import shutil
import subprocess
from typing import Protocol

from headrace.sandbox.isolation import BASE, LIMITS_FILE, ROOT, SANDBOX_UID, IsolationError

STATUS_FD = 3
"""Descriptor of the status pipe in a launched program that has it apart from its errors."""
BASH = "bash"
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
    "USER": "agent",
    "SHELL": "/bin/bash",
}


class Launcher(Protocol):
    """One kind of isolation."""

    name: str
    isolated: bool
    """Whether sandboxes live on their own tmpfs, in namespaces."""
    own_root: bool
    """Whether a sandbox needs a ready-made file tree of its own to change root to."""
    own_processes: int
    """Processes of the program itself that the kernel counts against the process limit."""
    errors_apart: bool
    """Whether the status pipe is the program's stderr, so that its errors are no output."""

    def arguments(self, command: bytes, folder: str) -> list[str | bytes]:
        """The program and its arguments that run `command` in the sandbox at `folder`."""
        ...

    def environment(self, folder: str) -> dict[str, str]:
        """All environment variables of the command, BASH_ENV (the limits) included."""
        ...

    def first_process(self, pid: int, status: bytes) -> int | None:
        """Host pid of the process whose end means that all of the command's processes ended.

        Args:
            pid: the launched program.
            status: what it has written to the status pipe so far.
        """
        ...

    def started(self, status: bytes) -> bool:
        """Whether the command was reached; otherwise the isolation itself failed."""
        ...


def _isolated_environment() -> dict[str, str]:
    return _ENVIRONMENT | {"HOME": "/work", "TMPDIR": "/tmp", "BASH_ENV": LIMITS_FILE}


class BubblewrapLauncher:
    """bubblewrap: a new user, mount, pid, network, IPC, UTS and cgroup namespace per command."""

    name = "bwrap"
    isolated = True
    own_root = False
    own_processes = 1
    errors_apart = False

    def __init__(self, program: str, *, can_disable_nesting: bool) -> None:
        self._before: list[str | bytes] = [
            program,
            "--unshare-user",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            *(["--disable-userns"] if can_disable_nesting else []),
            "--die-with-parent",
            "--new-session",
            *("--hostname", "sandbox"),
            *("--json-status-fd", str(STATUS_FD)),
            # The base is read-only already; a second remount per mount would cost time.
            *("--dev-bind", BASE, "/"),
            *("--proc", "/proc"),
        ]

    def arguments(self, command: bytes, folder: str) -> list[str | bytes]:
        binds = ("--bind", f"{folder}/work", "/work", "--bind", f"{folder}/tmp", "/tmp")
        return [*self._before, *binds, "--chdir", "/work", "--", BASH, "-c", command]

    def environment(self, folder: str) -> dict[str, str]:
        return _isolated_environment()

    def first_process(self, pid: int, status: bytes) -> int | None:
        found = re.search(rb'"child-pid": *(\d+)', status)
        return int(found[1]) if found else None

    def started(self, status: bytes) -> bool:
        return b'"exit-code"' in status


class UnshareLauncher:
    """util-linux `unshare`: the same namespaces, with chroot where bubblewrap pivots.

    A chroot can be left only with a capability that commands do not have and cannot get: the kernel
    refuses new user namespaces to a process in a chroot.
    """

    name = "unshare"
    isolated = True
    own_root = True
    own_processes = 2
    errors_apart = True

    def __init__(self, program: str) -> None:
        # The outer shell becomes process 1 of its namespace: it waits, so that the command keeps
        # ordinary signal rules, and its end kills what the command left behind.
        script = f'echo started >&2; {BASH} -c "$1" 2>&1; exit $?'
        self._before: list[str | bytes] = [
            program,
            *("--user", f"--map-user={SANDBOX_UID}", f"--map-group={SANDBOX_UID}"),
            *("--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"),
            *("--fork", "--kill-child"),
            "--mount-proc",
            "--wd=/work",
        ]
        self._after: list[str | bytes] = ["/bin/sh", "-c", script, "sh"]

    def arguments(self, command: bytes, folder: str) -> list[str | bytes]:
        return [*self._before, f"--root={folder}/{ROOT}", *self._after, command]

    def environment(self, folder: str) -> dict[str, str]:
        return _isolated_environment()

    def first_process(self, pid: int, status: bytes) -> int | None:
        return only_child(pid)

    def started(self, status: bytes) -> bool:
        return status.startswith(b"started\n")


class PlainLauncher:
    """No isolation: a plain process in a temporary folder. Only ever on explicit request."""

    name = "none"
    isolated = False
    own_root = False
    own_processes = 0
    errors_apart = False

    def __init__(self, limits_file: str) -> None:
        self._limits_file = limits_file

    def arguments(self, command: bytes, folder: str) -> list[str | bytes]:
        return ["/bin/bash", "-c", command]

    def environment(self, folder: str) -> dict[str, str]:
        return _ENVIRONMENT | {
            "HOME": f"{folder}/work",
            "TMPDIR": f"{folder}/tmp",
            "BASH_ENV": self._limits_file,
        }

    def first_process(self, pid: int, status: bytes) -> int | None:
        return pid

    def started(self, status: bytes) -> bool:
        return True


def make_launcher(kind: str, limits_file: str) -> Launcher:
    """The launcher of `kind`, if its program is installed. Runs before the host is left.

    Raises:
        IsolationError: unknown kind, or the program is missing or out of later reach.
    """
    if kind == "none":
        return PlainLauncher(limits_file)
    program = shutil.which(kind)
    if program is None:
        package = {"bwrap": "bubblewrap", "unshare": "util-linux"}.get(kind, kind)
        raise IsolationError(f"{kind} is not installed; run: apt-get install {package}")
    program = os.path.realpath(program)
    if not program.startswith(("/usr/", "/bin/", "/sbin/")):
        raise IsolationError(f"{program} is outside the system folders; install it below /usr")
    if kind == "unshare":
        return UnshareLauncher(program)
    described = subprocess.run(
        [program, "--help"], capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL
    )
    return BubblewrapLauncher(program, can_disable_nesting=b"--disable-userns" in described.stdout)


def only_child(pid: int) -> int | None:
    """The child of a single-threaded program, or None. Source: proc(5), task/children."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except OSError:
        return None
    return int(children[0]) if children else None
