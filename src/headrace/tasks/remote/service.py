"""A task service that runs elsewhere, as a `TaskService` of this process.

Instances come in blocks and are remembered, rollouts are started under an id of their own and
waited for. A service that is not there, hangs or says what cannot be fails its own rollouts with a
reason, is asked again later and later (`connection.py`), and costs nobody else anything.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from headrace.errors import UserError
from headrace.rollout.types import Outcome
from headrace.tasks.remote.checking import (
    MOST_DEMONSTRATION_BYTES,
    Misreport,
    read_demonstrations,
    read_state,
)
from headrace.tasks.remote.client import Refused, Unreachable
from headrace.tasks.remote.connection import Connection, RemoteSettings
from headrace.tasks.remote.instances import RemoteInstances
from headrace.tasks.remote.place import Place
from headrace.tasks.remote.pool import ServicePool
from headrace.tasks.serving.wire import (
    DemonstrationsRequest,
    RolloutState,
    StartRequest,
)
from headrace.tasks.types import (
    Demonstration,
    Endpoint,
    RolloutResult,
    TaskInstance,
    TaskUnavailable,
    check_quality,
)

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked")

_LATE_S = 8.0
"""A rollout that overruns its own timeout by this much is given up."""
_CANCEL_S = 5.0


class RemoteTasks:
    """See the module. Made by `RemoteTasks.open`; belongs to the event loop that opened it, but
    instances, seeds and content ids may be asked for in any thread, where that may block.

    Attributes:
        name: of the task.
        misreports: how often it said what cannot be.
        on_return: see `Returning`; also called when one more instance is there.
        grace_s: see `TaskService`.
    """

    def __init__(
        self,
        name: str,
        place: Place | ServicePool,
        settings: RemoteSettings,
        *,
        options: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self.misreports = 0
        self.on_return: Callable[[], None] = lambda: None
        self.grace_s = settings.admission_s + _LATE_S + 10.0
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.rollouts)
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        if isinstance(place, ServicePool):
            self._upstream = place
            place.on_up = self._returned
        else:
            self._upstream = Connection(
                name, place, settings, options=options, report=report, on_up=self._returned
            )
        self._instances = RemoteInstances(name, self._upstream.ask_blocking)

    @property
    def losses(self) -> int:
        """How often the service stopped answering."""
        return self._upstream.losses

    def _returned(self) -> None:
        self.on_return()  # whatever it is by then

    @classmethod
    async def open(
        cls,
        name: str,
        place: Place | ServicePool,
        settings: RemoteSettings | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        evaluation: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> "RemoteTasks":
        """Find the service, check that it is the right one, and ask for what will be measured.

        Args:
            name: of the task it has to be.
            place: where it is, or those who announced themselves; closed with the service.
            settings: see RemoteSettings.
            options: that it has to be served with, as far as they are named; a pool has its own.
            evaluation: so many held-out instances are asked for at once and never forgotten, so
                that measuring needs nothing but the rollouts.
            report: told in words when the service is lost and when it is back.

        Raises:
            UserError: it cannot be reached, speaks another version, or is another service.
        """
        service = cls(
            name, place, settings or RemoteSettings(), options=options or {}, report=report
        )
        try:
            await service._upstream.find()
            await asyncio.to_thread(service._instances.pin, "evaluation", evaluation)
        except (Unreachable, Refused, Misreport, TaskUnavailable) as error:
            await service.close()
            raise UserError(f"task {name}: {place.name} cannot be used: {error}") from error
        except BaseException:
            await service.close()
            raise
        service._upstream.attend()
        return service

    async def close(self) -> None:
        """Let go of the service, and end it where it is ours. Safe to repeat."""
        if self._goodbyes:
            await asyncio.wait(self._goodbyes, timeout=_CANCEL_S)
        await self._upstream.close()

    # -- instances ---------------------------------------------------------------------------

    def train_seed(self, index: int) -> int:
        """See `TaskService`. May block, for a block of instances at a time."""
        if self._upstream.lost:
            # Known or not: whoever wants to train on it would only wait for the service.
            raise TaskUnavailable(f"task {self.name}: {self._upstream.why}")
        return self._believe(lambda: self._instances.seed("train", index))

    def evaluation_seed(self, index: int) -> int:
        """See `TaskService`."""
        return self._believe(lambda: self._instances.seed("evaluation", index))

    def instance(self, seed: int) -> TaskInstance:
        """See `TaskService`."""
        return self._believe(lambda: self._instances.named(seed)).instance

    def content_id(self, instance: TaskInstance) -> str:
        """See `TaskService`.

        Raises:
            TaskUnavailable: also where the service has another instance under the seed now.
        """
        return self._believe(lambda: self._instances.content_id(instance))

    def _believe(self, asked: Callable[[], Asked]) -> Asked:
        """What `asked` returns; a misreport is counted and makes the task unavailable."""
        try:
            return asked()
        except Misreport as error:
            self.misreports += 1
            raise TaskUnavailable(f"task {self.name}: {error}") from error

    async def demonstrations(self, count: int, seed: int, quality: float) -> list[Demonstration]:
        """Scripted conversations, where the service makes some.

        Raises:
            UserError: it makes none, or cannot make these.
        """
        check_quality(quality)
        description = self._upstream.description
        if description is None or not description.demonstrations:
            raise UserError(f"task {self.name} has no demonstrations; an sft stage cannot use it")
        try:
            async with asyncio.timeout(self._settings.admission_s):
                server = await self._upstream.pick()
        except TimeoutError:
            raise UserError(f"task {self.name}: no demonstrations: {self._upstream.why}") from None
        server.rollouts += 1  # it is as busy with them
        try:
            data = await server.ask(
                "POST",
                "/v1/demonstrations",
                DemonstrationsRequest(count, seed, quality),
                extra_s=self._settings.demonstrations_s,
                most=MOST_DEMONSTRATION_BYTES,
            )
            return await asyncio.to_thread(read_demonstrations, data, count)
        except (Unreachable, Refused, Misreport) as error:
            raise UserError(f"task {self.name}: no demonstrations: {error}") from error
        finally:
            server.rollouts -= 1

    # -- rollouts ----------------------------------------------------------------------------

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        """Have `instance` attempted by the service.

        Whatever goes wrong there is an ENV_FAILED with its reason. Cancelled, it cancels the
        rollout there, too.
        """
        give_up_at = self._loop.time() + self._settings.admission_s
        try:
            async with asyncio.timeout_at(give_up_at):
                await self._slots.acquire()
        except TimeoutError:
            return _failed(f"{self._settings.rollouts} rollouts are in flight there already")
        try:
            return await self._attempt(instance, endpoint, give_up_at)
        finally:
            self._slots.release()

    async def _attempt(
        self, instance: TaskInstance, endpoint: Endpoint, give_up_at: float
    ) -> RolloutResult:
        try:
            async with asyncio.timeout_at(give_up_at):
                server = await self._upstream.pick()
        except TimeoutError:
            return _failed(f"the task service does not answer: {self._upstream.why}")
        server.rollouts += 1
        try:
            return await self._attempt_at(server, instance, endpoint, give_up_at)
        finally:
            server.rollouts -= 1

    async def _attempt_at(
        self, server: Connection, instance: TaskInstance, endpoint: Endpoint, give_up_at: float
    ) -> RolloutResult:
        rollout_id = uuid.uuid4().hex
        # Known already wherever this process chose the instance.
        named = self._instances.known(instance.seed)
        content_id = None if named is None else named.content_id
        try:
            state = await self._begin(
                server, rollout_id, StartRequest(instance, endpoint), content_id, give_up_at
            )
            end = self._loop.time() + endpoint.timeout_s + _LATE_S
            while state.result is None:
                wait_s = min(self._settings.poll_s, end - self._loop.time())
                if wait_s <= 0:
                    self._say_goodbye(server, rollout_id)
                    return _failed(
                        f"the task service hung: no result {_LATE_S:g} s after the rollout's own "
                        "timeout"
                    )
                state = read_state(
                    await server.ask(
                        "GET",
                        f"/v1/rollouts/{rollout_id}?wait_s={wait_s:.3f}",
                        extra_s=wait_s,
                    ),
                    rollout_id,
                    content_id,
                )
            return state.result
        except asyncio.CancelledError:
            self._say_goodbye(server, rollout_id)
            raise
        except Unreachable as error:
            server.lose(error)
            return _failed(f"the task service was lost: {error}")
        except Refused as error:
            self._say_goodbye(server, rollout_id)
            return _failed(f"the task service refused: {error}")
        except Misreport as error:
            self.misreports += 1
            self._say_goodbye(server, rollout_id)
            return _failed(f"the task service is wrong: {error}")

    async def _begin(
        self,
        server: Connection,
        rollout_id: str,
        request: StartRequest,
        content_id: str | None,
        give_up_at: float,
    ) -> RolloutState:
        while True:
            try:
                data = await server.ask("PUT", f"/v1/rollouts/{rollout_id}", request)
                return read_state(data, rollout_id, content_id)
            except Refused as error:
                late = self._loop.time() + error.retry_after_s > give_up_at
                if error.status != 429 or late:
                    raise
                await asyncio.sleep(error.retry_after_s)

    def _say_goodbye(self, server: Connection, rollout_id: str) -> None:
        """Have a rollout cancelled there; nobody waits for it."""
        if not server.up.is_set():
            return

        async def cancel() -> None:
            with contextlib.suppress(Unreachable, Refused, Misreport, TimeoutError):
                async with asyncio.timeout(_CANCEL_S):
                    await server.ask("DELETE", f"/v1/rollouts/{rollout_id}")

        task = asyncio.create_task(cancel(), name=f"cancel {rollout_id}")
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)


def _failed(reason: str) -> RolloutResult:
    return RolloutResult(Outcome.ENV_FAILED, reason=reason)
