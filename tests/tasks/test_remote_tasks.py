"""A task service over HTTP: what goes round, and what a service that dies, hangs or lies costs."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.errors import UserError
from headrace.http.server import HttpServer
from headrace.rollout.types import Outcome
from headrace.tasks import create_task
from headrace.tasks.remote import FixedPlace, RemoteSettings, RemoteTasks
from headrace.tasks.serving import HostLimits, TaskServer
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance, TaskUnavailable

QUICK = RemoteSettings(
    answer_s=2.0, poll_s=0.2, admission_s=1.0, first_wait_s=0.02, longest_wait_s=0.1
)
ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "k", "m", timeout_s=5.0)
WAIT_S = 20.0


class Toy:
    """Rollouts end when told; instances are functions of their seeds."""

    name = "toy"

    def __init__(self) -> None:
        self.started: list[int] = []
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.result = RolloutResult(Outcome.OK, {"reward": 0.5, "form": 2.0}, "fine", {"a": [1]})

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance("toy", seed, "f", 1, 1)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return f"c{instance.seed}"

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        self.started.append(instance.seed)
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if instance.seed == 6:
            raise RuntimeError("boom")
        return self.result


@contextlib.asynccontextmanager
async def served(service: Any, token: str | None = None, **limits: Any):
    server = await TaskServer.start(service, token=token, limits=HostLimits(**limits))
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def opened(url: str, token: str | None = None, name: str = "toy", **changes: Any):
    settings = changes.pop("settings", QUICK)
    tasks = await RemoteTasks.open(
        name, FixedPlace(url, token), settings, report=lambda _: None, **changes
    )
    try:
        yield tasks
    finally:
        await tasks.close()


async def test_everything_goes_round_as_in_one_process():
    toy = Toy()
    async with served(toy, "secret") as server, opened(server.url, "secret", evaluation=11) as far:
        for split in ("train_seed", "evaluation_seed"):
            seeds = [await asyncio.to_thread(getattr(far, split), i) for i in (0, 1, 19, 8, 5)]
            assert seeds == [getattr(toy, split)(i) for i in (0, 1, 19, 8, 5)]
        far.evaluation_seed(10)  # what is measured needs no request, so this does not block
        instance = await asyncio.to_thread(far.instance, 1000)
        assert instance == toy.instance(1000)
        assert far.content_id(instance) == "c1000"
        result = await far.rollout(instance, ENDPOINT)
        assert result == toy.result
        failed = await far.rollout(toy.instance(6), ENDPOINT)
        assert (failed.outcome, failed.reason) == (Outcome.ENV_FAILED, "RuntimeError: boom")
        with pytest.raises(UserError, match="no demonstrations"):
            await far.demonstrations(1, 0, 1.0)
        assert toy.started == [1000, 6]
        assert (far.losses, far.misreports) == (0, 0)


async def test_a_real_service_makes_the_same_instances_and_demonstrations(provider):
    options = {"families": ["count_lines"], "level_weights": [1, 0, 0]}
    here = create_task("terminal", options, provider)
    async with (
        served(create_task("terminal", options, provider)) as server,
        opened(server.url, name="terminal", options=options) as far,
    ):
        seed = await asyncio.to_thread(far.train_seed, 3)
        assert seed == here.train_seed(3)
        assert far.instance(seed) == here.instance(seed)
        assert far.content_id(far.instance(seed)) == here.content_id(here.instance(seed))
        shown = await far.demonstrations(2, 0, 1.0)
        assert shown == await here.demonstrations(2, 0, 1.0)  # type: ignore[attr-defined] # it has
        with pytest.raises(UserError, match=r"tasks.terminal.families is \['sort_file'\]"):
            async with opened(server.url, name="terminal", options={"families": ["sort_file"]}):
                pass


async def test_a_rollout_is_known_by_its_id(monkeypatch):
    """Asked for twice it runs once; another body under its id, or one too many, is refused."""
    toy = Toy()
    toy.go_on.clear()
    body = {
        "instance": {"task": "toy", "seed": 2, "family": "f", "level": 1, "min_turns": 1},
        "endpoint": {"base_url": "x", "api_key": "k", "model": "m"},
    }
    headers = {"x-headrace-tasks": "1"}
    async with (
        served(toy, rollouts=1, body_bytes=1000) as server,
        httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as client,
    ):
        for _ in range(2):
            answer = await client.put("/v1/rollouts/r", json=body)
            assert answer.json()["status"] == "running"
        other = {**body, "instance": {**body["instance"], "seed": 4}}
        assert (await client.put("/v1/rollouts/r", json=other)).status_code == 409
        full = await client.put("/v1/rollouts/s", json=body)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        early = await client.get("/v1/rollouts/r?wait_s=0.01")
        assert early.json()["status"] == "running"
        toy.go_on.set()
        late = await client.get("/v1/rollouts/r?wait_s=10")
        assert late.json()["result"]["rewards"]["reward"] == 0.5
        assert (await client.get("/v1/rollouts/r")).json() == late.json()
        assert toy.started == [2]
        # A cancellation that overtakes its start.
        await client.delete("/v1/rollouts/t")
        assert (await client.put("/v1/rollouts/t", json=body)).json()["status"] == "done"
        assert toy.started == [2]
        for path, sent, status, code in [
            ("/v1/rollouts/u", {**body, "x": 1}, 422, "invalid"),
            ("/v1/rollouts/u", {**body, "x": "y" * 2000}, 413, "body_too_large"),
            ("/v1/rollouts/" + "u" * 200, body, 422, "invalid"),
        ]:
            answer = await client.put(path, json=sent)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await client.get("/v1/rollouts/nobody")).status_code == 404
        assert (await client.get("/v1/rollouts/r?wait_s=nan")).status_code == 422
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        old = await client.get("/v1/service", headers={"x-headrace-tasks": "7"})
        assert old.json()["error"]["code"] == "protocol_version"
        page = await client.get("/v1/service", headers={"origin": "http://evil"})
        assert page.status_code == 403


async def test_tokens_are_asked_for_and_needed_beyond_loopback():
    async with served(Toy(), "secret") as server:
        with pytest.raises(UserError, match="token"):
            async with opened(server.url, "wrong"):
                pass
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.url}/v1/health")).json() == {
                "status": "ok",
                "rollouts": 0,
            }
    with pytest.raises(UserError, match="give a token"):
        await TaskServer.start(Toy(), host="0.0.0.0")


async def test_a_cancelled_rollout_is_cancelled_there_and_one_nobody_looks_at_ends():
    toy = Toy()
    toy.go_on.clear()
    async with served(toy) as server, opened(server.url) as far:
        running = asyncio.create_task(far.rollout(toy.instance(2), ENDPOINT))
        async with asyncio.timeout(WAIT_S):
            await toy.begun.wait()
            running.cancel()
            await toy.cancelled.wait()
        assert running.cancelled() or not running.done()
    toy = Toy()
    toy.go_on.clear()
    async with (
        served(toy, lease_s=0.05) as server,
        httpx.AsyncClient(headers={"x-headrace-tasks": "1"}, trust_env=False) as client,
    ):
        instance = {"task": "toy", "seed": 2, "family": "f", "level": 1, "min_turns": 1}
        endpoint = {"base_url": "x", "api_key": "k", "model": "m"}
        await client.put(
            f"{server.url}/v1/rollouts/r", json={"instance": instance, "endpoint": endpoint}
        )
        async with asyncio.timeout(WAIT_S):
            await toy.cancelled.wait()


async def test_more_rollouts_than_the_service_takes_wait_their_turn():
    toy = Toy()
    async with served(toy, rollouts=2) as server:
        settings = RemoteSettings(answer_s=2.0, poll_s=0.2, admission_s=15.0)
        async with opened(server.url, settings=settings) as far:
            results = await asyncio.gather(
                *(far.rollout(toy.instance(2 * i + 100), ENDPOINT) for i in range(5))
            )
    assert {r.outcome for r in results} == {Outcome.OK}


# -- services that are not what they should be -----------------------------------------------------

DESCRIPTION = {"protocol": 1, "name": "toy", "rollouts": 100}


class Liar:
    """Answers by hand: what `answers` holds for a route (a status, a text, a value, or how to
    make one of the id asked for), else honestly."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.hang: set[str] = set()
        self.server: HttpServer | None = None

    async def start(self, port: int = 0) -> str:
        app = Starlette(routes=[Route("/v1/{route}{rest:path}", self.answer, methods=METHODS)])
        self.server = await HttpServer.start(app, port=port)
        return self.server.url

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop()

    async def answer(self, request: Request) -> Response:
        route = request.path_params["route"]
        self.asked.append(f"{request.method} {route}")
        if route in self.hang:
            await asyncio.Event().wait()
        said = self.answers.get(route)
        last = request.url.path.rpartition("/")[2]
        if said is None:
            body = json.loads(await request.body() or b"{}")
            said = self.honest(route, last, body)
        elif callable(said):
            said = said(last)
        if isinstance(said, int):
            return Response(status_code=said)
        text = said if isinstance(said, str) else json.dumps(said)
        return Response(text, media_type="application/json")

    def honest(self, route: str, last: str, body: dict[str, Any]) -> Any:
        if route == "service":
            return DESCRIPTION
        if route == "seeds":
            return {"seeds": [2 * (body["start"] + i) for i in range(body["count"])]}
        if route == "instances":
            return {"instances": [named(seed) for seed in body["seeds"]]}
        return {"id": last, "status": "done", "content_id": "", "result": {"outcome": "ok"}}


