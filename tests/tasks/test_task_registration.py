"""Task services that announce themselves: who is let in, who gets rollouts, who is left out."""

import asyncio
import contextlib
import json
import re

import httpx
import pytest
from registering import QUICK, TOKEN, WAIT_S, Clock, Rig, Toy, Words

from headrace.errors import UserError
from headrace.rollout.types import Outcome
from headrace.tasks.remote import PoolSettings, Register, ServicePool
from headrace.tasks.serving import TaskServer
from headrace.tasks.serving.announcing import Announcer, check_registration, reachable_url
from headrace.tasks.types import Endpoint, TaskUnavailable

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "k", "m", timeout_s=20.0)


@pytest.fixture
async def rig():
    async with contextlib.AsyncExitStack() as stack:
        words = Words()
        register = await Register.start(host="127.0.0.1", port=0, report=words)
        stack.push_async_callback(register.stop)
        clock = Clock()
        settings = PoolSettings(WAIT_S, run="r", every_s=0.05)
        pool = ServicePool(
            "toy", TOKEN, QUICK, settings, options={"level": 2}, report=words, clock=clock
        )
        stack.push_async_callback(pool.close)
        register.expect(pool)
        rig = Rig(stack, register, pool)
        rig.words, rig.clock = words, clock
        yield rig


def silence(announcer: Announcer) -> None:
    """It announces no more, without a word, as when its process is killed."""
    assert announcer._task is not None
    announcer._task.cancel()


async def test_a_service_that_died_is_found_again_at_another_address(rig):
    toy, back = Toy("first"), Toy("second")
    opening = asyncio.create_task(rig.open())  # before there is anybody
    server, announcer = await rig.serve(toy, level=2)
    far = await opening
    assert await asyncio.to_thread(far.train_seed, 3) == 6
    await rig.told.until("registered with run r at http")
    returned = asyncio.Event()
    far.on_return = returned.set
    running = asyncio.create_task(far.rollout(toy.instance(2), ENDPOINT))
    async with asyncio.timeout(WAIT_S):
        await toy.begun.wait()
        silence(announcer)
        for connection in list(server._server._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr] # as when a process is killed
        await server.stop()
        lost = await running
    assert (lost.outcome, "lost" in lost.reason) == (Outcome.ENV_FAILED, True)
    await rig.words.until("is lost")
    assert not returned.is_set()
    back.go_on.set()
    again, _ = await rig.serve(back, level=2)
    assert again.port != server.port
    async with asyncio.timeout(WAIT_S):
        await returned.wait()
        assert (await far.rollout(toy.instance(4), ENDPOINT)).reason == "second"
    assert far.losses == 1
    rig.clock.now += 11
    await rig.words.until(f"{server.url} has not announced itself for 10 s")


