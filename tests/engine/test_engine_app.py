"""The routes over a real port and a fake engine: answers, events, refusals, and who goes away."""

import asyncio
import contextlib
import json
import math
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.config import EngineStats
from headrace.engine.serving.app import create_engine_app
from headrace.engine.serving.doorway import Limits
from headrace.engine.serving.event_stream import PendingEvents
from headrace.engine.serving.metrics import ENGINE_METRICS
from headrace.engine.serving.wire import GenerateAnswer, GenerateBody, Sampling
from headrace.engine.types import EngineError, Progress, SamplingParams
from headrace.errors import UserError
from headrace.http.server import ConnectionLimits, HttpServer

ASK = {"prompt_ids": [5, 6, 7], "sampling": {"max_tokens": 4}}
DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
Serve = Any


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(**limits)` -> (engine, client of its own server)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            api_key: str | None = None, **limits: Any
        ) -> tuple[FakeEngine, httpx.AsyncClient]:
            engine = FakeEngine()
            app = create_engine_app(engine, api_key=api_key, limits=Limits(**limits))
            server = await HttpServer.start(app, limits=ConnectionLimits(linger_s=0.3))
            stack.push_async_callback(server.stop)
            client = httpx.AsyncClient(base_url=server.url, timeout=20)
            await stack.enter_async_context(client)
            return engine, client

        yield start


def ask(**changes: Any) -> dict[str, Any]:
    sampling = ASK["sampling"] | changes.pop("sampling", {})
    return {**ASK, "sampling": sampling, **changes}


def problem(response: httpx.Response, status: int, code: str) -> str:
    """The message of an error answer, whose shape, status and code are checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"code", "message"}
    assert error["code"] == code
    return error["message"]


async def events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
        else:
            assert line == "" or line.startswith(":")


async def stream(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> list[Any]:
    async with client.stream(
        "POST", "/generate", json={**body, "stream": True}, headers=headers
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event async for event in events(response.aiter_lines())]


# -- answers -------------------------------------------------------------------------------------


async def test_an_answer_holds_everything_the_engine_said(serve: Serve):
    engine, client = await serve()
    sampling = {"logprobs": 2, "prompt_logprobs": 0, "logit_bias": {"7": -100}, "seed": -5}
    response = await client.post(
        "/generate", json=ask(id="näme/☃", session="s", priority=3, timeout_s=9, sampling=sampling)
    )
    assert response.status_code == 200, response.text
    assert response.json() == {
        "id": "näme/☃",
        "outputs": [
            {
                "index": 0,
                "ids": [1, 2, 3, 4],
                "logprobs": [-0.1, -0.2, -0.3, -0.4],
                "raw_logprobs": [-1.0, -2.0, -3.0, -4.0],
                "spans": [
                    {
                        "start": 0,
                        "end": 4,
                        "weight_version": 0,
                        "newest_version": None,
                        "engine_id": "fake",
                    }
                ],
                "finish_reason": "length",
                "stop": None,
                "alternatives": [[[i, -1.0], [0, None]] for i in (1, 2, 3, 4)],
                "reused_tokens": 0,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
                "preemptions": 0,
                "queue_s": 0.001,
                "total_s": 0.002,
            }
        ],
        "prompt_logprobs": [None, -2.0, -2.0],
        "prompt_alternatives": None,
    }
    (request,) = engine.requests
    assert (request.session, request.priority, request.timeout_s) == ("s", 3, 9.0)
    assert request.sampling.logit_bias == {7: -100.0}
    assert request.sampling.seed == -5


async def test_several_outputs_are_told_apart(serve: Serve):
    engine, client = await serve()
    answer = (await client.post("/generate", json=ask(n=3, id="a"))).json()
    assert [output["index"] for output in answer["outputs"]] == [0, 1, 2]
    assert sorted(engine.started) == ["a/0", "a/1", "a/2"]
    told = await stream(client, ask(n=2))
    grown: dict[int, list[int]] = {0: [], 1: []}
    for name, data in told[:-1]:
        assert name == "token"
        grown[data["index"]] += data["ids"]
    assert grown == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}
    assert told[-1][0] == "done"


def test_every_sampling_parameter_can_be_sent_with_the_engines_own_defaults():
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert set(Sampling.model_fields) == fields
    assert Sampling.model_validate({"max_tokens": 3}).params() == SamplingParams(max_tokens=3)


def test_a_prompt_of_thirty_thousand_tokens_is_read():
    data = json.dumps(ask(prompt_ids=list(range(30_000)))).encode()
    assert GenerateBody.model_validate_json(data).prompt_ids == tuple(range(30_000))


# -- events --------------------------------------------------------------------------------------


async def test_the_tokens_told_are_those_of_the_result(serve: Serve):
    engine, client = await serve()
    engine.per_progress = 3
    told = await stream(client, ask())
    assert [name for name, _ in told][-1] == "done"
    tokens = [data for name, data in told if name == "token"]
    assert [i for data in tokens for i in data["ids"]] == [1, 2, 3, 4]
    assert [p for data in tokens for p in data["logprobs"]] == [-0.1, -0.2, -0.3, -0.4]
    assert told[-1][1]["outputs"][0]["ids"] == [1, 2, 3, 4]
    assert GenerateAnswer.model_validate(told[-1][1])


async def test_a_restart_makes_the_reader_forget(serve: Serve):
    engine, client = await serve()
    engine.restart_after = 2
    told = await stream(client, ask())
    ids: list[int] = []
    for name, data in told:
        if name == "restart":
            ids.clear()
        elif name == "token":
            ids += data["ids"]
    assert "restart" in [name for name, _ in told]
    assert ids == [1, 2, 3, 4] == told[-1][1]["outputs"][0]["ids"]


async def test_an_error_before_the_first_event_is_an_http_error(serve: Serve):
    engine, client = await serve()
    engine.refusal = EngineError(EngineError.OVERLOADED, "full")
    response = await client.post("/generate", json=ask(stream=True))
    assert problem(response, 429, "overloaded") == "full"
    assert response.headers["retry-after"] == "1"


async def test_tokens_are_told_at_once_and_what_comes_later_is_an_event(serve: Serve):
    engine, client = await serve(keepalive_s=0.01)
    engine.gate.clear()
    body = ask(id="r", stream=True)
    async with client.stream("POST", "/generate", json=body) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith(":"), "a comment keeps the connection alive"
        told = events(lines)
        engine.gate.set()
        assert (await anext(told))[0] == "token"
        engine.gate.clear()
        await engine.abort("r")
        rest = [event async for event in told]
    assert rest[-1][1]["outputs"][0]["finish_reason"] in ("aborted", "length")


async def test_an_error_after_the_first_event_is_an_event(serve: Serve):
    engine, client = await serve(keepalive_s=0.01, grace_s=0.2)
    engine.gate.clear()
    told = await stream(client, ask(timeout_s=0.1))
    assert [name for name, _ in told] == ["error"]
    assert told[0][1]["error"]["code"] == "deadline_exceeded"


def test_a_slow_reader_holds_no_more_than_the_output():
    pending = PendingEvents()
    for version in (0, 1):
        for i in range(1000):
            pending.add(0, Progress("r", (i,), (-1.0,), (math.nan,), version))
    told = pending.take().decode().split("\n\n")[:-1]
    assert len(told) == 2, "one growing event for each weight version"
    first = json.loads(told[0].split("data: ")[1])
    assert first["ids"] == list(range(1000))
    assert first["raw_logprobs"] == [None] * 1000
    assert pending.take() == b""
    pending.add(0, Progress("r", (1,), (-1.0,), (), 1))
    pending.add(0, Progress("r", (), (), (), 2, restart=True))
    assert pending.take() == b'event: restart\ndata: {"index":0}\n\n'


# -- refusals ------------------------------------------------------------------------------------


async def test_bad_bodies_are_told_what_is_wrong(serve: Serve):
    engine, client = await serve(body_bytes=10_000)

    async def post(content: bytes | str, kind: str = "application/json") -> httpx.Response:
        headers = {"content-type": kind} if kind else {}
        return await client.post("/generate", content=content, headers=headers)

    for unreadable in (b"", b"{", b"\xff\xfe", b'{"prompt_ids": "\\ud800"}', b"[" * 9_000):
        assert "Invalid JSON" in problem(await post(unreadable), 400, "invalid_request")
    for field, value in {
        "prompt_ids": [],
        "prompt_ids.1": [1, -1],
        "prompt_ids.0": [True],
        "prompt_ids.2": [1, 2, 3.5],
        "n": 0,
        "id": "",
        "session": "s" * 257,
        "timeout_s": 0,
        "promt_ids": [1],
    }.items():
        body = ask(**{field.partition(".")[0]: value})
        message = problem(await post(json.dumps(body)), 422, "invalid_request")
        assert message.startswith(f"{field}: "), message
    for number in ("NaN", "Infinity", "1e999", "-1", '"1"', "1" * 400, "null"):
        body = json.dumps(ask()).replace('"max_tokens": 4', f'"max_tokens": 4, "top_p": {number}')
        message = problem(await post(body), 422, "invalid_request")
        assert message.startswith("sampling.top_p: "), message
    for number in ("99999999999999999999", "1.5", "true"):
        message = problem(
            await post(f'{{"prompt_ids": [1], "sampling": {{"max_tokens": {number}}}}}'),
            422,
            "invalid_request",
        )
        assert message.startswith("sampling.max_tokens: "), message
    assert "list of 3" in problem(await post("[1, 2, 3]"), 422, "invalid_request")
    long = json.dumps(ask(prompt_ids=[1] * 500))
    assert "500 tokens" in problem(await post(long), 422, "context_length_exceeded")
    problem(await post(b" " * 10_001), 413, "body_too_large")
    problem(await post(json.dumps(ask()), "text/plain"), 415, "unsupported_media_type")
    assert not engine.started
    assert (await post(json.dumps(ask()), "")).status_code == 200


async def test_a_body_without_end_is_answered_and_cut_off(serve: Serve):
    _, client = await serve(body_bytes=100_000)
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
                await writer.drain()

    sending = asyncio.create_task(send())
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in await reader.readuntil(b"}}")
    await asyncio.wait_for(sending, 20)
    # One that ends is read to its end, and the answer is seen.
    response = await client.post("/generate", content=b" " * 2_000_000)
    problem(response, 413, "body_too_large")


async def test_a_body_that_does_not_come_is_given_up(serve: Serve):
    _, client = await serve(body_s=0.1)
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer
    writer.close()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError(EngineError.INVALID, "m"), 422, "invalid_request"),
        (EngineError(EngineError.TOO_LONG, "m"), 422, "context_length_exceeded"),
        (EngineError(EngineError.OVERLOADED, "m"), 429, "overloaded"),
        (EngineError(EngineError.CLOSED, "m"), 503, "engine_closed"),
        (EngineError(EngineError.FAILED, "m"), 500, "generation_failed"),
        (UserError("m"), 503, "engine_closed"),
        (TimeoutError("m"), 504, "deadline_exceeded"),
        (ZeroDivisionError("m"), 500, "internal_error"),
    ],
)
async def test_the_engines_errors_have_a_status_each(
    serve: Serve, error: Exception, status: int, code: str
):
    engine, client = await serve()
    engine.refusal = error
    for streaming in (False, True):
        response = await client.post("/generate", json=ask(stream=streaming))
        assert "m" in problem(response, status, code)


async def test_an_engine_that_never_answers_is_a_504_and_is_let_go(serve: Serve):
    engine, client = await serve(grace_s=0.05)
    engine.gate.clear()
    response = await client.post("/generate", json=ask(timeout_s=0.05))
    problem(response, 504, "deadline_exceeded")
    assert len(engine.cancelled) == 1


async def test_ids_in_use_are_refused_and_free_again_afterwards(serve: Serve):
    engine, client = await serve()
    engine.gate.clear()
    first = asyncio.create_task(client.post("/generate", json=ask(id="a", n=2)))
    await engine.until(lambda: engine.started)
    assert "in use" in problem(
        await client.post("/generate", json=ask(id="a")), 422, "invalid_request"
    )
    assert (await client.post("/abort", json={"id": "a"})).json() == {"id": "a", "aborted": True}
    outputs = (await first).json()["outputs"]
    assert [output["finish_reason"] for output in outputs] == ["aborted", "aborted"]
    assert [output["ids"] for output in outputs] == [[], []]
    # Finished and unknown ids alike: nothing to abort.
    assert (await client.post("/abort", json={"id": "a"})).json() == {"id": "a", "aborted": False}
    engine.gate.set()
    assert (await client.post("/generate", json=ask(id="a"))).status_code == 200


async def test_overload_is_refused_before_the_body_is_read(serve: Serve):
    engine, client = await serve(open=1)
    engine.gate.clear()
    first = asyncio.create_task(client.post("/generate", json=ask()))
    await engine.until(lambda: engine.started)
    response = await client.post("/generate", content=b"{")
    assert "limit" in problem(response, 429, "overloaded")
    assert int(response.headers["retry-after"]) >= 1
    assert (await client.get("/health")).status_code == 200, "operators still get in"
    engine.gate.set()
    assert (await first).status_code == 200
    assert (await client.post("/generate", json=ask())).status_code == 200


async def test_unknown_routes_and_methods_have_the_same_shape(serve: Serve):
    _, client = await serve()
    problem(await client.get("/nothing"), 404, "not_found")
    problem(await client.post("/generate/"), 404, "not_found")
    response = await client.get("/generate")
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert (await client.delete("/weights")).headers["allow"] == "GET, POST"


async def test_the_key_is_asked_for_everywhere_but_by_probes(serve: Serve):
    engine, client = await serve(api_key="k")
    for key in ("", "Bearer", "Bearer other", "Basic k", "Bearer k\u00e9"):
        headers = {"authorization": key.encode()} if key else {}
        for method, path in (
            ("POST", "/generate"),
            ("POST", "/weights"),
            ("GET", "/weights"),
            ("POST", "/abort"),
            ("GET", "/openapi.json"),
            ("GET", "/nothing"),
        ):
            response = await client.request(method, path, headers=headers)
            problem(response, 401, "unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200
    assert not engine.started
    response = await client.post("/generate", json=ask(), headers={"authorization": "bearer k"})
    assert response.status_code == 200


async def test_web_pages_cannot_use_an_engine_without_a_key(serve: Serve):
    engine, client = await serve()
    response = await client.post("/generate", json=ask(), headers={"origin": "http://evil"})
    problem(response, 403, "forbidden")
    assert not engine.started


# -- clients that go away, and come back ----------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("n", [1, 8])
async def test_a_client_that_goes_away_frees_the_engine(serve: Serve, streaming: bool, n: int):
    engine, client = await serve(keepalive_s=0.01)
    engine.gate.clear()
    task = asyncio.create_task(client.post("/generate", json=ask(n=n, stream=streaming)))
    await engine.until(lambda: len(engine.started) == n)
    task.cancel()
    await engine.until(lambda: len(engine.cancelled) == n)
    assert not engine._running


async def test_a_key_makes_a_repetition_join_or_replay(serve: Serve):
    engine, client = await serve()
    engine.gate.clear()
    headers = {"idempotency-key": "turn-7"}

    def post(**changes: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(client.post("/generate", json=ask(**changes), headers=headers))

    lost = post()
    await engine.until(lambda: engine.started)
    joined = post()
    lost.cancel()
    engine.gate.set()
    answer = (await joined).json()
    assert answer["outputs"][0]["ids"] == [1, 2, 3, 4]
    assert (await post()).json() == answer
    told = await stream(client, ask(), **headers)
    assert [name for name, _ in told] == ["token", "done"]
    assert told[0][1]["ids"] == [1, 2, 3, 4]
    assert told[1][1] == answer
    assert len(engine.started) == 1
    problem(await post(n=2), 422, "invalid_request")
    headers["idempotency-key"] = "k" * 257
    assert "256" in problem(await post(), 400, "invalid_request")


# -- weights, health, metrics ---------------------------------------------------------------------


async def test_weights_are_switched_one_update_at_a_time(serve: Serve):
    engine, client = await serve(status_s=0.05)
    body = {"path": "/w", "version": 4, "policy": "requeue"}
    engine.load_gate.clear()
    update = asyncio.create_task(client.post("/weights", json=body))
    await engine.until(lambda: engine.loads)
    problem(await client.post("/weights", json=body), 429, "overloaded")
    asked = engine.stats_calls
    assert (await client.get("/health")).json()["status"] == "updating"
    assert (await client.get("/weights")).json()["updating"] is True
    assert engine.stats_calls == asked, "an engine that loads is left alone"
    engine.load_gate.set()
    answer = (await update).json()
    assert (answer["version"], answer["updates"], answer["updating"]) == (4, 1, False)
    assert (await client.get("/weights")).json() == answer
    assert answer["last_update_pause_s"] == 0.25
    assert engine.loads == [("/w", 4, "requeue")]
    engine.refusal = UserError("weights /w: no such directory")
    assert "/w" in problem(await client.post("/weights", json=body), 422, "user_error")


async def test_an_update_outlives_its_caller(serve: Serve):
    engine, client = await serve()
    engine.load_gate.clear()
    update = asyncio.create_task(client.post("/weights", json={"path": "/w", "version": 1}))
    await engine.until(lambda: engine.loads)
    update.cancel()
    engine.load_gate.set()
    await engine.until(lambda: engine.weight_version == 1)


async def test_health_tells_ok_unresponsive_and_closed_apart(serve: Serve):
    engine, client = await serve(status_s=0.3)
    healthy = await client.get("/health")
    assert (healthy.status_code, healthy.json()) == (
        200,
        {
            "status": "ok",
            "weight_version": 0,
            "max_context": 64,
            "running": 0,
            "waiting": 0,
            "restarts": 3,
            "replicas": None,
        },
    )
    engine.stats_gate.clear()
    for _ in range(3):
        response = await client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "unresponsive")
    assert engine.stats_calls == 2, "the open question is joined, not repeated"
    engine.stats_gate.set()
    assert (await client.get("/health")).json()["status"] == "ok"
    engine.stats_error = EngineError(EngineError.CLOSED, "closed")
    assert (await client.get("/health")).json()["status"] == "closed"


async def test_metrics_are_readable_and_complete(serve: Serve):
    engine, client = await serve()
    await client.post("/generate", json=ask())
    await client.get("/secret-path-of-a-client")
    await stream(client, ask())
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert found["headrace_engine_up",] == 1
    assert found["headrace_engine_tokens_sampled_total",] == 12
    assert found["headrace_engine_busy_seconds_total",] == 1.5
    assert found["headrace_engine_restarts_total",] == 3
    labels = (("route", "/generate"), ("status", "200"))
    assert found["headrace_http_requests_total", *labels] == 2
    assert found["headrace_engine_time_to_first_token_seconds_count",] == 1
    assert found["headrace_engine_inter_token_seconds_count",] == 3
    assert found["headrace_engine_queue_seconds_count",] == 2
    assert "secret" not in response.text
    engine.stats_error = EngineError(EngineError.FAILED, "died")
    assert "headrace_engine_up 0.0" in (await client.get("/metrics")).text


def test_every_counter_of_the_engine_has_a_name_outside():
    fields = {field.name for field in msgspec.structs.fields(EngineStats)}
    assert fields - set(ENGINE_METRICS) == set()
    names = [metric.name for metric in ENGINE_METRICS.values()]
    assert len(set(names)) == len(names)
    for metric in ENGINE_METRICS.values():
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name


# -- the documentation ----------------------------------------------------------------------------


async def test_the_documented_commands_work(serve: Serve):
    _, client = await serve()
    commands = re.findall(r"^    (curl .*?)(?=\n\n|\n    curl|\Z)", DOCS, re.DOTALL | re.MULTILINE)
    routes = set()
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        body = words[words.index("-d") + 1] if "-d" in words else None
        url = next(word for word in words if word.startswith("http://"))
        headers = {"content-type": "application/json"} if body else {}
        method, path = "POST" if body else "GET", "/" + url.split("/", 3)[3]
        response = await client.request(method, path, content=body, headers=headers)
        assert response.status_code == 200, (command, response.text)
        routes.add((method, path))
    documented = {
        (method.upper(), path)
        for path, methods in (await client.get("/openapi.json")).json()["paths"].items()
        for method in methods
    }
    assert routes == documented, "one example for each route"


async def test_the_documented_metrics_are_those_that_are_shown(serve: Serve):
    engine, client = await serve()
    replica = {"name": "engine-0", "state": "serving", "last_fault": None}
    replica |= {"version": 2, "sessions": 3, "requests": 4, "restarts": 5}
    engine.more_stats = {"replicas": [replica]}
    assert (await client.get("/health")).json()["replicas"] == [replica]
    text = (await client.get("/metrics")).text
    assert 'headrace_engine_replica_restarts_total{replica="engine-0"} 5.0' in text
    shown = {family.name for family in text_string_to_metric_families(text)}
    shown = {name for name in shown if not name.endswith("_created")}
    shown |= {metric.name.removesuffix("_total") for metric in ENGINE_METRICS.values()}
    documented = set(re.findall(r"`(headrace_\w+?)(?:_total)?`", DOCS))
    assert documented == shown
