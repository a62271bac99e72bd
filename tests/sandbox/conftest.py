"""Providers for the sandbox tests. Every hostile test runs on each isolating kind."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from headrace.sandbox import ServerProvider, open_provider
from headrace.sandbox.types import Limits


@pytest.fixture(scope="session")
def user_namespaces() -> bool:
    """Whether this machine grants them, judged without headrace."""
    program = shutil.which("unshare")
    return program is None or subprocess.run([program, "-Ur", "true"], check=False).returncode == 0


@pytest.fixture(params=["bwrap", "unshare"])
def kind(request: pytest.FixtureRequest, user_namespaces: bool) -> str:
    if not user_namespaces:
        pytest.skip("user namespaces are refused on this machine")
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture
async def provider(kind: str) -> AsyncIterator[ServerProvider]:
    provider = open_provider(kind)
    yield provider
    await provider.close()


@pytest.fixture
async def limited(kind: str) -> AsyncIterator[Callable[..., ServerProvider]]:
    """A function that opens a provider of this kind with the given limits."""
    opened = []

    def open_limited(**limits: float) -> ServerProvider:
        opened.append(open_provider(kind, msgspec.structs.replace(Limits(), **limits)))
        return opened[-1]

    yield open_limited
    for provider in opened:
        await provider.close()


@pytest.fixture
def host_processes() -> Callable[[str], list[int]]:
    """A function: pids of this machine whose command line holds a text."""

    def find(text: str) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("latin-1")
                except OSError:
                    continue
                if text in line:
                    found.append(int(folder.name))
        return found

    return find
