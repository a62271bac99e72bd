"""A toy task, a register with one pool, and what announces the one to the other; for the tests of
task services that register."""

import asyncio
import contextlib
import re
from typing import Any

from headrace.rollout.types import Outcome
from headrace.tasks.remote import Register, RemoteSettings, RemoteTasks, ServicePool
from headrace.tasks.serving import TaskServer
from headrace.tasks.serving.announcing import Announcer
from headrace.tasks.serving.wire import Announcement
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance

QUICK = RemoteSettings(
    answer_s=5.0, poll_s=0.2, admission_s=20.0, first_wait_s=0.02, longest_wait_s=0.1
)
WAIT_S = 20.0
TOKEN = "secret"


class Toy:
    """Rollouts end when told; instances are functions of their seeds."""

    name = "toy"

    def __init__(self, word: str = "") -> None:
        self.word = word
        self.running = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance("toy", seed, "f", 1, 1)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return f"c{instance.seed}"

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        self.running += 1
        self.begun.set()
        try:
            await self.go_on.wait()
        finally:
            self.running -= 1
        return RolloutResult(Outcome.OK, {"reward": 1.0}, self.word)


class Words:
    """What was said, and a wait for something to be said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, words: str) -> None:
        self.said.append(words)
        self._more.set()

    async def until(self, pattern: str, times: int = 1) -> str:
        async with asyncio.timeout(WAIT_S):
            while len(found := [w for w in self.said if re.search(pattern, w)]) < times:
                self._more.clear()
                await self._more.wait()
        return found[-1]


class Clock:
    """Seconds that pass when told, so that nobody is silent only because this machine is busy."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A run's register with one pool, and services that announce themselves there."""

    def __init__(self, stack: contextlib.AsyncExitStack, register: Register, pool: ServicePool):
        self.stack = stack
        self.register = register
        self.pool = pool
        self.words = Words()
        self.told = Words()
        self.clock = Clock()

    async def open(self) -> RemoteTasks:
        task = await RemoteTasks.open("toy", self.pool, QUICK)
        self.stack.push_async_callback(task.close)
        return task

    async def serve(self, toy: Toy, **options: Any) -> tuple[TaskServer, Announcer]:
        server = await TaskServer.start(toy, token=TOKEN, options=options)
        self.stack.push_async_callback(server.stop)
        return server, self.announce(server.url, options)

    def announce(self, url: str, options: dict[str, Any] | None = None) -> Announcer:
        said = Announcement("toy", url, options or {}, "test 1")
        announcer = Announcer(self.register.url, TOKEN, said, report=self.told)
        announcer.start()
        self.stack.push_async_callback(announcer.stop)
        return announcer
