"""How a task's agent talks to its model: one chat completion at a time over shared connections.

It knows OpenAI's chat completions and an endpoint, and nothing of what the conversation is about.
OpenAI's own client would do; beside a small model its work per call is most of what a rollout
costs, so this one sends what it is given and reads what an agent looks at.
"""

import asyncio
import json
import random
import uuid
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from headrace.http.client import HttpClient
from headrace.http.exchange import ExchangePool, Response
from headrace.rollout.failures.reasons import FailureReason
from headrace.tasks.types import Endpoint, EndpointError

_MAX_CLIENTS = 16
_MOST_CONNECTIONS = 1 << 16
"""As many requests at once as there are rollouts; the runner bounds those."""
_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_AGAIN = (408, 409, 429)
"""Refusals that may not last, beside those of 500 and above."""
_LONGEST_MESSAGE = 500


class AgentFailure(Exception):
    """The agent's own fault: it ran out of turns or of context; `reason` says of which."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CalledFunction(msgspec.Struct):
    """Which tool, and its arguments as the model wrote them."""

    name: str = ""
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """One tool call of an assistant message."""

    id: str
    function: CalledFunction
    type: str = "function"


class AssistantMessage(msgspec.Struct):
    """What the model said."""

    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    def said(self) -> dict[str, Any]:
        """The message as it goes into the history of the next request."""
        calls = msgspec.to_builtins(self.tool_calls)
        return {"role": "assistant", "content": self.content, "tool_calls": calls}


class _Choice(msgspec.Struct):
    message: AssistantMessage


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class ModelClient:
    """Chat completions of one endpoint address, for all its sessions.

    Args:
        base_url: of the API, e.g. "http://127.0.0.1:8000/v1".
        retries: repetitions of a request that failed and may succeed.
    """

    def __init__(self, base_url: str, retries: int) -> None:
        url = httpx.URL(base_url)
        self._retries = retries
        self._path = url.raw_path.decode("ascii").rstrip("/") + "/chat/completions"
        self._pool: ExchangePool | None = None
        self._client: httpx.AsyncClient | None = None
        if url.scheme == "http" and not url.userinfo:
            self._pool = ExchangePool(
                url.host,
                url.port or 80,
                headers={"Content-Type": "application/json"},
                connections=_MOST_CONNECTIONS,
                connect_timeout_s=_CONNECT_S,
            )
        else:
            self._client = HttpClient(
                base_url=url.copy_with(raw_path=b"/"),
                headers={"Content-Type": "application/json"},
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            )

    async def complete(
        self,
        endpoint: Endpoint,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> AssistantMessage:
        """One chat completion; every attempt carries the same key.

        Raises:
            AgentFailure: the conversation no longer fits the model.
            EndpointError: the endpoint failed and retrying did not help.
        """
        request = {
            "model": endpoint.model,
            "messages": list(messages),
            "temperature": endpoint.temperature,
            "top_p": endpoint.top_p,
            "max_tokens": endpoint.max_tokens,
        }
        # Of the standard library, which can spell half of a surrogate pair in either direction.
        body = json.dumps(request | ({"tools": list(tools)} if tools else {})).encode()
        headers = {
            "Authorization": f"Bearer {endpoint.api_key}",
            "Idempotency-Key": uuid.uuid4().hex,
        }
        failure = EndpointError("it was never asked")
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(_FIRST_PAUSE_S * 2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
                await asyncio.sleep(pause * random.uniform(0.75, 1.0))
            try:
                answer = await self._post(body, headers, endpoint.timeout_s)
            except httpx.HTTPError as error:
                timed_out = isinstance(error, httpx.TimeoutException)
                failure = EndpointError(f"{type(error).__name__}: {error}", timed_out=timed_out)
                continue
            if 200 <= answer.status < 300:
                return _read(answer.content)
            failure = _refusal(answer)
            if answer.status not in _AGAIN and answer.status < 500:
                break
        raise failure

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
        if self._pool is not None:
            await self._pool.close()
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, body: bytes, headers: dict[str, str], timeout_s: float) -> Response:
        if self._pool is not None:
            return await self._pool.post(self._path, body, headers=headers, timeout_s=timeout_s)
        assert self._client is not None
        found = await self._client.post(
            self._path, content=body, headers=headers, timeout=timeout_s
        )
        return Response(found.status_code, found.content)


class ClientPool:
    """One client per endpoint address, shared by all rollouts: sessions differ in a header only."""

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._clients: dict[str, ModelClient] = {}

    def get(self, base_url: str) -> ModelClient:
        """The client of this address, made on first use.

        Raises:
            RuntimeError: more addresses than any sensible run has.
        """
        client = self._clients.get(base_url)
        if client is None:
            if len(self._clients) >= _MAX_CLIENTS:
                raise RuntimeError(f"agents: more than {_MAX_CLIENTS} endpoint addresses")
            client = self._clients[base_url] = ModelClient(base_url, self._retries)
        return client

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()


def _read(content: bytes) -> AssistantMessage:
    try:
        completion = msgspec.convert(json.loads(content), _Completion)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"the answer is no chat completion: {error}") from error
    if not completion.choices:
        raise EndpointError("the answer is a chat completion without choices")
    return completion.choices[0].message


def _refusal(answer: Response) -> EndpointError:
    """What the endpoint said instead of answering.

    Raises:
        AgentFailure: that the conversation has grown too long.
    """
    code, message = None, answer.content.decode("utf-8", "replace")
    try:
        said = json.loads(answer.content)["error"]
        code, message = said.get("code"), str(said["message"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass  # not an API's error; its words are all there is
    if answer.status == 400 and (code == "context_length_exceeded" or "context length" in message):
        raise AgentFailure(
            FailureReason.SESSION_CONTEXT, "the conversation no longer fits the model's context"
        )
    return EndpointError(f"{answer.status}: {message[:_LONGEST_MESSAGE]}", status=answer.status)