METHODS = ["GET", "PUT", "POST", "DELETE"]


def named(seed: int, **changes: Any) -> dict[str, Any]:
    instance = {"task": "toy", "seed": seed, "family": "f", "level": 1, "min_turns": 1}
    return {"instance": {**instance, **changes}, "content_id": f"c{seed}"}


def result(*, content_id: str = "c2", **changes: Any) -> Callable[[str], str]:
    """The text of a finished rollout with this result; Python spells NaN where JSON cannot."""
    said = {"outcome": "ok", "rewards": {"reward": 1.0}, **changes}
    done = {"status": "done", "content_id": content_id, "result": said}
    return lambda i: json.dumps({"id": i, **done})


def rewarded(digits: str) -> Callable[[str], str]:
    """The text of a finished rollout whose reward is spelled so; Python would not write it."""
    told = result()
    return lambda i: told(i).replace('"reward": 1.0', f'"reward": {digits}')


@pytest.fixture
async def liar():
    liar = Liar()
    await liar.start()
    yield liar
    await liar.stop()


LIES = {
    "no json": (lambda i: "<html>", "rollout is no JSON"),
    "deep": (lambda i: "[" * 100_000, "rollout is no JSON"),
    "a list": (lambda i: "[1]", r"rollout is \[1\]: Expected `object`"),
    "no result": (lambda i: json.dumps({"id": i, "status": "done"}), "rollout.result is None"),
    "status": (lambda i: json.dumps({"id": i, "status": "x"}), "rollout.status is 'x'"),
    "other id": (
        lambda i: json.dumps({"id": "y", "status": "done", "result": {"outcome": "env_failed"}}),
        "rollout.id is 'y'",
    ),
    "nan": (result(rewards={"reward": float("nan")}), "rewards.reward is nan"),
    "inf": (result(rewards={"reward": 1.0, "s": float("-inf")}), "rewards.s is -inf"),
    "huge": (rewarded("1" + "0" * 999), "rewards.reward is 10000"),
    "endless": (rewarded("1" * 9999), "rollout is no JSON"),
    "too good": (result(rewards={"reward": 1.5}), r"rewards.reward is 1.5, .* not in \[0, 1\]"),
    "below": (result(rewards={"reward": -0.1}), r"rewards.reward is -0.1"),
    "text": (result(rewards={"reward": "1"}), "rewards.reward is '1'; use a number"),
    "bool": (result(rewards={"reward": True}), "rewards.reward is True"),
    "list": (result(rewards=[1.0]), r"rewards is \[1.0\]"),
    "many": (result(rewards={str(i): 0 for i in range(99)}), "rewards has 99"),
    "none": (result(rewards={}), "rewards.reward is missing"),
    "outcome": (result(outcome="brilliant"), "rollout.result.outcome is 'brilliant'"),
    "cancelled": (result(outcome="cancelled", rewards={}), "outcome is cancelled"),
    "reason": (result(reason="x" * 5000), "reason has 5000"),
    "surrogate": (result(reason="\ud800"), "reason is .* JSON cannot hold"),
    "detail": (result(detail={"a": "x" * 500_000}), "detail has 500008 bytes"),
    "megabytes": (result(detail={"a": "x" * 3_000_000}), "more than 1048576 bytes"),
    "detail type": (result(detail="x"), "rollout.result.detail is 'x'"),
    "other content": (result(content_id="c4"), "content_id is 'c4'.*'c2' before"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lie_is_an_environment_failure_that_names_field_and_value(liar, lie):
    tell, says = lie
    async with opened(liar.url) as far:
        await asyncio.to_thread(far.train_seed, 1)
        liar.answers["rollouts"] = tell
        found = await far.rollout(far.instance(2), ENDPOINT)
    assert found.outcome is Outcome.ENV_FAILED
    assert found.rewards == {}
    assert far.misreports == 1
    assert re.search(says, found.reason), found.reason
    assert len(found.reason) < 300


@pytest.mark.parametrize(
    ("route", "answer", "says"),
    [
        ("seeds", {"seeds": [1]}, "seeds has 1 entries, 8"),
        ("seeds", {"seeds": ["1"] * 8}, r"seeds.seeds\[0\] is '1'"),
        ("seeds", {"seeds": [10**30] * 8}, r"seeds.seeds\[0\] is 10000"),
        ("instances", {"instances": [named(0)]}, "instances has 1 entries, 8"),
        ("instances", {"instances": [named(3)] * 8}, r"instances\[0\].instance.seed is 3"),
        ("instances", {"instances": [named(0, task="x")] * 8}, r"instance.task is 'x'; 'toy'"),
        ("instances", {"instances": [named(0, level=-1)] * 8}, "instance.level is -1"),
        ("instances", {"instances": [named(0, family="\udfff")] * 8}, "is no text"),
        ("instances", 500, "HTTP 500"),
        ("seeds", "x" * 2_000_000, "more than 1048576 bytes"),
    ],
)
async def test_lies_about_instances_make_the_task_unavailable(liar, route, answer, says):
    async with opened(liar.url) as far:
        liar.answers[route] = answer
        with pytest.raises(TaskUnavailable, match=says):
            await asyncio.to_thread(far.train_seed, 0)
        del liar.answers[route]
        assert await asyncio.to_thread(far.train_seed, 0) == 0


async def test_an_instance_that_changes_under_its_seed_is_found_out(liar):
    async with opened(liar.url) as far:
        instance = await asyncio.to_thread(far.instance, 2)
        assert await asyncio.to_thread(far.instance, 2) == instance  # remembered
        liar.answers["instances"] = {"instances": [named(2 * i, level=3) for i in range(8)]}
        with pytest.raises(TaskUnavailable, match=r"instance.level of seed 2 is 3, it was 1"):
            await asyncio.to_thread(far.train_seed, 0)
        # Also the one that an earlier process of the run had dispatched.
        liar.answers["instances"] = {"instances": [named(100, level=3)]}
        with pytest.raises(TaskUnavailable, match=r"instance.level of seed 100 is 3, it was 1"):
            await asyncio.to_thread(far.content_id, TaskInstance("toy", 100, "f", 1, 1))
        assert far.misreports == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({**DESCRIPTION, "protocol": 2}, "version 2 of the protocol, this is version 1"),
        ({**DESCRIPTION, "name": "other"}, "serves task 'other'"),
        ({**DESCRIPTION, "rollouts": 0}, "service.rollouts is 0"),
        ({"name": "toy"}, "missing required field `protocol`"),
        ("hello", "service is no JSON"),
        (503, "HTTP 503"),
        (404, "HTTP 404"),
    ],
)
async def test_a_service_that_cannot_be_used_is_refused_at_the_start(liar, answer, says):
    liar.answers["service"] = answer
    with pytest.raises(UserError, match=says) as caught:
        async with opened(liar.url):
            pass
    assert "\n" not in str(caught.value)


