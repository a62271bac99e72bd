"""How a task's agent talks to its model: one chat completion at a time over shared connections.

It knows the OpenAI client and an endpoint, and nothing of what the conversation is about. One pool
of connections per endpoint address serves every rollout of the process; the session key travels in
the headers of each request.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from openai import (
    DEFAULT_CONNECTION_LIMITS,
    AsyncOpenAI,
    BadRequestError,
    DefaultAsyncHttpxClient,
)

from headrace.rollout.reasons import FailureReason
from headrace.tasks.types import Endpoint

_MAX_CLIENTS = 16
_IDLE_CONNECTIONS = 32
"""Kept of each client. Every request looks at all of them, so many cost more than they save."""


class AgentFailure(Exception):
    """The agent's own fault: it ran out of turns or of context; `reason` says of which."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClientPool:
    """One OpenAI client per endpoint address, shared by all rollouts.

    Making a client per rollout costs more than the rollout's own work, so sessions differ only in
    the Authorization header.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._clients: dict[str, AsyncOpenAI] = {}

    def get(self, base_url: str) -> AsyncOpenAI:
        """The client of this address, made on first use.

        Raises:
            RuntimeError: more addresses than any sensible run has.
        """
        client = self._clients.get(base_url)
        if client is None:
            if len(self._clients) >= _MAX_CLIENTS:
                raise RuntimeError(f"agents: more than {_MAX_CLIENTS} endpoint addresses")
            # As many requests at once as there are rollouts; the runner bounds those.
            limits = type(DEFAULT_CONNECTION_LIMITS)(
                max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS
            )
            client = AsyncOpenAI(
                base_url=base_url,
                api_key="set-per-request",
                max_retries=self._retries,
                http_client=DefaultAsyncHttpxClient(limits=limits),
            )
            self._clients[base_url] = client
        return client

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()


async def complete(
    client: AsyncOpenAI,
    endpoint: Endpoint,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
) -> Any:
    """One chat completion; every attempt of the client's retries carries the same key.

    Returns:
        The assistant message.

    Raises:
        AgentFailure: the conversation no longer fits the model.
        openai.APIError: the endpoint failed and retrying did not help.
    """
    # Sent as it is: the client would walk through every message of the history, each time, to see
    # what it is made of, which costs more than the rest of the call.
    said = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
    try:
        completion = await client.chat.completions.create(
            model=endpoint.model,
            messages=[],
            extra_body=said,
            temperature=endpoint.temperature,
            top_p=endpoint.top_p,
            max_tokens=endpoint.max_tokens,
            timeout=endpoint.timeout_s,
            extra_headers={
                "Authorization": f"Bearer {endpoint.api_key}",
                "Idempotency-Key": uuid.uuid4().hex,
            },
        )
    except BadRequestError as error:
        if error.code == "context_length_exceeded" or "context length" in str(error):
            raise AgentFailure(
                FailureReason.SESSION_CONTEXT, "the conversation no longer fits the model's context"
            ) from error
        raise
    return completion.choices[0].message
