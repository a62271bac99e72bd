"""A gateway on loopback whose model says what a test wrote down, and other people's programs that
are pointed at it.

A program is an installation that an environment variable names (`make agents` makes all of them);
where it is not set, its tests are skipped.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from recorded import check_laws
from scripted import ScriptedEngine, answers, merged_tokenizer

from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.rollout.types import Call
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.thinking import ThinkingMode

TOKENIZER = merged_tokenizer()
DEADLINE_S = 120.0
"""Of one program; they take seconds, the first start after their installation longer."""


def installed(variable: str) -> Path | None:
    """What an environment variable names, if it is there."""
    named = os.environ.get(variable)
    return Path(named) if named and Path(named).exists() else None


def with_path(folder: Path) -> dict[str, str]:
    """The environment in which a shell finds what is in `folder` first."""
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def says(text: str, *calls: tuple[str, Mapping[str, str]], thought: str = "so") -> list[int]:
    """The tokens of a GLM-5 answer: a thought, a text, and calls as (tool, its arguments)."""
    body = f"{thought}</think>{text}"
    for name, arguments in calls:
        values = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
        body += f"<tool_call>{name}{''.join(values)}</tool_call>"
    return TOKENIZER.encode(body + ("<|observation|>" if calls else "<|user|>"))


class Rig(NamedTuple):
    """The gateway, its engine, and the key of its one open session "s"."""

    server: GatewayServer
    engine: ScriptedEngine
    key: str

    @property
    def url(self) -> str:
        """For OpenAI's clients."""
        return self.server.base_url

    @property
    def root(self) -> str:
        """For Anthropic's clients."""
        return self.server.base_url.removesuffix("/v1")

    @property
    def refused(self) -> int:
        """Requests that were answered with an error."""
        counted = self.server.gateway.counters.items()
        return sum(n for name, n in counted if name.startswith("error."))

    async def calls(self) -> tuple[Call, ...]:
        """Ends the session; its calls, after the token laws have been checked of them."""
        calls = await self.server.gateway.close_session("s")
        check_laws(calls, self.engine)
        return calls


@asynccontextmanager
async def serving(*outputs: list[int], thinking: ThinkingMode | None = None) -> AsyncIterator[Rig]:
    """A gateway whose model samples `outputs`, one for each request."""
    engine = ScriptedEngine(answers(*outputs), max_context=100_000)
    renderer = LibraryRenderer("glm-5", TOKENIZER)
    gateway = Gateway(engine, renderer, model="tiny", thinking=thinking)
    server = await GatewayServer.start(gateway)
    try:
        yield Rig(server, engine, gateway.open_session("s"))
    finally:
        await server.stop()


async def run_program(
    command: Sequence[str | Path], *, folder: Path, environment: dict[str, str]
) -> str:
    """What a program printed. It has a home of its own and nobody's keys, addresses or packages.

    Raises:
        AssertionError: it failed, or outran `DEADLINE_S`.
    """
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI", "ANTHROPIC", "PYTHON")) and "API_KEY" not in name
    }
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        env=inherited | {"HOME": str(home)} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{out.decode()[-3000:]}\n{err.decode()[-3000:]}"
    return out.decode()


def chain(calls: Sequence[Call]) -> list[str | None]:
    """For each call what it is: None for one that continues the call before it, its fork's reason,
    or "other parent"."""
    kinds: list[str | None] = []
    for i, call in enumerate(calls):
        if call.parent_id is None:
            kinds.append(call.fork_reason or "first")
        else:
            kinds.append(None if i and call.parent_id == calls[i - 1].id else "other parent")
    return kinds
