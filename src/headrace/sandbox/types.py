"""What a sandbox is to its users: a small private file tree in which commands run, isolated."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Bounds enforced on every sandbox (units in the names)."""

    wall_s: float = 5.0
    """Wall-clock seconds per command."""
    cpu_s: float = 5.0
    """CPU seconds per process."""
    processes: int = 64
    """Processes and threads alive at once."""
    memory_mb: int = 256
    """Address space per process, and resident memory of all processes together."""
    output_bytes: int = 16_384
    """Combined stdout and stderr kept; the rest is discarded and counted as truncated."""
    disk_mb: int = 32
    """Work folder and /tmp together."""
    files: int = 4096
    """Inodes in work folder and /tmp together."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file, directory or symlink of a work folder.

    Attributes:
        kind: "file", "dir" or "link".
        mode: permission bits, e.g. 0o644.
        data: file content, or the link's target; empty for a directory.
    """

    kind: str
    mode: int
    data: bytes = b""


class EndReason(StrEnum):
    """Why a command ended."""

    EXITED = "exited"
    TIME = "time_limit"
    MEMORY = "memory_limit"
    OUTPUT = "output_limit"


class CommandResult(msgspec.Struct, frozen=True):
    """What a command did. `exit_code` is 128 + signal when a signal ended it."""

    exit_code: int
    output: bytes
    truncated: bool
    ended: EndReason
    wall_s: float


class SandboxError(Exception):
    """The sandbox itself failed: an environment failure, never the agent's (law L6)."""


class SandboxStartError(SandboxError):
    """No sandbox could be made."""


class Sandbox(Protocol):
    """One private work folder (/work, also the working directory) and /tmp."""

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        """Run `command` with bash. No process it started survives the call.

        Raises:
            SandboxError: the isolation layer failed.
        """
        ...

    async def tree(self) -> dict[str, FileEntry]:
        """The work folder now, by relative path ("a/b.txt"), links not followed."""
        ...

    async def close(self) -> None:
        """Remove everything. Safe to repeat."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes; one per process."""

    async def open(self, files: Mapping[str, FileEntry]) -> Sandbox:
        """A fresh sandbox whose work folder holds `files`.

        Raises:
            SandboxError: none can be made.
        """
        ...

    async def close(self) -> None:
        """Close every sandbox and the server behind them. Safe to repeat."""
        ...
