"""An engine that answers at once: over HTTP as OpenAI's chat completions and as headrace's engine.

As little work as a server can have: bodies are counted and forgotten, answers are bytes that were
made beforehand.
"""

import asyncio
import json
import os
import time
from typing import Any

import httptools
import uvloop
from agent_text import ARGUMENTS, CHAT_PATH, CONTENT, THOUGHT
from lines import options


def http_answer(body: dict[str, Any]) -> bytes:
    """A whole response."""
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def chat_answer(tokens: int) -> dict[str, Any]:
    """As OpenAI's API has it."""
    function = {"name": "bash", "arguments": ARGUMENTS}
    call = {"id": "call_0_0", "type": "function", "function": function}
    message = {
        "role": "assistant",
        "content": CONTENT,
        "reasoning_content": THOUGHT,
        "tool_calls": [call],
    }
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "headrace",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens},
    }


def generate_answer(ids: list[int]) -> dict[str, Any]:
    """As headrace's engine has it."""
    count = len(ids)
    span = {"start": 0, "end": count, "weight_version": 0, "engine_id": "stub"}
    output = {
        "index": 0,
        "ids": ids,
        "logprobs": [-0.5] * count,
        "raw_logprobs": [-0.5] * count,
        "spans": [span],
        "finish_reason": "stop",
        "stop": None,
        "alternatives": [],
        "reused_tokens": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        "queue_s": 0.0,
        "total_s": 0.0,
    }
    return {"id": "0", "outputs": [output], "prompt_logprobs": None, "prompt_alternatives": None}


class Stub(asyncio.Protocol):
    """One connection."""

    answers: dict[bytes, bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_message_complete(self) -> None:
        self._transport.write(self.answers[self._path])


async def main() -> None:
    given = options()
    os.sched_setaffinity(0, given["cores"])
    ids = given["ids"]
    Stub.answers = {
        CHAT_PATH.encode(): http_answer(chat_answer(len(ids))),
        b"/generate": http_answer(generate_answer(ids)),
        b"/health": http_answer({"status": "ok", "weight_version": 0, "max_context": 1 << 20}),
        b"/abort": http_answer({"id": "0"}),
    }
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=2048)
    port = server.sockets[0].getsockname()[1]
    os.write(given["answers"], json.dumps({"port": port}).encode() + b"\n")
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
