"""Generated requests against the document, and bytes that are no requests at all."""

import asyncio
import contextlib
import json
import random
import re

import httpx
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from headrace.engine.serving.app import create_engine_app
from headrace.engine.serving.doorway import Limits
from headrace.http.server import ConnectionLimits, HttpServer

KEY = "fuzz"
BYTES_SEED = 7
ENGINE = FakeEngine()
schema = schemathesis.openapi.from_asgi(
    "/openapi.json",
    create_engine_app(ENGINE, api_key=KEY),
    headers={"authorization": f"Bearer {KEY}"},
)


@schema.auth()
class Bearer:
    """Puts the key on every request, and lets the check take it off again."""

    def get(self, case: schemathesis.Case, context: schemathesis.AuthContext) -> str:
        return KEY

    def set(self, case: schemathesis.Case, data: str, context: schemathesis.AuthContext) -> None:
        case.headers["Authorization"] = f"Bearer {data}"


@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_answers_are_those_of_the_document(case: schemathesis.Case):
    response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
    assert case.meta is not None
    if case.meta.generation.mode.is_positive and response.status_code >= 400:
        # What a schema cannot say: that 1.0 is no integer here, and what depends on other requests.
        message = response.json()["error"]["message"]
        assert re.search("valid integer|another request|no room in the context", message), message


async def test_bytes_that_are_no_requests_leave_the_server_as_it_was():
    """Random bytes, mutilated requests and connections dropped anywhere."""
    draw = random.Random(BYTES_SEED)
    body = json.dumps({"prompt_ids": [1, 2], "sampling": {"max_tokens": 2}, "stream": True})
    whole = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    engine = FakeEngine()
    server = await HttpServer.start(
        create_engine_app(engine, limits=Limits(body_s=0.2)),
        limits=ConnectionLimits(head_s=0.2, linger_s=0.1),
    )

    def mutilated() -> bytes:
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randrange(20)]
                case 2:
                    data[at:at] = draw.randbytes(draw.randrange(20))
                case _:
                    data += data[at:]
        return bytes(data)

    async def throw(data: bytes, *, read: bool) -> bytes:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        answer = b""
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            if read:
                answer = await asyncio.wait_for(reader.read(100_000), 20)
        writer.close()
        return answer

    try:
        for _ in range(40):
            batch = [
                throw(
                    draw.randbytes(draw.randrange(1, 400)) if draw.random() < 0.3 else mutilated(),
                    read=draw.random() < 0.7,
                )
                for _ in range(10)
            ]
            for answer in await asyncio.gather(*batch):
                assert not answer.startswith(b"HTTP/1.1 5"), answer
        assert (await throw(whole, read=True)).startswith(b"HTTP/1.1 200")
        async with httpx.AsyncClient(base_url=server.url) as client, asyncio.timeout(20):
            await client.get("/health")
            while server.connections > 1:  # all but this one: none is left half open
                await client.get("/health")
            health = (await client.get("/health")).json()
        assert (health["status"], health["running"]) == ("ok", 0)
    finally:
        await server.stop()
