"""Sandboxes for asyncio programs: starts a sandbox server and talks to it.

A provider belongs to one event loop. When its server dies, calls under way raise SandboxError and
the next `open` starts another server; sandboxes of the dead one stay dead.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

import headrace
from headrace.errors import UserError
from headrace.sandbox import protocol
from headrace.sandbox.isolation import UNPRIVILEGED_UID, limits_script
from headrace.sandbox.server import LONGEST_WAIT_S
from headrace.sandbox.types import (
    CommandResult,
    EndReason,
    FileEntry,
    Limits,
    SandboxError,
    SandboxStartError,
)
from headrace.sandbox.workfolder import MOST_NAME_BYTES, check_path

KINDS = ("bwrap", "unshare")
"""Isolating kinds, strongest first."""
_START_S = 20.0
_ANSWER_S = 30.0
_END_S = 5.0
# The kernel takes at most 128 KiB in one argument of a program.
_LONGEST_COMMAND = 120_000
_REFUSED = 126
_BOOT = "import sys; sys.path[:0] = {paths!r}; from headrace.sandbox.server import main; main()"

T = TypeVar("T", bound=protocol.Reply)


class _ServerProcess:
    """A started server and the blocking end of its socket."""

    def __init__(self, kind: str, limits: Limits) -> None:
        self.kind = kind
        self.limits = limits
        self.workshop = _make_workshop(limits) if kind == "none" else ""
        self.channel, theirs = socket.socketpair()
        config = protocol.ServerConfig(kind, limits, os.getpid(), self.workshop)
        # Only the standard library and two folders: no site, no environment, no start-up files.
        paths = [
            str(Path(headrace.__file__).parents[1]),
            str(Path(msgspec.__file__).parents[1]),
        ]
        arguments = [sys.executable, "-I", "-S", "-c", _BOOT.format(paths=paths)]
        arguments += [str(theirs.fileno()), msgspec.json.encode(config).decode()]
        try:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal is for the provider to handle.
                start_new_session=True,
            )
        except BaseException:
            self.channel.close()
            shutil.rmtree(self.workshop, ignore_errors=True)
            raise
        finally:
            theirs.close()

    def greet(self) -> None:
        """Wait until it can work and see it run one command.

        Raises:
            SandboxError: it cannot, with the reason.
        """
        self.channel.settimeout(_START_S)
        reader = protocol.FrameReader(protocol.largest_frame(self.limits))
        try:
            self._expect(reader, protocol.Ready)
            self._ask(reader, protocol.Open(1, 0, {}), protocol.Done)
            ran = self._ask(reader, protocol.Run(2, 0, b"echo $((6*7))", 10.0), protocol.Ran)
            if ran.output != b"42\n":
                said = ran.output.decode("utf-8", "replace").strip()
                raise SandboxError(f"a first command failed with code {ran.exit_code}: {said}")
            self._ask(reader, protocol.Close(3, 0), protocol.Done)
        except OSError as error:
            raise SandboxError(f"the sandbox server does not start: {error}") from error

    def _ask(self, reader: protocol.FrameReader, request: protocol.Request, kind: type[T]) -> T:
        self.channel.sendall(protocol.frame(request))
        return self._expect(reader, kind)

    def _expect(self, reader: protocol.FrameReader, kind: type[T]) -> T:
        while True:
            data = self.channel.recv(1 << 16)
            if not data:
                raise SandboxError("the sandbox server ended while starting")
            for body in reader.feed(data):
                reply = protocol.decode_reply(body)
                if isinstance(reply, protocol.Failed):
                    raise SandboxError(reply.error)
                if isinstance(reply, kind):
                    return reply

    def end(self) -> None:
        """Stop it and remove what it left. Blocks for a moment; safe to repeat."""
        self.channel.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)
        if self.workshop:
            shutil.rmtree(self.workshop, ignore_errors=True)


def _make_workshop(limits: Limits) -> str:
    folder = tempfile.mkdtemp(prefix="headrace-sandbox-")
    script = Path(folder, "limits.sh")
    script.write_text(limits_script(limits, own_processes=None, folder="HOME"))
    if os.geteuid() == 0:
        # The server will be another user, unless there is no other, as in a rootless container.
        with contextlib.suppress(OSError):
            os.chown(folder, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    return folder


class _Connection(asyncio.Protocol):
    """Requests under way to one server."""

    def __init__(self, server: _ServerProcess) -> None:
        self.server = server
        self.alive = True
        self._reader = protocol.FrameReader(protocol.largest_frame(server.limits))
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[protocol.Reply]] = {}
        self._last_id = 100

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            reply = protocol.decode_reply(body)
            future = self._pending.get(getattr(reply, "id", 0))
            if future is not None and not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SandboxError("the sandbox server ended"))

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, request: protocol.Request) -> None:
        if self._transport is not None and self.alive:
            self._transport.write(protocol.frame(request))

    async def ask(self, request_id: int, request: protocol.Request, kind: type[T], s: float) -> T:
        """Send `request` and wait at most `s` seconds for its reply.

        Raises:
            SandboxError: refused, the server ended, or no reply came; then the server is ended.
        """
        if not self.alive:
            raise SandboxError("the sandbox server ended")
        future = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        try:
            self.send(request)
            async with asyncio.timeout(s):
                reply = await future
        except TimeoutError as error:
            self.abandon()
            raise SandboxError(f"the sandbox server gave no answer within {s:.0f} s") from error
        finally:
            del self._pending[request_id]
        if isinstance(reply, protocol.Failed):
            raise SandboxError(reply.error)
        if not isinstance(reply, kind):
            raise SandboxError(f"the sandbox server answered with {type(reply).__name__}")
        return reply

    def abandon(self) -> None:
        """End a server that does not answer; everything under way fails."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()


