"""The local cluster: workers are subprocesses of this one, pinned to the cores they own."""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

from headrace.cluster.pending import PendingRequests
from headrace.cluster.types import (
    UNSENDABLE,
    OnPart,
    Reply,
    Request,
    WorkerDied,
    WorkerFailure,
    WorkerSpec,
)
from headrace.cluster.worker import frame

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def available_cores() -> tuple[int, ...]:
    """Cores this process may run on, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


class LocalHandle:
    """The parent's end of one subprocess. See `WorkerHandle`."""

    def __init__(
        self,
        spec: WorkerSpec,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = spec.name
        self.pid = process.pid
        self._process = process
        self._writer = writer
        self._ids = itertools.count(1)
        self._open = PendingRequests()
        self._encoder = msgspec.msgpack.Encoder()
        self._dead = asyncio.Event()
        self._reader_task = asyncio.create_task(self._read(reader), name=f"{spec.name} reader")

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(Reply)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                self._open.take(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            pass
        finally:
            self._dead.set()
            self._open.fail_all(WorkerDied(f"{self.name} (pid {self.pid}) ended"))

    async def request(
        self,
        method: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        on_part: OnPart | None = None,
    ) -> Any:
        """See `WorkerHandle.request`."""
        if self._dead.is_set():
            raise WorkerDied(f"{self.name} (pid {self.pid}) has ended")
        request = Request(next(self._ids), method, payload or {})
        try:
            data = frame(self._encoder.encode(request))
        except (ValueError, OverflowError) as error:
            # A lone surrogate, an integer of more than 64 bits, a payload of gigabytes.
            raise WorkerFailure(UNSENDABLE, f"{method}: cannot be sent ({error})") from error
        future = self._open.open(request.id, on_part)
        try:
            self._writer.write(data)
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                return await future
        except (ConnectionError, BrokenPipeError) as error:
            raise WorkerDied(f"{self.name} (pid {self.pid}) ended") from error
        except RuntimeError as error:
            # What uvloop says of a connection that was lost a moment ago.
            if not self._writer.is_closing():
                raise
            raise WorkerDied(f"{self.name} (pid {self.pid}) ended") from error
        finally:
            self._open.forget(request.id)

    async def wait_dead(self) -> None:
        """See `WorkerHandle.wait_dead`."""
        await self._dead.wait()

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """See `WorkerHandle.stop`."""
        self._writer.close()
        with contextlib.suppress(Exception):
            await self._writer.wait_closed()
        try:
            await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._reader_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader_task


def _spawn(spec: WorkerSpec, sock: socket.socket, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the interpreter that becomes the worker; closes this side's copy of `sock`."""
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        log = None
        if spec.log_path is not None:
            log = stack.enter_context(open(spec.log_path, "ab"))
        return subprocess.Popen(
            [sys.executable, "-m", "headrace.cluster.worker", str(sock.fileno())],
            pass_fds=[sock.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
        )


class LocalCluster:
    """Starts workers on this machine. See `Cluster`."""

    def __init__(self) -> None:
        self._handles: list[LocalHandle] = []

    async def start(self, spec: WorkerSpec) -> LocalHandle:
        """Start one worker; returns as soon as the process runs, before its target is ready.

        Raises:
            ValueError: `spec` asks for more threads than the cores it owns.
        """
        if spec.cores and spec.threads > len(spec.cores):
            raise ValueError(
                f"{spec.name}: {spec.threads} threads on {len(spec.cores)} cores; "
                "oversubscribed compute threads slow each other down many times"
            )
        ours, theirs = socket.socketpair()
        env = dict(os.environ)
        for variable in _THREAD_VARIABLES:
            env[variable] = str(spec.threads)
        # Spinning OpenMP threads would eat a core that the gateway and sandboxes need.
        env.setdefault("KMP_BLOCKTIME", "0")
        env.setdefault("GOMP_SPINCOUNT", "0")
        process = _spawn(spec, theirs, env)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(frame(msgspec.msgpack.encode(spec)))
        await writer.drain()
        self._handles = [handle for handle in self._handles if handle.alive]
        handle = LocalHandle(spec, process, reader, writer)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        """Stop every worker still running."""
        await asyncio.gather(*(handle.stop() for handle in self._handles))
        self._handles.clear()
