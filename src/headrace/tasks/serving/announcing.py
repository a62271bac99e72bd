"""Keeps telling a run that a task service is there, from the service's start to its end.

A run that is not there yet, or refuses, is told again and again: it may be started later, or with
another recipe. It knows the register's protocol and nothing of rollouts.
"""

import asyncio
import contextlib
import functools
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from headrace.errors import UserError
from headrace.http.server import is_unspecified
from headrace.tasks.remote.checking import Misreport, read
from headrace.tasks.remote.client import Refused, TaskClient, Unreachable, check_url
from headrace.tasks.serving.wire import Announcement, Description, Standing

_RETRY_S = 2.0
_ANSWER_S = 5.0
_FAREWELL_S = 2.0
_LONGEST_S = 60.0
"""A run that wants to hear more rarely is told all the same."""


def check_registration(register: str | None, url: str | None, token: str | None) -> None:
    """Refuse what could never be announced.

    Args:
        register: address of a run's register; None announces nothing.
        url: of the service, where the run reaches it.
        token: of the task.

    Raises:
        UserError: no token, or an address that is none.
    """
    if register is None:
        if url is not None:
            raise UserError(
                f"url {url!r}: is where a run reaches a service that registers; give register, too"
            )
        return
    check_url(register, "register")
    if url is not None:
        check_url(url, "url")
    if token is None:
        raise UserError(
            f"register {register!r}: the run asks for the token of its task; give it, too"
        )


@contextlib.asynccontextmanager
async def announced(
    found: Description, url: str, *, register: str | None, token: str | None
) -> AsyncIterator[None]:
    """Keep a service announced, and print what becomes of it.

    Args:
        found: what the service is.
        url: where it is; see `reachable_url`.
        register: address of a run's register; None announces nothing.
        token: of the task.

    Raises:
        UserError: nobody knows the way to the register.
    """
    if register is None or token is None:
        yield
        return
    where = await asyncio.to_thread(reachable_url, url, register)
    said = Announcement(found.name, where, found.options, found.software)
    announcer = Announcer(register, token, said, report=functools.partial(print, flush=True))
    announcer.start()
    try:
        yield
    finally:
        await announcer.stop()


class Announcer:
    """See the module. Start it, then `stop` it; belongs to the loop that started it.

    Args:
        register: address of a run's register.
        token: of the task, for the run and the service alike.
        said: what is announced.
        report: told in words whenever the run's answer is another than before.

    Raises:
        UserError: `register` is no address.
    """

    def __init__(
        self, register: str, token: str, said: Announcement, *, report: Callable[[str], Any] = print
    ) -> None:
        self._register = check_url(register, "register")
        self._client = TaskClient(self._register, token, connections=2, answer_s=_ANSWER_S)
        self._said = said
        self._report = report
        self._path = f"/v1/services/{uuid.uuid4().hex}"
        self._words = ""
        self._known = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to announce."""
        self._task = asyncio.create_task(self._run(), name=f"announce {self._said.url}")

    async def stop(self) -> None:
        """Say that the service ends, as far as the run listens. Safe to repeat."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._known:
            with contextlib.suppress(Unreachable, Refused, Misreport, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._client.ask("DELETE", self._path)
        await self._client.close()

    async def _run(self) -> None:
        while True:
            self._known = True  # the run may have heard it without our getting its answer
            try:
                data = await self._client.ask("PUT", self._path, self._said)
                words, wait_s = self._understand(read(data, Standing, "answer"))
            except Unreachable as error:
                words, wait_s = f"no run answers at {self._register} ({error}); trying on", _RETRY_S
            except Refused as error:
                words = f"the run at {self._register} refuses it: {error}; trying on"
                wait_s = max(_RETRY_S, error.retry_after_s)
            except Misreport as error:
                words = f"what answers at {self._register} is no run: {error}; trying on"
                wait_s = _RETRY_S
            if words and words != self._words:
                self._words = words
                self._report(f"task {self._said.task}: {words}")
            await asyncio.sleep(wait_s)

    def _understand(self, standing: Standing) -> tuple[str, float]:
        """What to tell people, and seconds until the next announcement."""
        words = ""
        if standing.state == "serving":
            words = f"registered with run {standing.run[:200]} at {self._register}"
        elif standing.state == "unreachable":
            words = (
                f"run {standing.run[:200]} cannot use {self._said.url}: {standing.why[:1000]}; "
                "trying on (--url names another address)"
            )
        return " ".join(words.split()), min(_LONGEST_S, max(0.05, standing.every_s))


def reachable_url(url: str, register: str) -> str:
    """Where a run reaches a server that is bound to `url`: there, or, if that stands for every
    address of this machine, at the one that this machine has on the way to the run.

    Args:
        url: of the server.
        register: address of the run's register.

    Raises:
        UserError: `register` is no address, or nobody knows the way to it.
    """
    check_url(register, "register")
    here, there = httpx.URL(url), httpx.URL(register)
    if not is_unspecified(here.host):
        return url
    try:
        port = there.port or (443 if there.scheme == "https" else 80)
        kind = socket.SOCK_DGRAM  # nothing is sent
        family, _, _, _, target = socket.getaddrinfo(there.host, port, type=kind)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            found = probe.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"register {register!r}: no way there is known ({error}); give the service's own "
            "address with --url"
        ) from error
    return str(here.copy_with(host=found))
