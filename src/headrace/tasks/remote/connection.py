"""Keeps a task service found: notices that it is lost, looks for it later and later, and sees that
what answers is the service that is meant.

It knows how a service describes itself, and nothing of instances or rollouts.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.tasks.remote.checking import Misreport, read_description
from headrace.tasks.remote.client import Refused, TaskClient, Unreachable
from headrace.tasks.remote.place import Place
from headrace.tasks.results import shown
from headrace.tasks.serving.wire import PROTOCOL, Description
from headrace.tasks.types import TaskUnavailable

logger = logging.getLogger(__name__)

_RETRY_S = (0.1, 0.3, 0.9)
_STEADY_S = 60.0
"""A service that has answered for so long is forgiven its earlier failures."""


class RemoteSettings(msgspec.Struct, frozen=True):
    """How a service elsewhere is dealt with.

    Attributes:
        rollouts: most in flight there; further ones wait.
        answer_s: longest wait for an answer; looking at a rollout may take `poll_s` more.
        poll_s: how long one look at a rollout waits for its end.
        admission_s: how long a rollout waits to be let in or for the service to come back.
        demonstrations_s: how long demonstrations may take.
        first_wait_s: after the service is lost, how long before the first try; doubles.
        longest_wait_s: the longest such wait.
    """

    rollouts: int = 256
    answer_s: float = 10.0
    poll_s: float = 20.0
    admission_s: float = 12.0
    demonstrations_s: float = 600.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0


def check_options(task: str, wanted: Mapping[str, Any], found: Mapping[str, Any], who: str) -> None:
    """Raise UserError unless `who` serves a task with the options that its recipe names."""
    for key, value in wanted.items():
        if found.get(key) != value:
            raise UserError(
                f"tasks.{task}.{key} is {shown(value)}, but {who} serves with "
                f"{shown(found.get(key))}; options are set where it is served"
            )


class Connection:
    """See the module. Belongs to the event loop it was made in.

    Args:
        task: name of the task that has to be served.
        place: where; closed with the connection.
        settings: see RemoteSettings.
        options: that it has to be served with, as far as they are named.
        report: told in words when the service is lost and when it is back.
        on_up: called whenever the service begins to answer.
        label: what messages call it.

    Attributes:
        up: set while the service answers.
        why: why it does not, when it does not.
        losses: how often it stopped answering.
        description: what it said of itself last.
        rollouts: in flight there, counted by whoever makes them.
    """

    def __init__(
        self,
        task: str,
        place: Place,
        settings: RemoteSettings,
        *,
        options: Mapping[str, Any],
        report: Callable[[str], None],
        on_up: Callable[[], None] = lambda: None,
        label: str | None = None,
    ) -> None:
        self.rollouts = 0
        self.up = asyncio.Event()
        self.why = "it has not been asked yet"
        self.losses = 0
        self.description: Description | None = None
        self._task = task
        self._place = place
        self._settings = settings
        self._options = dict(options)
        self._report = report
        self._on_up = on_up
        self._label = label or f"task {task}"
        self._lost = asyncio.Event()
        self._hung = False
        self._client: TaskClient | None = None
        self._attendant: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def lost(self) -> bool:
        """Whether it did answer once and does not now."""
        return self._attendant is not None and not self.up.is_set()

    def attend(self) -> None:
        """From here on look after the service that was found."""
        self.up.set()
        self._on_up()
        self._attendant = asyncio.create_task(self._attend(), name=f"task {self._task} attendant")

    async def close(self) -> None:
        """Let go of the service, and end it where it is ours. Safe to repeat."""
        self.up.clear()
        self.why = "it is closed"
        attendant, self._attendant = self._attendant, None
        if attendant is not None:
            attendant.cancel()
            await asyncio.gather(attendant, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        await self._place.close()

    async def pick(self) -> "Connection":
        """Whom to give the next rollout: this one, as soon as it answers."""
        await self.up.wait()
        return self

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        """Ask, and again after a moment where the connection broke: every request may be repeated
        without harm, as a rollout is known by its id."""
        client = self._client
        assert client is not None, "opened"
        for wait_s in (*_RETRY_S, None):
            try:
                return await client.ask(method, path, body, **options)
            except Unreachable as error:
                # One that hangs has had its time; one that has moved is asked by nobody here.
                if wait_s is None or error.hung or client is not self._client:
                    raise
            await asyncio.sleep(wait_s)
            if not self.up.is_set():
                raise Unreachable(self.why)
        raise AssertionError("the last try returns or raises")

    def ask_blocking(self, path: str, body: Any) -> bytes:
        """POST, once, in any thread but blocking it.

        Raises:
            TaskUnavailable: no answer, or a refusal.
            Misreport: see `TaskClient.ask`.
        """
        client = self._client
        if client is None or self.lost:
            raise TaskUnavailable(f"task {self._task}: {self.why}")
        try:
            return client.ask_blocking("POST", path, body)
        except Unreachable as error:
            self._loop.call_soon_threadsafe(self.lose, error)
            raise TaskUnavailable(f"task {self._task}: {error}") from error
        except Refused as error:
            raise TaskUnavailable(f"task {self._task}: {path} was refused: {error}") from error

    async def find(self) -> None:
        """Find the service and see that it is the right one.

        Raises:
            Unreachable, Refused, Misreport: not now.
            UserError: not ever.
        """
        url, token = await self._place.locate()
        client = TaskClient(
            url,
            token,
            connections=self._settings.rollouts + 8,
            answer_s=self._settings.answer_s,
        )
        try:
            found = read_description(await client.ask("GET", "/v1/service"))
            self._compare(found)
        except BaseException:
            await client.close()
            raise
        old, self._client = self._client, client
        self.description = found
        if old is not None:
            await old.close()

    def _compare(self, found: Description) -> None:
        if found.protocol != PROTOCOL:
            raise UserError(
                f"task {self._task}: {self._place.name} speaks version {found.protocol} of the "
                f"protocol, this is version {PROTOCOL}; use matching versions of headrace "
                f"({found.software or 'unknown'} serves)"
            )
        if found.name != self._task:
            raise UserError(
                f"task {self._task}: {self._place.name} serves task {found.name!r}; name the table "
                f"[tasks.{found.name}], or another service"
            )
        check_options(self._task, self._options, found.options, self._place.name)

    def lose(self, error: Unreachable) -> None:
        """The service does not answer: nothing is asked until it does again."""
        if self._attendant is None or not self.up.is_set():
            return
        self.up.clear()
        self.losses += 1
        self.why = str(error)
        self._hung = error.hung
        self._lost.set()

    async def _attend(self) -> None:
        """Notice that the service is lost, and find it again."""
        wait_s, since = self._settings.first_wait_s, self._loop.time()
        while True:
            await self._watch()
            if self._loop.time() - since > _STEADY_S:
                wait_s = self._settings.first_wait_s
            self._report(f"{self._label} is lost: {self.why}")
            if self._hung:
                await self._place.reset()
            while True:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self._settings.longest_wait_s)
                try:
                    await self.find()
                    break
                except (Unreachable, Refused, Misreport, UserError) as error:
                    self.why = str(error)
                    logger.info("%s is still lost: %s", self._label, error)
            since = self._loop.time()
            self._lost.clear()
            self.up.set()
            self._report(f"{self._label} answers again")
            self._on_up()

    async def _watch(self) -> None:
        """Return when the service is lost."""
        gone = asyncio.create_task(self._place.gone())
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait({gone, lost}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.lose(Unreachable(gone.result()))
        finally:
            gone.cancel()
            lost.cancel()
            await asyncio.gather(gone, lost, return_exceptions=True)