class ServerSandbox:
    """One sandbox of a ServerProvider. Calls on one sandbox are served one after the other."""

    def __init__(self, connection: _Connection, number: int, limits: Limits) -> None:
        self._connection = connection
        self._number = number
        self._limits = limits
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        """Run `command` with bash in /work. No process it started survives the call.

        A command that no shell can be given (NUL bytes, longer than 120,000 bytes) is not run:
        its result has exit code 126 and says why. Cancelling the call ends the command.

        Args:
            command: shell text.
            timeout_s: wall-clock seconds, at most and by default those of the limits.

        Raises:
            SandboxError: the isolation layer failed or the sandbox is closed.
        """
        try:
            text = command.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # A lone surrogate, which JSON can smuggle in.
            text = command.encode("utf-8", "replace")
        refusal = _refusal(text)
        if refusal is not None:
            return CommandResult(_REFUSED, refusal, False, EndReason.EXITED, 0.0)
        wall_s = self._limits.wall_s
        if timeout_s is not None:
            wall_s = max(0.0, min(wall_s, timeout_s))
        async with self._turn:
            request_id = self._next_id()
            request = protocol.Run(request_id, self._number, text, wall_s)
            longest = wall_s + LONGEST_WAIT_S + _ANSWER_S
            try:
                ran = await self._connection.ask(request_id, request, protocol.Ran, longest)
            except asyncio.CancelledError:
                self._connection.send(protocol.Kill(request_id))
                raise
        if self._closed:
            raise SandboxError("the sandbox was closed while a command ran")
        return CommandResult(ran.exit_code, ran.output, ran.truncated, ran.ended, ran.wall_s)

    async def tree(self) -> dict[str, FileEntry]:
        """The work folder now, by relative path, links not followed.

        Pipes, sockets and device nodes have kind "other". Bytes beyond the disk limit (sparse
        files) and folders more than 64 deep are left out. Names that are not UTF-8 are decoded as
        `os.fsdecode` does.

        Raises:
            SandboxError: the isolation layer failed or the sandbox is closed.
        """
        async with self._turn:
            request_id = self._next_id()
            request = protocol.Tree(request_id, self._number)
            listing = await self._connection.ask(request_id, request, protocol.Listing, _ANSWER_S)
        return {os.fsdecode(path): entry for path, entry in listing.files.items()}

    async def reset(self, files: Mapping[str, FileEntry]) -> None:
        """Replace everything in work folder and /tmp by `files`, as if newly opened.

        Raises:
            ValueError: a path or kind in `files` is bad.
            SandboxError: the isolation layer failed, `files` exceed the limits, or it is closed.
        """
        encoded = _encode_files(files, self._limits)
        async with self._turn:
            request_id = self._next_id()
            request = protocol.Open(request_id, self._number, encoded)
            await self._connection.ask(request_id, request, protocol.Done, _ANSWER_S)

    async def close(self) -> None:
        """Remove everything; a command under way is killed and raises. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        if not self._connection.alive:
            return
        request_id = self._connection.next_id()
        request = protocol.Close(request_id, self._number)
        # A server that ended has removed everything already.
        with contextlib.suppress(SandboxError):
            await self._connection.ask(request_id, request, protocol.Done, _ANSWER_S)

    def _next_id(self) -> int:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        return self._connection.next_id()


class ServerProvider:
    """Makes sandboxes in one server process. Use it from one event loop."""

    def __init__(self, kind: str, limits: Limits, server: _ServerProcess) -> None:
        self.kind = kind
        """"bwrap", "unshare" or "none"."""
        self.limits = limits
        """Bounds of every sandbox."""
        self._server: _ServerProcess | None = server
        self._connection: _Connection | None = None
        self._starting = asyncio.Lock()
        self._last_number = 0
        self._closed = False

    @property
    def server_pid(self) -> int | None:
        """Process id of the server, for measuring it; None once closed."""
        return self._server.process.pid if self._server else None

    async def open(self, files: Mapping[str, FileEntry]) -> ServerSandbox:
        """A fresh sandbox whose work folder holds `files`.

        Raises:
            ValueError: a path or kind in `files` is bad.
            SandboxError: none can be made, `files` exceed the limits, or the provider is closed.
        """
        encoded = _encode_files(files, self.limits)
        try:
            connection = await self._connect()
        except SandboxError as error:
            raise SandboxStartError(str(error)) from error
        self._last_number += 1
        number = self._last_number
        request_id = connection.next_id()
        request = protocol.Open(request_id, number, encoded)
        try:
            await connection.ask(request_id, request, protocol.Done, _ANSWER_S)
        except asyncio.CancelledError:
            connection.send(protocol.Close(connection.next_id(), number))
            raise
        except SandboxError as error:
            raise SandboxStartError(str(error)) from error
        return ServerSandbox(connection, number, self.limits)

    async def close(self) -> None:
        """Close every sandbox and the server behind them. Safe to repeat."""
        self._closed = True
        async with self._starting:
            await self._end_server()

    async def __aenter__(self) -> "ServerProvider":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connect(self) -> _Connection:
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if self._connection is not None:
                if self._connection.alive:
                    return self._connection
                await self._end_server()
            if self._server is None:
                self._server = _ServerProcess(self.kind, self.limits)
                try:
                    await asyncio.to_thread(self._server.greet)
                except BaseException:
                    await self._end_server()
                    raise
            server = self._server
            server.channel.setblocking(False)
            _, self._connection = await asyncio.get_running_loop().create_unix_connection(
                lambda: _Connection(server), sock=server.channel
            )
            return self._connection

    async def _end_server(self) -> None:
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.end)


def open_provider(kind: str = "auto", limits: Limits | None = None) -> ServerProvider:
    """A provider of the strongest isolation this machine offers, or of `kind`.

    Blocks for about 0.1 s: the server is started and runs one command.

    Args:
        kind: "auto" (bwrap, else unshare), "bwrap", "unshare", or "none": plain processes in a
            temporary folder, which see the host's files and network. "none" limits time, output
            and memory, but is unsafe for commands you do not trust; it is never chosen for you.
        limits: bounds of every sandbox; default Limits().

    Raises:
        UserError: unknown or unusable kind, or senseless limits.
    """
    limits = limits or Limits()
    _check_limits(limits)
    if kind not in ("auto", "none", *KINDS):
        raise UserError(f"sandbox kind {kind!r}: use auto, {', '.join(KINDS)} or none")
    reasons = []
    for candidate in KINDS if kind == "auto" else (kind,):
        try:
            return ServerProvider(candidate, limits, _start(candidate, limits))
        except SandboxError as error:
            reasons.append(f"{candidate}: {error}")
    raise UserError(
        f"no sandbox of kind {kind!r} works here ({'; '.join(reasons)}); mend one of these, or "
        "choose kind 'none' to run commands without isolation"
    )


def probe() -> dict[str, str]:
    """Each kind of isolation by name -> "ok", or why it does not work here and the remedy."""
    found = {}
    for kind in (*KINDS, "none"):
        try:
            _start(kind, Limits()).end()
            found[kind] = "ok"
        except SandboxError as error:
            found[kind] = str(error)
    return found


def _start(kind: str, limits: Limits) -> _ServerProcess:
    try:
        server = _ServerProcess(kind, limits)
    except OSError as error:
        raise SandboxError(f"the sandbox server does not start: {error}") from error
    try:
        server.greet()
    except BaseException:
        server.end()
        raise
    return server


def _check_limits(limits: Limits) -> None:
    smallest: dict[str, float] = {
        "wall_s": 0.01,
        "cpu_s": 0.01,
        "processes": 2,
        "memory_mb": 16,
        "output_bytes": 1,
        "disk_mb": 1,
        "files": 1,
    }
    values: dict[str, Any] = msgspec.structs.asdict(limits)
    for name, least in smallest.items():
        if not values[name] >= least:
            raise UserError(f"sandbox limit {name} = {values[name]}: use at least {least:g}")


def _encode_files(files: Mapping[str, FileEntry], limits: Limits) -> dict[bytes, FileEntry]:
    encoded = {}
    names = content = 0
    for name, entry in files.items():
        path = os.fsencode(name)
        check_path(path)
        if entry.kind not in ("file", "dir", "link"):
            raise ValueError(f"kind {entry.kind!r} of {name!r} is not file, dir or link")
        encoded[path] = entry
        names += len(path)
        content += len(entry.data)
    # The server would refuse as well, but after a transfer without bounds.
    if content > limits.disk_mb * 2**20 or names > MOST_NAME_BYTES:
        raise SandboxError(
            f"no space for {len(encoded)} files of {content} bytes: disk_mb is {limits.disk_mb}"
        )
    return encoded


def _refusal(command: bytes) -> bytes | None:
    if b"\0" in command:
        return b"bash: a command cannot contain NUL bytes\n"
    if len(command) > _LONGEST_COMMAND:
        return b"bash: argument list too long\n"
    return None
