"""Requests between their arrival and their answers: begun once for each key, counted, ended early.

One event loop owns a `Flights`. What a request says and how it is answered is not its business.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.gateway.answering import ENGINE_GRACE_S, Answering
from headrace.gateway.request import ClientRequest
from headrace.gateway.sessions import Keyed, Session
from headrace.gateway.turn import Answer, ApiError, Turn, invalid

Running = Mapping[asyncio.Task[Any], list[str]]
"""Requests in flight and the ids that the engine has for them."""


class Flights:
    """Requests in flight, of all sessions and models.

    Args:
        most: answers in flight; more are refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[asyncio.Task[Any], list[str]] = {}
        self._answering: dict[asyncio.Task[Any], Answering] = {}

    @property
    def running(self) -> Running:
        """All of them."""
        return self._running

    def admit(self, session: Session, turn: Turn) -> None:
        """Refuse what would be too much.

        Raises:
            ApiError: a limit of the session, or 429.
        """
        session.admit(turn.n)
        if sum(map(len, self._running.values())) + turn.n > self._most:
            raise ApiError(
                429, "overloaded", "too many requests in flight; retry later", retry_after_s=1.0
            )

    def begin(
        self, request: ClientRequest, answering: Answering, fingerprint: bytes
    ) -> asyncio.Task[list[Answer]]:
        """The task that answers an admitted request.

        Args:
            fingerprint: of the request, where it has an idempotency key.
        """
        session, key = request.session, request.idempotency_key
        ids = [f"{request.response_id}:{k}:{secrets.token_hex(4)}" for k in range(request.turn.n)]
        task = asyncio.create_task(answering.answer(request, ids), name=ids[0])
        self._running[task] = session.running[task] = ids
        self._answering[task] = answering
        if key is not None:
            session.by_key[key] = Keyed(fingerprint, task)

        def ended(task: asyncio.Task[list[Answer]]) -> None:
            del self._running[task], session.running[task], self._answering[task]
            failed = task.cancelled() or task.exception() is not None
            if failed and key is not None:
                del session.by_key[key]  # nothing was answered, so a retry may try

        task.add_done_callback(ended)
        return task

    async def abort(self, task: asyncio.Task[Any], ids: Sequence[str] | None = None) -> None:
        """End a request early; it ends by itself, with what it has.

        Args:
            ids: its engine request ids; None looks them up.
        """
        answering = self._answering.get(task)
        if answering is not None:
            ids = self._running.get(task, ()) if ids is None else ids
            await asyncio.gather(*(answering.abort(request_id) for request_id in ids))

    async def drain(self, requests: Running) -> None:
        """End some of them; returns when they have ended, by force if they take too long."""
        running = dict(requests)
        if not running:
            return
        await asyncio.gather(*(self.abort(task, ids) for task, ids in running.items()))
        _, late = await asyncio.wait(running, timeout=ENGINE_GRACE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=ENGINE_GRACE_S)


def repeated(
    session: Session, turn: Turn, idempotency_key: str | None
) -> tuple[asyncio.Task[list[Answer]] | None, bytes]:
    """The task that answers an earlier request of this key, if there is one, and the fingerprint.

    Raises:
        ApiError: 400, the key was used for another request.
    """
    if idempotency_key is None:
        return None, b""
    fingerprint = hashlib.blake2b(msgspec.msgpack.encode(turn)).digest()
    known = session.by_key.get(idempotency_key)
    if known is None:
        return None, fingerprint
    if known.fingerprint != fingerprint:
        raise invalid(
            f"Idempotency-Key {idempotency_key!r} was used for another request; send a new key",
            code="idempotency_key_reused",
        )
    return known.task, fingerprint
