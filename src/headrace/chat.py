"""Talking to a checkpoint in a terminal; thinking and tool calls show, calls run if wanted.

The conversation is one gateway session, so each turn extends exactly the tokens the model read and
wrote before, unless its format drops earlier thinking when the user speaks again. Input is read
between turns, outside the event loop, so that Ctrl-C and Ctrl-D behave as in any other program.
"""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from headrace.errors import UserError
from headrace.gateway.gateway import Gateway
from headrace.gateway.turn import ApiError
from headrace.sandbox.types import FileEntry, Limits, Sandbox
from headrace.served_engine import ServeOptions, open_engine
from headrace.serving import find_checkpoint
from headrace.tokens.renderer import create_renderer

_MAX_TOOL_ROUNDS = 8
_MAX_CALLS = 100_000
_OUTPUT_CHARACTERS = 1000
_MAX_FILES = 1000
_MAX_FILE_BYTES = 16 * 2**20


class ChatOptions(msgspec.Struct, frozen=True):
    """How the conversation goes.

    Attributes:
        system: opening system message; None has none.
        bash: give the model a bash tool in a sandbox.
        files: directory copied into that sandbox; None leaves it empty.
        temperature: 0 is greedy.
        max_tokens: most tokens per answer.
        seed: makes sampling repeatable; None does not.
    """

    system: str | None = None
    bash: bool = False
    files: Path | None = None
    temperature: float = 0.7
    max_tokens: int = 256
    seed: int | None = None


