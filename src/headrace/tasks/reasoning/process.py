"""A worker process of the reasoning task, as its owner sees it: ask, wait, or give it up.

Blocking and safe to use from several threads; requests wait for each other. A worker that does not
answer in time is killed, and the next request starts another. It knows nothing of what is asked.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.rollout.failures.rules import WorkerDied

_START_S = 120.0
_PROGRAM = Path(__file__).with_name("worker.py")
_READ = 1 << 16


class WorkerLost(WorkerDied):
    """The worker died or did not answer in time."""


class WorkerProcess:
    """One worker, started by the first request.

    Args:
        families: name and settings of each family; requests refer to positions in it.
    """

    def __init__(self, families: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self._families = [list(family) for family in families]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._closed = False

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The worker's answer, within `limit_s` seconds once it is its turn.

        Raises:
            WorkerLost: no answer; the worker is gone, and the next request starts a new one.
        """
        with self._lock:
            if self._closed:
                raise WorkerLost("closed")
            process = self._process or self._start()
            # The worker's own limit is the later one, for when nobody is left to keep this one.
            return self._exchange(process, {**request, "limit_s": limit_s}, limit_s)

    def close(self) -> None:
        """End the worker for good. Safe to repeat; waits for a request that is being answered."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the order of sets is part of what a seed means
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            # -P: this package's modules must not stand in for the library's.
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
        )
        self._pending = b""
        ready = self._exchange(self._process, {"families": self._families}, _START_S)
        if "ready" not in ready:
            self._end()
            raise WorkerLost(f"reasoning-gym cannot be used: {ready.get('error')}")
        return self._process

    def _exchange(
        self, process: subprocess.Popen[bytes], message: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + limit_s
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                    raise WorkerLost(f"no answer within {limit_s:g} s")
                read = os.read(process.stdout.fileno(), _READ)
                if not read:
                    raise WorkerLost("it died")
                self._pending += read
        except BaseException as error:
            # Nobody may take a late answer for the answer to the next request.
            self._end()
            if isinstance(error, OSError):
                raise WorkerLost("it died") from error
            raise
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