async def test_nobody_there_is_said_at_the_start():
    with pytest.raises(UserError, match=r"task toy: http://127.0.0.1:1 cannot be used"):
        async with opened("http://127.0.0.1:1"):
            pass


async def test_a_hanging_service_is_given_up_and_left_alone_until_it_answers(liar):
    settings = RemoteSettings(
        answer_s=0.5, poll_s=0.1, admission_s=0.2, first_wait_s=0.01, longest_wait_s=0.02
    )
    async with opened(liar.url, settings=settings) as far:
        instance = await asyncio.to_thread(far.instance, 2)
        liar.hang = {"rollouts", "service"}
        hung = await far.rollout(instance, ENDPOINT)
        assert "was lost" in hung.reason
        assert "no answer in time" in hung.reason
        asked = liar.asked.count("PUT rollouts")
        waited = await far.rollout(instance, ENDPOINT)
        assert "does not answer" in waited.reason
        with pytest.raises(TaskUnavailable, match="no answer in time"):
            far.train_seed(0)  # fails at once: nothing is asked
        assert liar.asked.count("PUT rollouts") == asked
        assert far.losses == 1
        liar.hang = set()
        liar.answers["rollouts"] = result()
        async with asyncio.timeout(WAIT_S):
            while (await far.rollout(instance, ENDPOINT)).outcome is not Outcome.OK:
                pass


