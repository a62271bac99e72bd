"""Fixtures of the task tests: real sandboxes, sandboxes that run nothing, and a scripted model
behind real HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.sandbox import open_provider
from headrace.sandbox.types import CommandResult, EndReason, FileEntry, SandboxError


@pytest.fixture
async def provider():
    """Real sandboxes, isolated where the machine can."""
    try:
        provider = open_provider(kind="auto")
    except UserError:
        provider = open_provider(kind="none")
    yield provider
    await provider.close()


@dataclass
class InertSandbox:
    """Runs nothing: every command prints "ok" unless told otherwise."""

    files: dict[str, FileEntry]
    results: Mapping[str, CommandResult]
    hang: bool = False
    closed: bool = False
    commands: list[str] = field(default_factory=list)

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        self.commands.append(command)
        if command == "break":
            raise SandboxError("the isolation layer failed")
        if self.hang:
            await asyncio.Event().wait()
        default = CommandResult(0, b"ok\n", False, EndReason.EXITED, 0.0)
        return self.results.get(command, default)

    async def tree(self) -> dict[str, FileEntry]:
        return self.files

    async def close(self) -> None:
        self.closed = True


class InertProvider:
    """Makes inert sandboxes and keeps them for inspection."""

    def __init__(self, results: Mapping[str, CommandResult] | None = None, hang: bool = False):
        self.results = results or {}
        self.hang = hang
        self.opened: list[InertSandbox] = []

    async def open(self, files: Mapping[str, FileEntry]) -> InertSandbox:
        sandbox = InertSandbox(dict(files), self.results, self.hang)
        self.opened.append(sandbox)
        return sandbox

    async def close(self) -> None:
        pass


@pytest.fixture
def inert_provider():
    """The InertProvider class."""
    return InertProvider


@dataclass
class Request:
    """What the scripted server received."""

    headers: dict[str, str]
    body: dict[str, Any]


Reply = tuple[int, dict[str, Any]]
Handler = Callable[[Request], Awaitable[Reply]]


class ScriptedServer:
    """An HTTP server whose chat completions come from `handler`."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.requests: list[Request] = []
        self.base_url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=5.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")[1:]
                pairs = (line.split(": ", 1) for line in lines if ": " in line)
                headers = {name.lower(): value for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = Request(headers, json.loads(body))
                self.requests.append(request)
                handler = self.handler
                assert handler is not None, "a test must set the handler first"
                status, reply = await handler(request)
                data = json.dumps(reply).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                    f"retry-after-ms: 1\r\ncontent-length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@pytest.fixture
async def server():
    """A running ScriptedServer; set its `handler`."""
    server = ScriptedServer()
    await server.start()
    yield server
    await server.stop()


def completion(message: dict[str, Any], finish_reason: str = "stop") -> Reply:
    """A chat completion with this assistant message."""
    choice = {"index": 0, "message": {"role": "assistant", **message}}
    return 200, {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice | {"finish_reason": finish_reason}],
    }


class Says:
    """Builders of server replies."""

    @staticmethod
    def text(content: str | None) -> Reply:
        return completion({"content": content})

    @staticmethod
    def call(arguments: str, name: str = "bash", copies: int = 1) -> Reply:
        function = {"name": name, "arguments": arguments}
        calls = [{"id": f"id{i}", "type": "function", "function": function} for i in range(copies)]
        return completion({"content": None, "tool_calls": calls}, "tool_calls")

    @staticmethod
    def command(command: str) -> Reply:
        return Says.call(json.dumps({"command": command}))


@pytest.fixture
def says():
    """The builders of server replies."""
    return Says
