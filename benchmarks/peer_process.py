"""Starting, asking, pausing and ending the processes that a benchmark compares.

Each runs a script of `peers/` under its own Python, in a process group of its own. It is stopped
(SIGSTOP) whenever it has nothing to do, so that no idle thread of one side takes time from another.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import UserError

SCRIPTS = Path(__file__).with_name("peers")
_LOG_LINES = 8


class Peer:
    """One process that answers requests, a line of JSON each.

    Args:
        name: for messages.
        python: its interpreter.
        script: a file of `peers/`.
        options: what the script is told.
        log: file that takes what it prints.
        environment: variables on top of this process's own.
    """

    def __init__(
        self,
        name: str,
        python: Path | str,
        script: str,
        options: dict[str, Any],
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    [str(python), str(SCRIPTS / script), json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"{name}: {python} does not start ({error})") from error

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until it can be asked; returns what it says of itself.

        Raises:
            UserError: it ended or took too long.
        """
        said = self._read(timeout_s)
        self._signal(signal.SIGSTOP)
        return said

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """It runs meanwhile: a server that another peer asks."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, method: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Its answer; it runs only meanwhile.

        Raises:
            UserError: it failed, ended or took too long.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        line = json.dumps({"method": method, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UserError(f"{self.name} ended: {self._last_words()}") from None
        answer = self._read(timeout_s)
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise UserError(f"{self.name}: {method} failed: {answer['error']}")
        return answer

    def cpu_s(self) -> float:
        """CPU seconds it has used, in all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it and everything it started. Safe to call twice."""
        self._signal(signal.SIGKILL)
        self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What it did not read any more is of no use.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        # If it ended, who reads from it next says so.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise UserError(
                    f"{self.name} gave no answer within {timeout_s:.0f} s: {self._last_words()}"
                )
            data = os.read(pipe, 1 << 16)
            if not data:
                raise UserError(f"{self.name} ended: {self._last_words()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_LOG_LINES:]) or "it printed nothing"
