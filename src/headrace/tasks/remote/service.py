"""A task service that runs elsewhere, as a `TaskService` of this process.

Instances come in blocks and are remembered, rollouts are started under an id of their own and
waited for. A service that is not there, hangs or says what cannot be fails its own rollouts with a
reason, is asked again later and later, and costs nobody else anything.
"""

import asyncio
import contextlib
import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.rollout.types import Outcome
from headrace.tasks.remote.checking import (
    MOST_DEMONSTRATION_BYTES,
    Misreport,
    read_demonstrations,
    read_description,
    read_instances,
    read_seeds,
    read_state,
)
from headrace.tasks.remote.client import Refused, TaskClient, Unreachable
from headrace.tasks.remote.place import Place
from headrace.tasks.results import difference, shown
from headrace.tasks.serving.wire import (
    PROTOCOL,
    DemonstrationsRequest,
    Description,
    InstancesRequest,
    NamedInstance,
    RolloutState,
    SeedsRequest,
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

_BLOCK = 8
"""Seeds whose instances are asked for together: some take tenths of a second to make."""
_KEPT_INSTANCES = 16_384
_LATE_S = 8.0
"""A rollout that overruns its own timeout by this much is given up."""
_RETRY_S = (0.1, 0.3, 0.9)
_CANCEL_S = 5.0
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


class RemoteTasks:
    """See the module. Made by `RemoteTasks.open`; belongs to the event loop that opened it, but
    instances, seeds and content ids may be asked for in any thread, where that may block.

    Attributes:
        name: of the task.
        losses: how often the service stopped answering.
        misreports: how often it said what cannot be.
        grace_s: see `TaskService`.
    """

    def __init__(
        self,
        name: str,
        place: Place,
        settings: RemoteSettings,
        *,
        options: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self.losses = 0
        self.misreports = 0
        self.grace_s = settings.admission_s + _LATE_S + 10.0
        self._place = place
        self._settings = settings
        self._options = dict(options)
        self._report = report
        self._slots = asyncio.Semaphore(settings.rollouts)
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._why = "it has not been asked yet"
        self._hung = False
        self._client: TaskClient | None = None
        self._description: Description | None = None
        self._attendant: asyncio.Task[None] | None = None
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._fetching = threading.Lock()
        self._seeds: dict[str, OrderedDict[int, int]] = {
            "train": OrderedDict(),
            "evaluation": OrderedDict(),
        }
        self._instances: OrderedDict[int, NamedInstance] = OrderedDict()
        self._pinned: dict[int, NamedInstance] = {}

    @classmethod
    async def open(
        cls,
        name: str,
        place: Place,
        settings: RemoteSettings | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        evaluation: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> "RemoteTasks":
        """Find the service, check that it is the right one, and ask for what will be measured.

        Args:
            name: of the task it has to be.
            place: where it is; closed with the service.
            settings: see RemoteSettings.
            options: that it has to be served with, as far as they are named.
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
            await service._connect()
            for start in range(0, evaluation, _BLOCK):
                block = range(start, min(start + _BLOCK, evaluation))
                seeds = await asyncio.to_thread(service._seed_block, "evaluation", block)
                service._pinned |= {seed: service._instances[seed] for seed in seeds}
        except (Unreachable, Refused, Misreport, TaskUnavailable) as error:
            await service.close()
            raise UserError(f"task {name}: {place.name} cannot be used: {error}") from error
        except BaseException:
            await service.close()
            raise
        service._up.set()
        service._attendant = asyncio.create_task(service._attend(), name=f"task {name} attendant")
        return service

    async def close(self) -> None:
        """Let go of the service, and end it where it is ours. Safe to repeat."""
        self._up.clear()
        self._why = "it is closed"
        attendant, self._attendant = self._attendant, None
        if attendant is not None:
            attendant.cancel()
            await asyncio.gather(attendant, return_exceptions=True)
        if self._goodbyes:
            await asyncio.wait(self._goodbyes, timeout=_CANCEL_S)
        if self._client is not None:
            await self._client.close()
        await self._place.close()

    # -- instances ---------------------------------------------------------------------------

    def train_seed(self, index: int) -> int:
        """See `TaskService`. May block, for a block of instances at a time."""
        return self._seed("train", index)

    def evaluation_seed(self, index: int) -> int:
        """See `TaskService`."""
        return self._seed("evaluation", index)

    def instance(self, seed: int) -> TaskInstance:
        """See `TaskService`."""
        return self._named(seed).instance

    def content_id(self, instance: TaskInstance) -> str:
        """See `TaskService`.

        Raises:
            TaskUnavailable: also where the service has another instance under the seed now.
        """
        named = self._named(instance.seed)
        changed = difference(instance, named.instance)
        if changed is not None:
            raise self._misreported(Misreport(changed))
        return named.content_id

    def _seed(self, split: str, index: int) -> int:
        if split == "train" and self._is_lost:
            # Known or not: whoever wants to train on it would only wait for the service.
            raise TaskUnavailable(f"task {self.name}: {self._why}")
        known = self._seeds[split]
        found = known.get(index)
        if found is None:
            first = index - index % _BLOCK
            self._seed_block(split, range(first, first + _BLOCK))
            found = known[index]
        return found

    def _seed_block(self, split: str, positions: range) -> list[int]:
        """The seeds of some positions, with their instances."""
        with self._fetching:
            known = self._seeds[split]
            if not all(i in known for i in positions):
                request = SeedsRequest(
                    "train" if split == "train" else "evaluation", positions.start, len(positions)
                )
                data = self._fetch("/v1/seeds", request)
                try:
                    seeds = read_seeds(data, len(positions))
                except Misreport as error:
                    raise self._misreported(error) from error
                self._fetch_instances(seeds)
                known.update(zip(positions, seeds, strict=True))
                while len(known) > _KEPT_INSTANCES:
                    known.popitem(last=False)
            return [known[i] for i in positions]

    def _named(self, seed: int) -> NamedInstance:
        found = self._pinned.get(seed) or self._instances.get(seed)
        if found is None:
            with self._fetching:
                found = self._fetch_instances([seed])[0]
        return found

    def _fetch_instances(self, seeds: list[int]) -> list[NamedInstance]:
        data = self._fetch("/v1/instances", InstancesRequest(seeds))
        try:
            found = read_instances(data, self.name, seeds)
            for named in found:
                seed = named.instance.seed
                before = self._pinned.get(seed) or self._instances.get(seed) or named
                changed = difference(before.instance, named.instance)
                if changed is None and before.content_id != named.content_id:
                    changed = (
                        f"content_id of seed {seed} is {shown(named.content_id)}, it was "
                        f"{shown(before.content_id)}"
                    )
                if changed is not None:
                    raise Misreport(changed)
        except Misreport as error:
            raise self._misreported(error) from error
        self._instances.update((named.instance.seed, named) for named in found)
        while len(self._instances) > _KEPT_INSTANCES:
            self._instances.popitem(last=False)
        return found

    def _fetch(self, path: str, body: Any) -> bytes:
        """What the service answers, in any thread but blocking it."""
        client = self._client
        if client is None or self._is_lost:
            raise TaskUnavailable(f"task {self.name}: {self._why}")
        try:
            return client.ask_blocking("POST", path, body)
        except Unreachable as error:
            if self._attendant is not None:
                self._loop.call_soon_threadsafe(self._lose, str(error), error.hung)
            raise TaskUnavailable(f"task {self.name}: {error}") from error
        except Refused as error:
            raise TaskUnavailable(f"task {self.name}: {path} was refused: {error}") from error
        except Misreport as error:
            raise self._misreported(error) from error

    def _misreported(self, error: Misreport) -> TaskUnavailable:
        self.misreports += 1
        return TaskUnavailable(f"task {self.name}: {error}")

    async def demonstrations(self, count: int, seed: int, quality: float) -> list[Demonstration]:
        """Scripted conversations, where the service makes some.

        Raises:
            UserError: it makes none, or cannot make these.
        """
        check_quality(quality)
        if self._description is None or not self._description.demonstrations:
            raise UserError(f"task {self.name} has no demonstrations; an sft stage cannot use it")
        try:
            data = await self._ask(
                "POST",
                "/v1/demonstrations",
                DemonstrationsRequest(count, seed, quality),
                extra_s=self._settings.demonstrations_s,
                most=MOST_DEMONSTRATION_BYTES,
            )
            return await asyncio.to_thread(read_demonstrations, data, count)
        except (Unreachable, Refused, Misreport) as error:
            raise UserError(f"task {self.name}: no demonstrations: {error}") from error

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
                await self._up.wait()
        except TimeoutError:
            return _failed(f"the task service does not answer: {self._why}")
        rollout_id = uuid.uuid4().hex
        # Known already wherever this process chose the instance.
        named = self._pinned.get(instance.seed) or self._instances.get(instance.seed)
        content_id = None if named is None else named.content_id
        try:
            state = await self._begin(
                rollout_id, StartRequest(instance, endpoint), content_id, give_up_at
            )
            end = self._loop.time() + endpoint.timeout_s + _LATE_S
            while state.result is None:
                wait_s = min(self._settings.poll_s, end - self._loop.time())
                if wait_s <= 0:
                    self._say_goodbye(rollout_id)
                    return _failed(
                        f"the task service hung: no result {_LATE_S:g} s after the rollout's own "
                        "timeout"
                    )
                state = read_state(
                    await self._ask(
                        "GET",
                        f"/v1/rollouts/{rollout_id}?wait_s={wait_s:.3f}",
                        extra_s=wait_s,
                    ),
                    rollout_id,
                    content_id,
                )
            return state.result
        except asyncio.CancelledError:
            self._say_goodbye(rollout_id)
            raise
        except Unreachable as error:
            self._lose(str(error), error.hung)
            return _failed(f"the task service was lost: {error}")
        except Refused as error:
            self._say_goodbye(rollout_id)
            return _failed(f"the task service refused: {error}")
        except Misreport as error:
            self.misreports += 1
            self._say_goodbye(rollout_id)
            return _failed(f"the task service is wrong: {error}")

    async def _begin(
        self,
        rollout_id: str,
        request: StartRequest,
        content_id: str | None,
        give_up_at: float,
    ) -> RolloutState:
        while True:
            try:
                data = await self._ask("PUT", f"/v1/rollouts/{rollout_id}", request)
                return read_state(data, rollout_id, content_id)
            except Refused as error:
                late = self._loop.time() + error.retry_after_s > give_up_at
                if error.status != 429 or late:
                    raise
                await asyncio.sleep(error.retry_after_s)

    def _say_goodbye(self, rollout_id: str) -> None:
        """Have a rollout cancelled there; nobody waits for it."""
        client = self._client
        if client is None or not self._up.is_set():
            return

        async def cancel() -> None:
            with contextlib.suppress(Unreachable, Refused, Misreport, TimeoutError):
                async with asyncio.timeout(_CANCEL_S):
                    await client.ask("DELETE", f"/v1/rollouts/{rollout_id}")

        task = asyncio.create_task(cancel(), name=f"cancel {rollout_id}")
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    async def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
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
            if not self._up.is_set():
                raise Unreachable(self._why)
        raise AssertionError("the last try returns or raises")

    # -- being there -------------------------------------------------------------------------

    async def _connect(self) -> None:
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
        self._description = found
        if old is not None:
            await old.close()

    def _compare(self, found: Description) -> None:
        if found.protocol != PROTOCOL:
            raise UserError(
                f"task {self.name}: {self._place.name} speaks version {found.protocol} of the "
                f"protocol, this is version {PROTOCOL}; use matching versions of headrace "
                f"({found.software or 'unknown'} serves)"
            )
        if found.name != self.name:
            raise UserError(
                f"task {self.name}: {self._place.name} serves task {found.name!r}; name the table "
                f"[tasks.{found.name}], or another service"
            )
        for key, value in self._options.items():
            if found.options.get(key) != value:
                raise UserError(
                    f"tasks.{self.name}.{key} is {shown(value)}, but {self._place.name} serves "
                    f"with {shown(found.options.get(key))}; options are set where it is served"
                )

    @property
    def _is_lost(self) -> bool:
        return self._attendant is not None and not self._up.is_set()

    def _lose(self, why: str, hung: bool) -> None:
        """The service does not answer: nothing is asked until it does again."""
        if self._attendant is None or not self._up.is_set():
            return
        self._up.clear()
        self.losses += 1
        self._why = why
        self._hung = hung
        self._lost.set()

    async def _attend(self) -> None:
        """Notice that the service is lost, and find it again."""
        wait_s, since = self._settings.first_wait_s, self._loop.time()
        while True:
            await self._watch()
            if self._loop.time() - since > _STEADY_S:
                wait_s = self._settings.first_wait_s
            self._report(f"task {self.name} is lost: {self._why}")
            if self._hung:
                await self._place.reset()
            while True:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self._settings.longest_wait_s)
                try:
                    await self._connect()
                    break
                except (Unreachable, Refused, Misreport, UserError) as error:
                    self._why = str(error)
                    logger.info("task %s is still lost: %s", self.name, error)
            since = self._loop.time()
            self._lost.clear()
            self._up.set()
            self._report(f"task {self.name} answers again")

    async def _watch(self) -> None:
        """Return when the service is lost."""
        gone = asyncio.create_task(self._place.gone())
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait({gone, lost}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self._lose(gone.result(), False)
        finally:
            gone.cancel()
            lost.cancel()
            await asyncio.gather(gone, lost, return_exceptions=True)


def _failed(reason: str) -> RolloutResult:
    return RolloutResult(Outcome.ENV_FAILED, reason=reason)