async def test_rollouts_go_to_the_instance_with_fewest_and_not_to_one_that_is_silent(rig):
    toys = [Toy("a"), Toy("b")]
    served = [await rig.serve(toy, level=2) for toy in toys]
    far = await rig.open()
    await rig.words.until("registered", times=2)
    begun = []
    for index in range(4):
        for toy in toys:
            toy.begun.clear()
        begun.append(asyncio.create_task(far.rollout(toys[0].instance(index), ENDPOINT)))
        waits = [asyncio.create_task(toy.begun.wait()) for toy in toys]
        await asyncio.wait(waits, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    assert [toy.running for toy in toys] == [2, 2]
    silence(served[0][1])
    rig.clock.now += 11
    await rig.words.until(f"{served[0][0].url} has not .* left out")
    toys[1].go_on.set()
    later = [await far.rollout(toys[0].instance(index), ENDPOINT) for index in range(10, 13)]
    assert [result.reason for result in later] == ["b"] * 3
    toys[0].go_on.set()  # what it was doing comes to its end
    results = await asyncio.gather(*begun)
    assert {r.outcome for r in results} == {Outcome.OK}
    assert sorted(r.reason for r in results) == ["a", "a", "b", "b"]
    # The other one says that it ends; then nobody is left, and it may come back.
    await served[1][1].stop()
    await rig.words.until(f"{served[1][0].url} has ended")
    with pytest.raises(TaskUnavailable, match="has ended"):
        far.train_seed(1000)
    waiting = asyncio.create_task(far.rollout(toys[0].instance(20), ENDPOINT))
    rig.announce(served[0][0].url, {"level": 2})
    assert (await waiting).reason == "a"


DEEP = b'{"a":' * 10_000
GOOD = {"task": "toy", "url": "http://127.0.0.1:1", "options": {"level": 2}}


@pytest.mark.parametrize(
    ("changes", "status", "code", "says"),
    [
        ({"token": "wrong"}, 401, "unauthorized", "token of a task"),
        ({"token": None}, 401, "unauthorized", "token of a task"),
        ({"version": "2"}, 400, "protocol_version", "this run speaks version 1"),
        ({"id": "a b"}, 422, "invalid", "id is 'a b'"),
        ({"id": "a" * 129}, 422, "invalid", "id is"),
        ({"data": b"{"}, 400, "malformed", "no JSON"),
        ({"data": b'{"task":"toy","url":"http://x","options":' + DEEP}, 400, "malformed", ""),
        ({"body": {**GOOD, "task": 3}}, 422, "invalid", "task"),
        ({"body": {**GOOD, "port": 3}}, 422, "invalid", "port"),
        ({"body": {**GOOD, "task": "toys"}}, 404, "unknown_task", "'toys'.*waits for toy"),
        ({"body": {**GOOD, "task": "other"}}, 403, "forbidden", "not the token of task other"),
        ({"body": {**GOOD, "options": {"level": 3}}}, 409, "options_differ", "level is 2.*with 3"),
        ({"body": {**GOOD, "options": {}}}, 409, "options_differ", "serves with None"),
        ({"body": {**GOOD, "url": "ftp://x"}}, 422, "invalid", "'ftp://x'"),
        ({"body": {**GOOD, "url": "http://x" + "y" * 3000}}, 422, "invalid", "url"),
        ({"body": {**GOOD, "options": {"x": "y" * 300_000}}}, 413, "body_too_large", "larger"),
    ],
)
async def test_an_announcement_that_may_not_be_is_refused_in_words(
    rig, changes, status, code, says
):
    settings = PoolSettings(WAIT_S)
    other = ServicePool("other", "another", QUICK, settings, options={}, report=rig.words)
    rig.stack.push_async_callback(other.close)
    rig.register.expect(other)
    headers = {"x-headrace-tasks": changes.get("version", "1")}
    if (token := changes.get("token", TOKEN)) is not None:
        headers["authorization"] = f"Bearer {token}"
    content = changes.get("data") or json.dumps(changes.get("body", GOOD)).encode()
    async with httpx.AsyncClient(
        base_url=rig.register.url, headers=headers, trust_env=False
    ) as client:
        path = f"/v1/services/{changes.get('id', 'i')}"
        answer = await client.put(path, content=content)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code
        assert re.search(says, answer.json()["error"]["message"])
        if code == "unauthorized":  # it may not end others, either
            assert (await client.delete(path)).status_code == 401
    # And people at the run are told.
    assert any("refused" in words for words in rig.words.said)
    assert rig.pool.refused


async def test_instances_are_bounded_and_need_addresses_of_their_own(rig, monkeypatch):
    pool = ServicePool(
        "toy", TOKEN, QUICK, PoolSettings(WAIT_S, run="r"), options={}, report=rig.words
    )
    rig.stack.push_async_callback(pool.close)
    rig.register.expect(pool)
    headers = {"x-headrace-tasks": "1", "authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(
        base_url=rig.register.url, headers=headers, trust_env=False
    ) as client:

        async def announce(instance: str, port: int) -> httpx.Response:
            body = {**GOOD, "url": f"http://127.0.0.1:{port}"}
            return await client.put(f"/v1/services/{instance}", json=body)

        first = await announce("a", 1)
        assert first.json() == {"run": "r", "state": "looking", "why": "", "every_s": 2.0}
        assert (await announce("b", 1)).json()["state"] == "looking"  # takes the place of a
        late = await announce("a", 1)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "address_in_use")
        monkeypatch.setattr("headrace.tasks.remote.pool.MOST_INSTANCES", 1)
        full = await announce("c", 2)
        assert (full.status_code, full.headers["retry-after"]) == (429, "10")
        # Nobody is there: it says so as soon as it has looked.
        await rig.words.until("127.0.0.1:1 cannot be used")
        assert (await announce("b", 1)).json()["state"] == "unreachable"
        gone = [(await client.delete("/v1/services/b")).json() for _ in range(2)]
        assert gone == [{"known": True}, {"known": False}]
        assert (await client.get("/v1/services/b")).json()["error"]["code"] == "not_found"
        await pool.close()
        assert (await announce("d", 3)).json()["error"]["code"] == "run_ends"


async def test_what_answers_at_the_address_must_be_the_service(rig):
    """Believed is what the service says of itself, not what was announced."""
    server = await TaskServer.start(Toy(), token=TOKEN, options={"level": 1})
    rig.stack.push_async_callback(server.stop)
    rig.announce(server.url, {"level": 2})
    told = await rig.told.until("cannot use")
    assert "tasks.toy.level is 2" in told
    assert not any("registered" in words for words in rig.words.said)


async def test_a_service_waits_for_its_run(rig, monkeypatch):
    monkeypatch.setattr("headrace.tasks.serving.announcing._RETRY_S", 0.05)
    url, port = rig.register.url, rig.register.port
    await rig.register.stop()
    _, announcer = await rig.serve(Toy(), level=2)
    assert url in await rig.told.until("no run answers at")
    again = await Register.start(host="127.0.0.1", port=port, report=rig.words)
    rig.stack.push_async_callback(again.stop)
    again.expect(rig.pool)
    await rig.told.until("registered with run r")
    await announcer.stop()
    await rig.words.until("has ended")


def test_an_address_for_every_interface_becomes_the_one_on_the_way_to_the_run():
    assert reachable_url("http://127.0.0.1:8700", "http://10.1.2.3:1") == "http://127.0.0.1:8700"
    assert reachable_url("http://0.0.0.0:8700", "http://127.0.0.1:1") == "http://127.0.0.1:8700"
    assert reachable_url("http://box:8700", "http://127.0.0.1:1") == "http://box:8700"
    for arguments, says in [
        (("nowhere", None, TOKEN), "register 'nowhere'"),
        (("http://a:1", "b", TOKEN), "url 'b'"),
        (("http://a:1", None, None), "token"),
        ((None, "http://b:1", TOKEN), "give register"),
    ]:
        with pytest.raises(UserError, match=says):
            check_registration(*arguments)
