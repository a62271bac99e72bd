"""The local cluster: requests, failures, death, pinning."""

import asyncio
import os
import signal
from concurrent.futures import Future

import pytest

from headrace.cluster.local import LocalCluster, available_cores
from headrace.cluster.pending import PendingRequests
from headrace.cluster.types import UNSENDABLE, WorkerDied, WorkerFailure, WorkerSpec
from headrace.cluster.worker import serve


class EchoWorker:
    """Answers a few methods; runs in the worker process."""

    def __init__(self, connection, greeting: str = "") -> None:
        self.connection = connection
        self.greeting = greeting

    def run(self) -> None:
        while not self.connection.closed:
            request = self.connection.poll(0.5)
            if request is None:
                continue
            if request.method == "echo":
                self.connection.reply(request.id, [self.greeting, request.payload])
            elif request.method == "where":
                self.connection.reply(
                    request.id,
                    [sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]],
                )
            elif request.method == "fail":
                self.connection.fail(request.id, "no", "because")
            elif request.method == "count":
                for i in range(request.payload["to"]):
                    self.connection.reply(request.id, i, more=True)
                self.connection.reply(request.id, "done")
            elif request.method == "die":
                os.kill(os.getpid(), signal.SIGKILL)


class LateWorker:
    """`serve` with answers that come later, from another thread."""

    def __init__(self, connection) -> None:
        self.connection = connection
        self.late: Future[str] = Future()

    def run(self) -> None:
        serve(self.connection, self, {ValueError: "bad"})

    def _do_late(self) -> Future[str]:
        return self.late

    def _do_end(self, how: str) -> None:
        if how == "result":
            self.late.set_result("late")
        else:
            self.late.set_exception({"bad": ValueError, "bug": TypeError}[how]("why"))
        self.late = Future()


@pytest.fixture
async def cluster(monkeypatch):
    path = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    local = LocalCluster()
    yield local
    await local.close()


async def test_an_answer_may_come_later_than_those_after_it(cluster):
    handle = await cluster.start(WorkerSpec("w", "test_local:LateWorker"))
    for how in ("result", "bad", "bug"):
        late = asyncio.create_task(handle.request("late"))
        await asyncio.sleep(0)
        if how != "bug":
            await handle.request("end", {"how": how})
        if how == "result":
            assert await late == "late"
        elif how == "bad":
            with pytest.raises(WorkerFailure, match="bad: why"):
                await late
        else:
            with pytest.raises(WorkerDied):
                await handle.request("end", {"how": how})
            with pytest.raises(WorkerDied):
                await late


async def test_requests_failures_and_many_open_at_once(cluster):
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker", {"greeting": "hi"}))
    answers = await asyncio.gather(*(handle.request("echo", {"n": n}) for n in range(50)))
    assert answers == [["hi", {"n": n}] for n in range(50)]
    with pytest.raises(WorkerFailure, match="no: because"):
        await handle.request("fail")
    with pytest.raises(TimeoutError):
        await handle.request("unknown", timeout_s=0.05)
    assert await handle.request("echo", {}) == ["hi", {}]


async def test_a_cancellation_that_comes_with_the_answer_is_kept(cluster, monkeypatch):
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker"))
    take = PendingRequests.take

    def take_and_cancel(pending, reply):
        take(pending, reply)
        asking.cancel()

    monkeypatch.setattr(PendingRequests, "take", take_and_cancel)
    asking = asyncio.create_task(handle.request("echo"))
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_connection_lost_a_moment_ago_is_a_death(cluster, monkeypatch):
    """The event loop knows before the reader does, and one kind of loop raises RuntimeError."""
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker"))
    assert await handle.request("echo", {}) == ["", {}]

    def write(data):
        raise RuntimeError("unable to perform operation; the handler is closed")

    monkeypatch.setattr(handle._writer, "write", write)
    with pytest.raises(RuntimeError, match="the handler is closed"):
        await handle.request("echo", {})
    monkeypatch.setattr(handle._writer, "is_closing", lambda: True)
    with pytest.raises(WorkerDied):
        await handle.request("echo", {})


async def test_parts_come_in_order_before_the_answer(cluster):
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker"))
    parts = [[], []]
    calls = [handle.request("count", {"to": 500}, on_part=part.append) for part in parts]
    assert await asyncio.gather(*calls, handle.request("count", {"to": 9})) == ["done"] * 3
    assert parts == [list(range(500))] * 2
    seen = []

    def refuse_the_third(part):
        seen.append(part)
        if part == 2:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await handle.request("count", {"to": 5}, on_part=refuse_the_third)
    assert await handle.request("count", {"to": 0}) == "done"
    assert seen == [0, 1, 2]


async def test_what_cannot_be_sent_fails_its_request_alone(cluster):
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker"))
    for payload in ({"n": 1 << 64}, {"text": "\ud800"}):
        with pytest.raises(WorkerFailure, match="echo: cannot be sent") as caught:
            await handle.request("echo", payload)
        assert caught.value.code == UNSENDABLE
    assert await handle.request("echo", {}) == ["", {}]


async def test_a_killed_worker_fails_its_open_requests(cluster):
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker"))
    await handle.request("echo", {})
    with pytest.raises(WorkerDied):
        await handle.request("die")
    await asyncio.wait_for(handle.wait_dead(), 10)
    assert not handle.alive
    with pytest.raises(WorkerDied):
        await handle.request("echo")


async def test_cores_and_threads_are_set_before_the_target_runs(cluster):
    core = available_cores()[-1]
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker", cores=(core,)))
    assert await handle.request("where") == [[core], "1"]
    with pytest.raises(ValueError, match="2 threads on 1 cores"):
        await cluster.start(WorkerSpec("x", "test_local:EchoWorker", cores=(core,), threads=2))


async def test_close_leaves_no_process(cluster):
    handle = await cluster.start(WorkerSpec("w", "test_local:EchoWorker"))
    await handle.request("echo", {})
    await cluster.close()
    with pytest.raises(ProcessLookupError):
        os.kill(handle.pid, 0)
