"""The instances of one task service that announced themselves: a small pool that may change.

Each has a `Connection` of its own; rollouts go to those that answer and go on announcing
themselves, the one with fewest in flight first. One that moved is found at its new address, one
that fell silent is left out. It knows nothing of HTTP requests to the register, nor of rollouts.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from headrace.errors import UserError
from headrace.tasks.remote.checking import Misreport
from headrace.tasks.remote.client import Refused, Unreachable, check_url
from headrace.tasks.remote.connection import Connection, RemoteSettings, check_options
from headrace.tasks.remote.place import FixedPlace
from headrace.tasks.serving.door import Refusal
from headrace.tasks.serving.wire import Announcement, Description, Farewell, Standing
from headrace.tasks.types import TaskUnavailable

MOST_INSTANCES = 64
"""Of one task, those that are about to leave included."""


class PoolSettings(msgspec.Struct, frozen=True):
    """How announcements are dealt with.

    Attributes:
        wait_s: longest wait for the first instance, from the moment the pool is made.
        run: name of the recipe, told to every instance.
        every_s: an instance is asked to announce itself so often.
        silence_s: one that did not for so long is left out.
        remedy: tells a person how to start an instance.
        limit_name: what messages call `wait_s`.
    """

    wait_s: float
    run: str = ""
    every_s: float = 2.0
    silence_s: float = 10.0
    remedy: str = ""
    limit_name: str = "wait_s"


class _Member:
    """One instance: where it is, when it was last heard of, how it is reached."""

    def __init__(self, url: str, connection: Connection) -> None:
        self.url = url
        self.connection = connection
        self.heard = 0.0
        self.joined = False
        self.why = ""
        self.joining: asyncio.Task[None] | None = None


class ServicePool:
    """See the module. Belongs to the event loop it was made in; `ask_blocking` may be called in
    any thread. Has what `RemoteTasks` needs of a `Connection`.

    Args:
        task: name of the task that has to be served.
        token: sent to every instance.
        settings: see RemoteSettings.
        pool: see PoolSettings.
        options: that it has to be served with, as far as they are named.
        report: told in words when an instance comes, goes, or cannot be used.
        record: given what each instance said when it was let in, as plain values.
        clock: seconds, never going back, for silence alone.

    Attributes:
        refused: words for the last announcement that was refused; "" while none was.
        on_up: called whenever an instance begins to answer; set by whoever uses the pool.
    """

    def __init__(
        self,
        task: str,
        token: str,
        settings: RemoteSettings,
        pool: PoolSettings,
        *,
        options: Mapping[str, Any],
        report: Callable[[str], None],
        record: Callable[[Mapping[str, Any]], None] = lambda said: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task = task
        self.token = token
        self.refused = ""
        self.on_up: Callable[[], None] = lambda: None
        self.name = "what registered"
        # Announcements say that it is there, so there is no reason to look for it ever more rarely.
        longest_wait_s = min(settings.longest_wait_s, 2 * pool.every_s)
        self._settings = msgspec.structs.replace(settings, longest_wait_s=longest_wait_s)
        self._pool = pool
        self._options = dict(options)
        self._report = report
        self._record = record
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._leaving: list[Connection] = []
        self._displaced: deque[str] = deque(maxlen=MOST_INSTANCES)
        self._gone_losses = 0
        self._why = "no service has registered"
        self._attending = False
        self._closed = False
        self._stirred = asyncio.Event()
        self._deadline = asyncio.get_running_loop().time() + pool.wait_s
        self._sweeper = asyncio.create_task(self._sweep(), name=f"task {task} pool")

    # -- what RemoteTasks needs ----------------------------------------------------------------

    @property
    def losses(self) -> int:
        """How often an instance stopped answering, or announcing itself while it was idle."""
        connections = [m.connection for m in self._members.values()] + self._leaving
        return self._gone_losses + sum(c.losses for c in connections)

    @property
    def description(self) -> Description | None:
        """What an instance said of itself; None before the first."""
        found = [m.connection.description for m in self._members.values()]
        return next((one for one in found if one is not None), None)

    @property
    def why(self) -> str:
        """Why nobody can be asked, when nobody can."""
        for member in self._members.values():
            if self._silent(member):
                return f"{member.url} has not announced itself for {self._pool.silence_s:g} s"
            return member.connection.why if member.joined else member.why
        return self._why

    @property
    def lost(self) -> bool:
        """Whether there was an instance once and is none now."""
        return self._attending and not self.there

    @property
    def there(self) -> bool:
        """Whether an instance may be given a rollout now."""
        return bool(self._alive())

    @property
    def waiting(self) -> str:
        """What is waited for, and what a person can do about it."""
        return (
            f"waiting up to {self._pool.wait_s:g} s for the service of task {self.task} to "
            f"register; {self._pool.remedy}"
        )

    async def find(self) -> None:
        """Wait for the first instance.

        Raises:
            UserError: none came in time; says what to do.
        """
        try:
            async with asyncio.timeout_at(self._deadline):
                await self.pick()
        except TimeoutError:
            tried = next((f": {m.why}" for m in self._members.values() if m.why), "")
            refused = f"; the last announcement was refused: {self.refused}" if self.refused else ""
            what = f"none that registered can be used{tried}" if tried else "none registered"
            raise UserError(
                f"task {self.task}: waited {self._pool.wait_s:g} s ({self._pool.limit_name}) for "
                f"its service, {what}{refused}; {self._pool.remedy}"
            ) from None

    def attend(self) -> None:
        """From here on it counts as lost while there is no instance."""
        self._attending = True

    async def pick(self) -> Connection:
        """The instance to give the next rollout, as soon as there is one."""
        while not (alive := self._alive()):
            self._stirred.clear()
            await self._stirred.wait()
        return alive[0]

    def ask_blocking(self, path: str, body: Any) -> bytes:
        """POST to any instance, in any thread but blocking it.

        Raises:
            TaskUnavailable: no instance answers.
            Misreport: see `TaskClient.ask`.
        """
        failed = TaskUnavailable(f"task {self.task}: {self.why}")
        for connection in self._alive():
            try:
                return connection.ask_blocking(path, body)
            except TaskUnavailable as error:
                failed = error
        raise failed

    async def close(self) -> None:
        """Let go of every instance; further announcements are refused. Safe to repeat."""
        self._closed = True
        self._why = "it is closed"
        tasks = [m.joining for m in self._members.values() if m.joining is not None]
        for instance_id in list(self._members):
            self._leave(instance_id)
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, *tasks, return_exceptions=True)
        while self._leaving:
            await self._let_go(self._leaving[0])

    # -- announcements -------------------------------------------------------------------------

    def announce(self, instance_id: str, said: Announcement) -> Standing:
        """Note that an instance is there.

        Args:
            instance_id: chosen by the instance, another one whenever it starts.
            said: where it is and what it serves.

        Raises:
            Refusal: it may not serve this run.
        """
        if self._closed:
            raise Refusal(503, "run_ends", "the run is about to end")
        try:
            url = check_url(said.url, "url")
        except UserError as error:
            raise Refusal(422, "invalid", str(error)) from error
        try:
            check_options(self.task, self._options, said.options, url)
        except UserError as error:
            raise Refusal(409, "options_differ", str(error)) from error
        member = self._members.get(instance_id)
        if member is None or member.url != url:
            member = self._admit(instance_id, url)
        silent = self._silent(member)
        member.heard = self._clock()
        if not member.joined and (member.joining is None or member.joining.done()):
            member.joining = asyncio.create_task(self._join(member, said), name=f"join {url}")
        elif silent:
            self._stir()
        return self._standing(member)

    def withdraw(self, instance_id: str) -> Farewell:
        """An instance says that it ends."""
        known = instance_id in self._members
        if known:
            url = self._members[instance_id].url
            self._leave(instance_id, f"{url} has ended")
        return Farewell(known)

    def _admit(self, instance_id: str, url: str) -> _Member:
        """A member for an instance that is new here, or at another address than before."""
        there = [k for k, m in self._members.items() if m.url == url and k != instance_id]
        if there and instance_id in self._displaced:
            raise Refusal(
                409,
                "address_in_use",
                f"another instance of task {self.task} announced itself at {url} after this one; "
                "each needs an address of its own at which the run reaches it",
            )
        # A new process where one was: nobody answers for the old one's rollouts.
        self._displaced.extend(there)
        for other in [k for k in (instance_id, *there) if k in self._members]:
            self._leave(other)
        if len(self._members) + len(self._leaving) >= MOST_INSTANCES:
            raise Refusal(
                429,
                "too_many_instances",
                f"{MOST_INSTANCES} instances of task {self.task} are registered, which is the "
                "limit",
                retry_after_s=10,
            )
        connection = Connection(
            self.task,
            FixedPlace(url, self.token),
            self._settings,
            options=self._options,
            report=self._report,
            on_up=self._stir,
            label=f"task {self.task} at {url}",
        )
        member = self._members[instance_id] = _Member(url, connection)
        return member

    async def _join(self, member: _Member, said: Announcement) -> None:
        """Ask a new instance what it is, and let it in."""
        try:
            await member.connection.find()
        except (Unreachable, Refused, Misreport, UserError) as error:
            words = f"task {self.task} at {member.url} cannot be used: {error}"
            if str(error) != member.why:
                self._report(words)
            member.why = str(error)
            return
        member.joined, member.why = True, ""
        member.connection.attend()
        self._report(f"task {self.task} at {member.url} registered")
        self._record(msgspec.to_builtins(said))

    def _standing(self, member: _Member) -> Standing:
        state: Literal["looking", "serving", "unreachable"] = "serving"
        why = ""
        if not member.joined or not member.connection.up.is_set():
            why = member.connection.why if member.joined else member.why
            state = "unreachable" if why else "looking"
        return Standing(self._pool.run, state, why[:1000], self._pool.every_s)

    # -- who is there --------------------------------------------------------------------------

    def _alive(self) -> list[Connection]:
        """Those that answer and were heard of lately, fewest rollouts first. In any thread."""
        alive = [
            member.connection
            for member in list(self._members.values())
            if member.connection.up.is_set() and not self._silent(member)
        ]
        return sorted(alive, key=lambda connection: connection.rollouts)

    def _silent(self, member: _Member) -> bool:
        return self._clock() - member.heard > self._pool.silence_s

    def _stir(self) -> None:
        self._stirred.set()
        self.on_up()

    def _leave(self, instance_id: str, why: str = "") -> None:
        """Give an instance no more rollouts; those in flight may end there."""
        member = self._members.pop(instance_id)
        if member.joining is not None:
            member.joining.cancel()
        self._leaving.append(member.connection)
        if why:
            self._why = why
            self._report(f"task {self.task}: {why}")

    async def _sweep(self) -> None:
        """Leave out who is silent, and let go of those whose rollouts have ended."""
        while True:
            await asyncio.sleep(self._pool.every_s)
            for instance_id, member in list(self._members.items()):
                if self._silent(member):
                    # Where it is lost already, or something is in flight, its connection tells.
                    connection = member.connection
                    self._gone_losses += connection.up.is_set() and connection.rollouts == 0
                    self._leave(
                        instance_id,
                        f"{member.url} has not announced itself for {self._pool.silence_s:g} s "
                        "and is left out",
                    )
            for connection in [c for c in self._leaving if c.rollouts == 0]:
                await self._let_go(connection)

    async def _let_go(self, connection: Connection) -> None:
        self._leaving.remove(connection)
        self._gone_losses += connection.losses
        await connection.close()
