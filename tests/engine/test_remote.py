"""A remote headrace engine as a client: requests, streams, weights and errors on the wire."""

import asyncio
import json
import math

import httpx
import pytest
from engine_harness import ask

from headrace.engine.servers.remote import HeadraceEngine
from headrace.engine.types import EngineError, Progress
from headrace.errors import UserError
from headrace.rollout.types import FinishReason, Span

ANSWER = {
    "id": "x",
    "outputs": [
        {
            "index": 0,
            "ids": [4, 5, 6],
            "logprobs": [-0.5, -0.25, -1.0],
            "raw_logprobs": [-0.5, -0.75, -2.0],
            "spans": [
                {
                    "start": 0,
                    "end": 2,
                    "weight_version": 1,
                    "engine_id": "e",
                    "newest_version": 3,
                },
                {"start": 2, "end": 3, "weight_version": 3, "engine_id": "e"},
            ],
            "finish_reason": "deadline",
            "stop": None,
            "alternatives": [[[4, -0.5]], [[5, -0.75]], [[6, None]]],
            "reused_tokens": 7,
            "drafted_tokens": 2,
            "accepted_tokens": 1,
            "preemptions": 1,
            "queue_s": 0.5,
            "total_s": 1.5,
        }
    ],
    "prompt_logprobs": [None, -0.5],
    "prompt_alternatives": None,
}


class Server:
    """Answers as `headrace engine` does; keeps the bodies it was sent."""

    def __init__(self, **answers):
        self.bodies = []
        self.answers = {
            "/health": (200, {"status": "ok", "weight_version": 3, "running": 1, "waiting": 2}),
            "/generate": (200, ANSWER),
            "/weights": (200, {"version": 9, "updates": 1}),
            "/abort": (200, {"id": "x", "aborted": True}),
            **{f"/{name}": answer for name, answer in answers.items()},
        }

    def handle(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        self.bodies.append(json.loads(request.content or b"null"))
        status, body = self.answers[request.url.path]
        if isinstance(body, bytes):
            return httpx.Response(status, content=body)
        return httpx.Response(status, json=body)

    async def engine(self):
        transport = httpx.MockTransport(self.handle)
        engine = HeadraceEngine("http://far", "secret", max_context=64, transport=transport)
        await engine.start()
        return engine


async def test_a_request_and_its_answer():
    server = Server()
    engine = await server.engine()
    assert (engine.weight_version, engine.max_context) == (3, 64)
    request = ask("mine", (1, 2), temperature=1.0, seed=3, logit_bias={4: 1.0}, session="s")
    result = await engine.generate(request)
    body = server.bodies[-1]
    assert len(body.pop("id")) == 32
    assert body.pop("sampling") == {
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), 0.0),
        **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
        **dict.fromkeys(("top_k", "min_tokens", "logprobs"), 0),
        "max_tokens": 8,
        "seed": 3,
        "stop_ids": [],
        "stop": [],
        "logit_bias": {"4": 1.0},
        "prompt_logprobs": None,
    }
    assert body == {
        "prompt_ids": [1, 2],
        "stream": False,
        "session": "s",
        "priority": 0,
        "timeout_s": 60.0,
    }
    assert result.id == "mine"
    assert result.spans == (
        Span((4, 5), (-0.5, -0.25), 1, "e", 3),
        Span((6,), (-1.0,), 3, "e"),
    )
    assert result.finish_reason is FinishReason.DEADLINE
    assert result.raw_logprobs == (-0.5, -0.75, -2.0)
    assert result.alternatives == (((4, -0.5),), ((5, -0.75),), ((6, -math.inf),))
    assert math.isnan(result.prompt_logprobs[0])
    assert (result.reused_tokens, result.drafted_tokens, result.accepted_tokens) == (7, 2, 1)
    assert (result.preemptions, result.queue_s) == (1, 0.5)
    counted = await engine.stats()
    assert (counted["tokens_sampled"], counted["waiting"]) == (3, 2)
    await engine.close()


async def test_a_cancellation_that_comes_as_the_server_aborts_is_kept(monkeypatch):
    engine = await Server().engine()

    async def abort_and_cancel(key):
        ending.cancel()

    monkeypatch.setattr(engine, "_abort_at_server", abort_and_cancel)
    ending = asyncio.create_task(engine._give_up("key"))
    with pytest.raises(asyncio.CancelledError):
        await ending
    await engine.close()


def stream(*events):
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events).encode()


def token(ids, version):
    scores = [-0.5] * len(ids)
    return {
        "index": 0,
        "ids": ids,
        "logprobs": scores,
        "raw_logprobs": scores,
        "weight_version": version,
    }


async def test_a_stream():
    events = [
        ("token", token([1, 2], 1)),
        ("restart", {"index": 0}),
        ("token", token([4, 5, 6], 3)),
    ]
    server = Server(generate=(200, b": waiting\n\n" + stream(*events, ("done", ANSWER))))
    engine = await server.engine()
    seen: list[Progress] = []
    result = await engine.generate(ask("mine", (1, 2)), seen.append)
    assert server.bodies[-1]["stream"] is True
    assert [(part.id, part.ids, part.weight_version, part.restart) for part in seen] == [
        ("mine", (1, 2), 1, False),
        ("mine", (), 3, True),
        ("mine", (4, 5, 6), 3, False),
    ]
    assert sum(len(span.ids) for span in result.spans) == 3
    await engine.close()


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (
            stream(("error", {"error": {"code": "overloaded", "message": "later"}})),
            EngineError.OVERLOADED,
            "later",
        ),
        (stream(("token", token([1], 0))), EngineError.FAILED, "without an answer"),
        (b"event: done\ndata: {\n\n", EngineError.FAILED, "unexpected answer"),
    ],
)
async def test_a_stream_that_ends_badly(content, code, words):
    engine = await Server(generate=(200, content)).engine()
    with pytest.raises(EngineError, match=words) as caught:
        await engine.generate(ask("mine", (1, 2)), lambda progress: None)
    assert caught.value.code == code
    await engine.close()


@pytest.mark.parametrize("code", [EngineError.TOO_LONG, EngineError.CLOSED, EngineError.FAILED])
async def test_codes_pass_through(code):
    answer = (422, {"error": {"code": code, "message": "no"}})
    engine = await Server(generate=answer).engine()
    with pytest.raises(EngineError) as caught:
        await engine.generate(ask("mine", (1, 2)))
    assert (caught.value.code, str(caught.value)) == (code, "no")
    await engine.close()


async def test_weights():
    server = Server()
    engine = await server.engine()
    await engine.load_weights("/there", 9, "requeue")
    assert server.bodies[-1] == {"path": "/there", "version": 9, "policy": "requeue"}
    assert engine.weight_version == 9
    server.answers["/weights"] = (422, {"error": {"code": "user_error", "message": "gone"}})
    with pytest.raises(UserError, match="gone"):
        await engine.load_weights("/there", 10)
    assert engine.weight_version == 9
    await engine.close()
