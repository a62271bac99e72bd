"""Runs the rollouts that are asked for over HTTP, and keeps their results until they are fetched.

A rollout is known by an id that its client chose: asked for twice, it runs once. One whose client
does not look at it any more is ended. It knows a task service and nothing of HTTP.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from headrace import __version__
from headrace.errors import UserError
from headrace.rollout.types import Outcome
from headrace.tasks.results import difference, problem_with
from headrace.tasks.serving.door import Refusal
from headrace.tasks.serving.wire import (
    LONGEST_ID,
    PROTOCOL,
    DemonstrationsAnswer,
    DemonstrationsRequest,
    Description,
    InstancesAnswer,
    InstancesRequest,
    NamedInstance,
    RolloutState,
    SeedsAnswer,
    SeedsRequest,
    StartRequest,
)
from headrace.tasks.types import RolloutResult, TaskService

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


class HostLimits(msgspec.Struct, frozen=True):
    """What a server gives to its clients.

    Attributes:
        rollouts: most in flight; one more is a 429.
        requests: other requests being answered; one more is a 429.
        body_bytes: largest request.
        body_s: seconds for a request to arrive.
        wait_s: longest that a look at a rollout waits for its end.
        lease_s: a rollout that nobody has looked at for so long is ended.
        kept: finished rollouts whose results are kept.
        kept_s: seconds they are kept.
        grace_s: a rollout that overruns its own timeout by this much is hung.
    """

    rollouts: int = 1024
    requests: int = 256
    body_bytes: int = 4 << 20
    body_s: float = 30.0
    wait_s: float = 60.0
    lease_s: float = 120.0
    kept: int = 8192
    kept_s: float = 600.0
    grace_s: float = 5.0


class _Rollout:
    """One rollout asked for. `touched` is when a client last showed interest, in loop seconds."""

    def __init__(self, request: StartRequest | None, now: float) -> None:
        self.request = request
        self.touched = now
        self.looking = 0
        self.content_id = ""
        self.result: RolloutResult | None = None
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def state(self, rollout_id: str) -> RolloutState:
        status = "running" if self.result is None else "done"
        return RolloutState(rollout_id, status, self.content_id, self.result)

    def end(self, result: RolloutResult) -> None:
        self.result = result
        self.ended.set()


class RolloutHost:
    """Serves one task service. All methods but `__init__` belong to one event loop.

    Args:
        service: stays the caller's to close.
        limits: see HostLimits.
        options: the service's options in effect, for its description; not needed where the service
            has a pydantic model of them as `options`.
    """

    def __init__(
        self,
        service: TaskService,
        limits: HostLimits | None = None,
        *,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.limits = limits or HostLimits()
        self._service = service
        model = getattr(service, "options", None)
        self._options: dict[str, Any] = dict(options or {})
        self._schema: dict[str, Any] = {}
        if isinstance(model, BaseModel):
            self._options = model.model_dump(mode="json")
            self._schema = type(model).model_json_schema()
        # One thread: a service's instances need not be made by several at once.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix=f"{service.name} instances")
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._running = 0
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to end what nobody looks at."""
        self._keeper = asyncio.create_task(self._keep(), name="task rollouts")

    async def stop(self) -> None:
        """End every rollout. Safe to repeat."""
        keeper, self._keeper = self._keeper, None
        tasks = [r.task for r in self._rollouts.values() if r.task is not None]
        if keeper is not None:
            tasks.append(keeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._rollouts.clear()
        self._maker.shutdown(wait=False, cancel_futures=True)

    @property
    def running(self) -> int:
        """Rollouts in flight."""
        return self._running

    def describe(self) -> Description:
        """What is served here."""
        return Description(
            protocol=PROTOCOL,
            name=self._service.name,
            options=self._options,
            schema=self._schema,
            demonstrations=hasattr(self._service, "demonstrations"),
            rollouts=self.limits.rollouts,
            software=f"headrace {__version__}",
        )

    async def seeds(self, request: SeedsRequest) -> SeedsAnswer:
        """Seeds of one side, by position."""
        service = self._service
        seed = service.train_seed if request.split == "train" else service.evaluation_seed
        positions = range(request.start, request.start + request.count)
        return SeedsAnswer(await self._make(lambda: [seed(i) for i in positions]))

    async def instances(self, request: InstancesRequest) -> InstancesAnswer:
        """Instances by seed."""
        return InstancesAnswer(await self._make(lambda: [self._named(s) for s in request.seeds]))

    async def demonstrations(self, request: DemonstrationsRequest) -> DemonstrationsAnswer:
        """Scripted conversations.

        Raises:
            Refusal: the service makes none, or not these.
        """
        make = getattr(self._service, "demonstrations", None)
        if make is None:
            raise Refusal(
                404, "no_demonstrations", f"task {self._service.name} has no demonstrations"
            )
        try:
            found = await make(request.count, request.seed, request.quality)
        except UserError as error:
            raise Refusal(422, "invalid", str(error)) from error
        return DemonstrationsAnswer(list(found))

    def begin(self, rollout_id: str, request: StartRequest) -> RolloutState:
        """Start a rollout, unless it was started before.

        Raises:
            Refusal: too many in flight, or the id is another rollout's.
        """
        if not 0 < len(rollout_id) <= LONGEST_ID:
            raise Refusal(422, "invalid", f"the id has more than {LONGEST_ID} characters")
        found = self._rollouts.get(rollout_id)
        if found is not None:
            if found.request is not None and found.request != request:
                raise Refusal(
                    409, "id_in_use", f"rollout {rollout_id} was asked for with another body"
                )
            found.touched = self._now()
            return found.state(rollout_id)
        if self._running >= self.limits.rollouts:
            raise Refusal(
                429,
                "too_many_rollouts",
                f"{self._running} rollouts are in flight, which is the limit; try again later",
                retry_after_s=1,
            )
        rollout = self._admit(rollout_id, request)
        self._running += 1
        rollout.task = asyncio.create_task(self._run(rollout, request), name=rollout_id)
        rollout.task.add_done_callback(lambda _: self._ended(rollout))
        return rollout.state(rollout_id)

    async def look(self, rollout_id: str, wait_s: float) -> RolloutState:
        """How a rollout is doing, as soon as it has ended or after `wait_s` seconds.

        Raises:
            Refusal: it is not known here (any more).
        """
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise Refusal(
                404, "unknown_rollout", f"rollout {rollout_id} is not known here (any more)"
            )
        rollout.touched = self._now()
        rollout.looking += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, self.limits.wait_s)):
                    await rollout.ended.wait()
        finally:
            rollout.looking -= 1
            rollout.touched = self._now()
        return rollout.state(rollout_id)

    def cancel(self, rollout_id: str) -> RolloutState:
        """End a rollout. One that is not known yet will not begin: its start may be on the way."""
        if not 0 < len(rollout_id) <= LONGEST_ID:
            raise Refusal(422, "invalid", f"the id has more than {LONGEST_ID} characters")
        rollout = self._rollouts.get(rollout_id) or self._admit(rollout_id, None)
        if rollout.result is None:
            rollout.end(_failed("cancelled by its client"))
        if rollout.task is not None:
            rollout.task.cancel()
        return rollout.state(rollout_id)

    # -- one rollout -------------------------------------------------------------------------

    def _admit(self, rollout_id: str, request: StartRequest | None) -> _Rollout:
        rollout = self._rollouts[rollout_id] = _Rollout(request, self._now())
        if len(self._rollouts) > self.limits.kept + self.limits.rollouts:
            oldest = next((i for i, r in self._rollouts.items() if r.result is not None), None)
            if oldest is not None:
                del self._rollouts[oldest]
        return rollout

    async def _run(self, rollout: _Rollout, request: StartRequest) -> None:
        try:
            result = await self._attempt(rollout, request)
        except asyncio.CancelledError:
            if rollout.result is None:
                rollout.end(_failed("the server stopped"))
            raise
        if rollout.result is None:
            rollout.end(result)

    async def _attempt(self, rollout: _Rollout, request: StartRequest) -> RolloutResult:
        instance, endpoint = request.instance, request.endpoint
        deadline = asyncio.timeout(endpoint.timeout_s + self.limits.grace_s)
        try:
            made = await self._make(lambda: self._named(instance.seed))
            rollout.content_id = made.content_id
            if (changed := difference(instance, made.instance)) is not None:
                return _failed(f"{changed}; serve with the options that the run began with")
            async with deadline:
                result = await self._service.rollout(instance, endpoint)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return _failed(f"no result {self.limits.grace_s:g} s after the rollout's timeout")
            # Whatever a service raises hurts only its own rollout.
            logger.warning("a rollout of seed %s failed", instance.seed, exc_info=True)
            return _failed(f"{type(error).__name__}: {str(error)[:300]}")
        problem = problem_with(result)
        return result if problem is None else _failed(problem)

    def _ended(self, rollout: _Rollout) -> None:
        self._running -= 1
        rollout.task = None
        if rollout.result is None:  # cancelled before it began
            rollout.end(_failed("cancelled"))

    async def _keep(self) -> None:
        """End what nobody looks at, forget what nobody fetched."""
        while True:
            await asyncio.sleep(min(self.limits.lease_s, self.limits.kept_s) / 4)
            now = self._now()
            for rollout_id, rollout in list(self._rollouts.items()):
                idle = 0.0 if rollout.looking else now - rollout.touched
                if rollout.result is not None and idle > self.limits.kept_s:
                    del self._rollouts[rollout_id]
                elif rollout.result is None and idle > self.limits.lease_s:
                    logger.warning("rollout %s: nobody waits for it any more", rollout_id)
                    self.cancel(rollout_id)

    # -- the service -------------------------------------------------------------------------

    def _named(self, seed: int) -> NamedInstance:
        instance = self._service.instance(seed)
        return NamedInstance(instance, self._service.content_id(instance))

    async def _make(self, make: Callable[[], Made]) -> Made:
        """What a service makes without awaiting may take its time; it has a thread for that.

        Raises:
            Refusal: the service refused the seed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._maker, make)
        except UserError as error:
            raise Refusal(422, "invalid", str(error)) from error

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _failed(reason: str) -> RolloutResult:
    return RolloutResult(Outcome.ENV_FAILED, reason=reason)
