"""The worker's side: `python -m headrace.cluster.worker FD` in a fresh interpreter.

The first frame on the socket is the `WorkerSpec`. Cores and threads are set before the target is
imported, because OpenMP reads them once. A reader thread turns frames into requests, so a busy
worker can look for news between two steps without blocking.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from headrace.cluster.types import Reply, Request, WorkerSpec

_HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 31
MAX_WAITING = 65_536


def read_exactly(sock: socket.socket, n: int) -> bytes | None:
    """n bytes from `sock`, or None at its end."""
    chunks = bytearray()
    while len(chunks) < n:
        part = sock.recv(min(1 << 20, n - len(chunks)))
        if not part:
            return None
        chunks += part
    return bytes(chunks)


def read_frame(sock: socket.socket) -> bytes | None:
    """One length-prefixed frame, or None at the end of the stream."""
    header = read_exactly(sock, _HEADER.size)
    if header is None:
        return None
    return read_exactly(sock, _HEADER.unpack(header)[0])


def frame(data: bytes) -> bytes:
    """`data` with its length in front."""
    if len(data) >= MAX_FRAME:
        raise ValueError(f"frame of {len(data)} bytes is over the limit of {MAX_FRAME}")
    return _HEADER.pack(len(data)) + data


class WorkerConnection:
    """What a worker talks to. `closed` turns True when the parent hangs up."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._requests: queue.Queue[Request | None] = queue.Queue(MAX_WAITING)
        self._send_lock = threading.Lock()
        self.closed = False
        threading.Thread(target=self._read, name="connection", daemon=True).start()

    def _read(self) -> None:
        try:
            while (data := read_frame(self._sock)) is not None:
                self._requests.put(self._decoder.decode(data))
        except OSError:
            pass
        finally:
            self.closed = True
            self._requests.put(None)

    def poll(self, timeout_s: float) -> Request | None:
        """The next request; None when there is none within `timeout_s` seconds or at the end."""
        try:
            if timeout_s <= 0:
                return self._requests.get_nowait()
            return self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def reply(self, request_id: int, result: Any = None, more: bool = False) -> None:
        """Answer with a msgpack-able result, or with a part of it if `more` is to come."""
        self._send(Reply(request_id, result, None, more))

    def fail(self, request_id: int, code: str, message: str) -> None:
        """Answer a request with an error."""
        self._send(Reply(request_id, None, (code, message)))

    def _send(self, reply: Reply) -> None:
        data = frame(self._encoder.encode(reply))
        with self._send_lock, contextlib.suppress(OSError):
            self._sock.sendall(data)


def serve(
    connection: WorkerConnection,
    worker: object,
    failures: Mapping[type[Exception], str],
    on_done: Callable[[str, float], None] = lambda method, seconds: None,
) -> None:
    """Answer requests one at a time until the parent hangs up.

    Args:
        connection: where they come from.
        worker: request `x` with a payload calls its `_do_x(**payload)`; the reply is what that
            returns. A future is answered when it is done; others are served meanwhile.
        failures: exceptions that are answered with this code and their message; any other ends
            the process, which the parent reports.
        on_done: told each answered method and its seconds, before the reply.
    """
    while True:
        request = connection.poll(1.0)
        if request is None:
            if connection.closed:
                return
            continue
        handler = getattr(worker, f"_do_{request.method}", None)
        if handler is None:
            connection.fail(request.id, "unknown_method", request.method)
            continue
        started = time.perf_counter()
        try:
            result = handler(**request.payload)
        except tuple(failures) as error:
            code = next(code for kind, code in failures.items() if isinstance(error, kind))
            connection.fail(request.id, code, str(error))
            continue
        on_done(request.method, time.perf_counter() - started)
        if isinstance(result, Future):
            result.add_done_callback(functools.partial(_reply, connection, request.id, failures))
        else:
            connection.reply(request.id, result)


def _reply(
    connection: WorkerConnection,
    request_id: int,
    failures: Mapping[type[Exception], str],
    done: Future[Any],
) -> None:
    """Answer with what a future came to, in whatever thread it was done."""
    error = done.exception()
    if error is None:
        connection.reply(request_id, done.result())
        return
    for kind, code in failures.items():
        if isinstance(error, kind):
            connection.fail(request_id, code, str(error))
            return
    traceback.print_exception(error)
    os._exit(1)  # as an exception of the serving thread would end the process


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends: a killed run leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Entry point of the worker process."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        return
    # Ctrl-C reaches the whole terminal group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    first = read_frame(sock)
    if first is None:
        return
    spec = msgspec.msgpack.decode(first, type=WorkerSpec)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    module, _, name = spec.target.partition(":")
    worker = getattr(importlib.import_module(module), name)(WorkerConnection(sock), **spec.kwargs)
    worker.run()


if __name__ == "__main__":
    main()