class Conversation:
    """One session: messages so far and what answers them.

    Args:
        gateway: answers.
        key: the session's key.
        options: how the conversation goes.
        console: where answers, tool calls and their results are printed.
        sandbox: where bash calls run; None only shows them.
    """

    def __init__(
        self,
        gateway: Gateway,
        key: str,
        options: ChatOptions,
        console: Console,
        sandbox: Sandbox | None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._gateway = gateway
        self._key = key
        self._options = options
        self._console = console
        self._sandbox = sandbox
        self._tools: list[dict[str, Any]] = []
        system = options.system
        if sandbox is not None:
            # Models trained on the terminal tasks know these words and this tool.
            from headrace.tasks.terminal.agent import SYSTEM_PROMPT, TOOLS

            self._tools = TOOLS
            system = system or SYSTEM_PROMPT
        if system:
            self.messages.append({"role": "system", "content": system})

    async def say(self, text: str) -> None:
        """Send one message and print what comes back, until the model stops calling tools.

        Raises:
            UserError: the conversation no longer fits the model's context.
        """
        self.messages.append({"role": "user", "content": text})
        for _ in range(_MAX_TOOL_ROUNDS):
            message = await self._answer()
            self.messages.append(message)
            calls = message.get("tool_calls") or []
            for call in calls:
                arguments = call["function"]["arguments"]
                self._print(f"{call['function']['name']} {arguments}", "cyan", "call ")
            if not calls or self._sandbox is None:
                return
            for call in calls:
                result = await self._carry_out(call["function"], self._sandbox)
                self._print(result, "dim", "     ")
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
        self._print(f"(stopped after {_MAX_TOOL_ROUNDS} rounds of tool calls)", "yellow")

    async def _answer(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._gateway.model,
            "messages": self.messages,
            "temperature": self._options.temperature,
            "max_tokens": self._options.max_tokens,
        }
        if self._tools:
            body["tools"] = self._tools
        try:
            answer = await self._gateway.chat(self._key, body)
        except ApiError as error:
            raise UserError(f"chat: {error}; start a new conversation") from error
        choice = answer["choices"][0]
        message = choice["message"]
        if thinking := (message.get("reasoning_content") or "").strip():
            self._print(thinking, "dim italic", "think ")
        if message.get("content"):
            self._print(message["content"])
        if choice["finish_reason"] == "length":
            self._print("(cut; allow more with --max-tokens)", "yellow")
        return message

    async def _carry_out(self, function: Mapping[str, Any], sandbox: Sandbox) -> str:
        """What a tool call returns to the model; a call that cannot be read is told so."""
        from headrace.tasks.terminal.agent import result_text

        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        command = arguments.get("command") if isinstance(arguments, dict) else None
        if function["name"] != "bash" or not isinstance(command, str) or "\0" in command:
            return 'error: call bash with {"command": "..."}'
        return result_text(await sandbox.run(command), _OUTPUT_CHARACTERS)

    def _print(self, text: str, style: str = "", prefix: str = "") -> None:
        self._console.print(Text(prefix + text, style=style), soft_wrap=True)


def chat_loop(
    checkpoint: str,
    serve: ServeOptions,
    options: ChatOptions,
    *,
    message: str | None,
    console: Console,
) -> int:
    """Hold a conversation, or say one thing; returns the exit code.

    Args:
        checkpoint: see `headrace.serving.find_checkpoint`.
        serve: how the engine runs.
        options: how the conversation goes.
        message: say this and end; None reads messages until an empty line or end of input.
        console: where to print.

    Raises:
        UserError: the checkpoint cannot be used, no sandbox works, or the context is full.
    """
    files = {} if options.files is None else read_files(options.files)
    path = find_checkpoint(checkpoint)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            conversation = runner.run(_open(stack, path, serve, options, files, console))
            if message is not None:
                runner.run(conversation.say(message))
                return 0
            if console.is_terminal:
                console.print(f"Talking to {path}. An empty line or Ctrl-D ends it.", style="dim")
            while text := _read_line(console):
                runner.run(conversation.say(text))
            return 0
        finally:
            runner.run(stack.aclose())


async def _open(
    stack: contextlib.AsyncExitStack,
    checkpoint: Path,
    serve: ServeOptions,
    options: ChatOptions,
    files: Mapping[str, FileEntry],
    console: Console,
) -> Conversation:
    """Start everything; what was started is ended by `stack`."""
    renderer = create_renderer(serve.renderer, checkpoint)
    sandbox = None
    if options.bash or options.files is not None:
        from headrace.sandbox import open_provider

        provider = await asyncio.to_thread(open_provider, "auto", Limits())
        stack.push_async_callback(provider.close)
        sandbox = await provider.open(files)
        stack.push_async_callback(sandbox.close)
    engine = await stack.enter_async_context(open_engine(checkpoint, serve))
    await engine.start()
    gateway = Gateway(
        engine,
        renderer,
        request_timeout_s=serve.request_timeout_s,
        default_max_tokens=options.max_tokens,
    )
    stack.push_async_callback(gateway.close)
    key = gateway.open_session("chat", max_calls=_MAX_CALLS, seed=options.seed)
    return Conversation(gateway, key, options, console, sandbox)


def _read_line(console: Console) -> str:
    """The next message; empty at the end of input."""
    try:
        return (console.input("[bold]> [/]") if console.is_terminal else input()).strip()
    except EOFError:
        return ""


def read_files(directory: Path) -> dict[str, FileEntry]:
    """The tree under `directory` as a sandbox takes it; links stay links, special files are left.

    Raises:
        UserError: no such directory, or more than a sandbox should hold.
    """
    if not directory.is_dir():
        raise UserError(f"--files {directory}: no such directory")
    found: dict[str, FileEntry] = {}
    size = 0
    for folder, folders, names in os.walk(directory):
        for name in [*folders, *names]:
            path = Path(folder, name)
            status = path.lstat()
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                entry = FileEntry("link", mode, os.fsencode(os.readlink(path)))
            elif stat.S_ISDIR(status.st_mode):
                entry = FileEntry("dir", mode)
            elif stat.S_ISREG(status.st_mode):
                size += status.st_size
                if size > _MAX_FILE_BYTES:
                    raise UserError(f"--files {directory}: more than 16 MiB; name a smaller one")
                entry = FileEntry("file", mode, path.read_bytes())
            else:
                continue
            found[path.relative_to(directory).as_posix()] = entry
            if len(found) > _MAX_FILES:
                raise UserError(
                    f"--files {directory}: more than {_MAX_FILES} files; name a smaller one"
                )
    return found
