"""Open sessions: who they are, what they may still do, and what they have done.

A session is one rollout. Its key is a secret that names it; a client shows the key in whichever
place it can set. No I/O and no tokens here; one event loop owns all of it.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.gateway.context import ContextManager
from headrace.gateway.history import History
from headrace.gateway.transcript import Transcript
from headrace.gateway.turn import Answer, ApiError, invalid
from headrace.rollout.types import LIMIT_WORDS, Call, SessionLimits

KEPT_RESPONSES = 256
"""Responses of a session that `previous_response_id` can still name."""


class Credentials(NamedTuple):
    """Where a client may show a session's key, the most explicit place first.

    Attributes:
        path: `/s/KEY/v1/...`.
        header: `X-Headrace-Session`.
        metadata: `metadata.session` or `metadata.user_id` of the body.
        api_key: bearer token or `x-api-key`.
    """

    path: str | None = None
    header: str | None = None
    metadata: str | None = None
    api_key: str | None = None


class Keyed(NamedTuple):
    """What an idempotency key stands for."""

    fingerprint: bytes
    task: "asyncio.Task[list[Answer]]"


class Session:
    """One open session.

    Args:
        session_id: unique among open sessions.
        limits: see there.
        seed: makes the sampling seeds of its calls a function of this number; None leaves them to
            the engine.
        context: folds or discards old messages for agents that do not.
    """

    def __init__(
        self,
        session_id: str,
        limits: SessionLimits,
        *,
        seed: int | None = None,
        context: ContextManager | None = None,
    ) -> None:
        self.id = session_id
        self.limits = limits
        self.seed = seed
        self.context = context
        self.expires_at = None if limits.wall_s is None else time.monotonic() + limits.wall_s
        self.closed = False
        self.anonymous = False
        """Of one request by somebody who shows no session's key."""
        self.history = History()
        self.calls: list[Call] = []
        """Recorded, of all models, in index order."""
        self.transcript = Transcript()
        self.sampled_tokens = 0
        self.exceeded: str | None = None
        """Code of the limit that refused the last request; None after one that was let through."""
        self.refused: str | None = None
        """Code of whatever refused the last request, limits included; None likewise."""
        self.beside: dict[str, Session] = {}
        """What its other models do, by their names."""
        self.by_key: dict[str, Keyed] = {}
        self.running: dict[asyncio.Task[Any], list[str]] = {}
        """Its requests in flight and their engine request ids."""
        self.responses: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        """Conversations, in chat form, by response id."""
        self._serial = itertools.count()

    def of(self, model: str | None) -> "Session":
        """The session as the named model sees it: one key, one numbering, one clock, but a history,
        a context and a budget of its own. None is the model that learns.
        """
        if model is None:
            return self
        if model not in self.beside:
            other = Session(self.id, self.limits, seed=self.seed)
            other.history.normaliser = self.history.normaliser
            other.expires_at, other.calls, other.by_key = self.expires_at, self.calls, self.by_key
            other.responses, other._serial = self.responses, self._serial
            self.beside[model] = other
        return self.beside[model]

    def end(self) -> None:
        """It is closed: nothing may begin any more."""
        for one in (self, *self.beside.values()):
            one.closed = True

    @property
    def all_running(self) -> dict[asyncio.Task[Any], list[str]]:
        """`running` of all its models."""
        found = dict(self.running)
        for other in self.beside.values():
            found |= other.running
        return found

    @property
    def calls_begun(self) -> int:
        """Calls recorded and in flight."""
        return len(self.history.calls) + sum(len(ids) for ids in self.running.values())

    def next_serial(self) -> int:
        """A number that no other request of the session has."""
        return next(self._serial)

    def admit(self, n: int) -> None:
        """Check that n more calls may begin.

        Raises:
            ApiError: a limit is reached.
        """
        limits = self.limits
        if self.calls_begun + n > limits.calls:
            raise invalid(
                f"session {self.id} may make {limits.calls} calls, has made {self.calls_begun} and "
                f"{n} are asked for",
                code="session_call_limit",
            )
        if self.tokens_left() == 0:
            raise invalid(
                f"session {self.id} may sample {limits.sampled_tokens} tokens and has sampled them",
                code="session_token_limit",
            )
        if sum(len(ids) for ids in self.running.values()) + n > limits.concurrent:
            raise ApiError(
                429,
                "overloaded",
                f"session {self.id} has too many requests in flight; at most {limits.concurrent}",
                retry_after_s=1.0,
            )

    def tokens_left(self) -> int | None:
        """Tokens it may still sample; None without a limit."""
        if self.limits.sampled_tokens is None:
            return None
        return max(0, self.limits.sampled_tokens - self.sampled_tokens)

    def remember(self, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep a conversation for `previous_response_id`."""
        self.responses[response_id] = messages
        while len(self.responses) > KEPT_RESPONSES:
            self.responses.popitem(last=False)

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """What `remember` kept.

        Raises:
            ApiError: 404, nothing is kept under that id.
        """
        found = self.responses.get(response_id)
        if found is None:
            raise ApiError(
                404,
                "previous_response_not_found",
                f"previous_response_id {response_id!r} is no response of this session, or one of "
                f"more than {KEPT_RESPONSES} ago; send the whole conversation as input",
                param="previous_response_id",
            )
        return found


class Sessions:
    """All open sessions, by key and by id."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._keys: dict[str, str] = {}

    @property
    def ids(self) -> list[str]:
        """Of those open, oldest first."""
        return list(self._keys)

    def add(self, session: Session) -> str:
        """Open a session; returns its key.

        Raises:
            ValueError: the id is open already.
        """
        if session.id in self._keys:
            raise ValueError(f"session {session.id!r} is open already")
        key = secrets.token_urlsafe(24)
        self._by_key[key] = session
        self._keys[session.id] = key
        return key

    def get(self, session_id: str) -> Session:
        """An open session.

        Raises:
            KeyError: it is not open.
        """
        return self._by_key[self._keys[session_id]]

    def remove(self, session_id: str) -> Session | None:
        """End a session: its key stops working."""
        key = self._keys.pop(session_id, None)
        if key is None:
            return None
        session = self._by_key.pop(key)
        session.end()
        return session

    def find(self, credentials: Credentials) -> Session | None:
        """The session whose key is shown; None when none is.

        Raises:
            ApiError: 401, its time is up, or keys of two sessions are shown.
        """
        # Looked up by the secret itself: guessing it by timing would mean guessing a hash.
        found = [self._by_key[key] for key in credentials if key in self._by_key]
        if not found:
            return None
        session = found[0]
        if any(other is not session for other in found):
            raise ApiError(
                401, "ambiguous_session", "the request shows keys of two sessions; send one"
            )
        if session.expires_at is not None and time.monotonic() >= session.expires_at:
            session.exceeded = session.refused = "session_expired"
            raise ApiError(401, "session_expired", f"session {session.id} reached its time limit")
        return session


@contextlib.contextmanager
def noting_limits(session: Session | None) -> Iterator[None]:
    """The session knows what refused the last request of the model that learns, if anything did,
    and whether that was a limit."""
    code = None
    try:
        yield
    except ApiError as error:
        code = error.code
        raise
    finally:
        if session is not None:
            session.refused = code
            session.exceeded = code if code in LIMIT_WORDS else None