async def test_a_rollout_that_never_ends_is_given_up_and_cancelled(liar, monkeypatch):
    monkeypatch.setattr("headrace.tasks.remote.service._LATE_S", 0.05)
    liar.answers["rollouts"] = lambda i: json.dumps({"id": i, "status": "running"})
    async with opened(liar.url) as far:
        endpoint = Endpoint("http://x", "k", "m", timeout_s=0.05)
        found = await far.rollout(TaskInstance("toy", 2, "f", 1, 1), endpoint)
        assert "hung" in found.reason
    assert "DELETE rollouts" in liar.asked
    assert far.losses == 0


async def test_a_service_that_dies_fails_its_rollouts_and_serves_again_when_it_is_back():
    toy = Toy()
    toy.go_on.clear()
    words: list[str] = []
    server = await TaskServer.start(toy)
    far = await RemoteTasks.open("toy", FixedPlace(server.url, None), QUICK, report=words.append)
    try:
        running = asyncio.create_task(far.rollout(toy.instance(2), ENDPOINT))
        async with asyncio.timeout(WAIT_S):
            await toy.begun.wait()
            await server._server.stop()  # the port goes first, as when a machine does
            lost = await running
        assert lost.outcome is Outcome.ENV_FAILED
        assert "lost" in lost.reason
        await server.stop()
        back = Toy()
        server = await TaskServer.start(back, port=server.port)
        async with asyncio.timeout(WAIT_S):
            while (await far.rollout(back.instance(2), ENDPOINT)).outcome is not Outcome.OK:
                pass
        assert [w.split(":")[0] for w in words] == ["task toy is lost", "task toy answers again"]
    finally:
        await far.close()
        await server.stop()


async def test_a_service_that_forgot_a_rollout_fails_it(liar):
    def forget(last):
        if liar.asked[-1].startswith("PUT"):
            return json.dumps({"id": last, "status": "running"})
        return 404

    liar.answers["rollouts"] = forget
    async with opened(liar.url) as far:
        found = await far.rollout(TaskInstance("toy", 2, "f", 1, 1), ENDPOINT)
    assert found.outcome is Outcome.ENV_FAILED
    assert "HTTP 404" in found.reason
