"""The gateway without HTTP: sessions, and requests of any API from their arrival to their answers.

It admits requests, and ends them with their session. Which are in flight is kept in `flights`, what
a request's model reads is worked out in `prompts`, how it is answered and recorded in `answering`.
One event loop owns a `Gateway`.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.engine.types import (
    EngineClient,
)
from headrace.gateway.answering import Answering, AnswerOptions
from headrace.gateway.apis import openai_chat
from headrace.gateway.constraints import check as check_constraint
from headrace.gateway.context import ContextManager, ContextPolicy
from headrace.gateway.flights import Flights, repeated
from headrace.gateway.prompts import Mode, render, renderer_for, thinking_budget
from headrace.gateway.request import ClientRequest
from headrace.gateway.sessions import (
    Credentials,
    Session,
    Sessions,
    noting_limits,
)
from headrace.gateway.streams import replay
from headrace.gateway.transcript import Transcript
from headrace.gateway.turn import (
    Answer,
    ApiError,
    Listener,
    Turn,
    convert,
)
from headrace.rollout.types import Call, SessionLimits
from headrace.tokens.messages import Message
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.thinking import (
    ThinkingMode,
)

SHOWN_OF_REPLICAS = ("name", "state", "version", "requests", "restarts", "last_fault")
"""What clients are told of a replica."""


class _Served(NamedTuple):
    """A model that requests can name; `name` is None for the one that learns."""

    name: str | None
    renderer: ChatRenderer
    answering: Answering


class Gateway:
    """Model APIs over an engine, recorded per session.

    Attributes:
        model: name shown to clients. Without further models, requests may name any.
        models: names that requests may send, the one that learns first.
        counters: calls, forks by reason, parse states, finish and error codes, tokens.
    """

    def __init__(
        self,
        engine: EngineClient,
        renderer: ChatRenderer,
        *,
        model: str = "headrace",
        on_call: Callable[[Call], None] | None = None,
        request_timeout_s: float = 60.0,
        default_max_tokens: int = 1024,
        max_running: int = 1024,
        max_running_per_session: int = 64,
        require_key: bool = True,
        mode: Mode = "continue",
        thinking: ThinkingMode | None = None,
        repairs: int = 0,
        context: ContextPolicy | None = None,
        normaliser: Callable[[Message], Message] | None = None,
        models: Mapping[str, tuple[EngineClient, ChatRenderer]] | None = None,
        on_close: Callable[[str], None] | None = None,
        replicas: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
        constrained: bool = False,
    ) -> None:
        """
        Args:
            engine: what generates.
            renderer: the checkpoint's renderer.
            model: name for /v1/models.
            on_call: receives every finished call, in index order within a session, before its
                client is answered. An exception from it fails the request and the call is not
                recorded.
            request_timeout_s: deadline of one generation.
            default_max_tokens: for requests that do not say.
            max_running: most requests in flight; more are answered with 429.
            max_running_per_session: the same within one session.
            require_key: when False, a request without a session's key is answered in a session of
                its own that ends with it (a plain model server).
            mode: see `Mode`.
            thinking: what stays of earlier thinking; None is the template's default.
            repairs: how often the model is told, as a tool result, that its call cannot be read,
                and answers again before its client sees it. Not while streaming.
            context: manages the context of agents that do not do so themselves.
            normaliser: what counts of a message for matching, see `history.ignore_lines`.
            models: further ones by name, each with its engine and renderer. Their calls are
                recorded with the name and never mixed with those of the model that learns;
                thinking modes, repairs and context management are for that one alone.
            on_close: told the id of every session that has ended.
            replicas: says what each replica of the engine is doing, where there are several.
            constrained: the engine follows grammars: forced tool calls and JSON schemas are kept.
                Else they are refused.

        Raises:
            ValueError: a further model has the name of the one that learns.
        """
        if models and model in models:
            raise ValueError(f"two models are named {model!r}")
        self.model = model
        self.counters: Counter[str] = Counter()
        self._engine = engine
        options = AnswerOptions(request_timeout_s, default_max_tokens, mode, repairs)
        self._answering = Answering(engine, renderer, options, self.counters, on_call)
        self._policy = _Served(None, renderer, self._answering)
        self._others: dict[str, _Served] = {}
        for name, (its_engine, its_renderer) in (models or {}).items():
            plain = AnswerOptions(request_timeout_s, default_max_tokens, "continue", 0)
            answering = Answering(
                its_engine, its_renderer, plain, self.counters, on_call, model=name
            )
            self._others[name] = _Served(name, its_renderer, answering)
        self.models = (model, *self._others)
        self._on_close = on_close
        self._replicas = replicas
        self._constrained = constrained
        self._flights = Flights(max_running)
        self._max_running_per_session = max_running_per_session
        self._require_key = require_key
        self._thinking = thinking
        self._context = context
        self._normaliser = normaliser
        self._sessions = Sessions()
        self._anonymous = 0

    @property
    def weight_version(self) -> int:
        """Newest weights every engine has."""
        return self._engine.weight_version

    def replicas(self) -> list[dict[str, Any]] | None:
        """What clients may know of each replica of the engine; None if it has none."""
        if self._replicas is None:
            return None
        return [{name: one[name] for name in SHOWN_OF_REPLICAS} for one in self._replicas()]

    # ------------------------------------------------------------------ sessions

    def open_session(
        self,
        session_id: str,
        *,
        limits: SessionLimits | None = None,
        max_calls: int = 256,
        lifetime_s: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Open a session and return its key.

        Args:
            session_id: unique among open sessions.
            limits: what it may use; None is `max_calls` and `lifetime_s` alone.
            max_calls: calls it may make.
            lifetime_s: seconds until its key stops working; None for no limit.
            seed: makes the sampling seeds of its calls, in order, a function of this number;
                None leaves them to the engine.

        Raises:
            ValueError: the id is open already.
        """
        concurrent = self._max_running_per_session
        if limits is None:
            limits = SessionLimits(calls=max_calls, wall_s=lifetime_s, concurrent=concurrent)
        return self._sessions.add(self._new_session(session_id, limits, seed))

    def _new_session(self, session_id: str, limits: SessionLimits, seed: int | None) -> Session:
        manager = None if self._context is None else ContextManager(self._context)
        session = Session(session_id, limits, seed=seed, context=manager)
        session.history.normaliser = self._normaliser
        return session

    def calls(self, session_id: str) -> tuple[Call, ...]:
        """Calls an open session has recorded, in index order.

        Raises:
            KeyError: no such open session.
        """
        return tuple(self._sessions.get(session_id).calls)

    def exceeded(self, session_id: str) -> str | None:
        """Which limit refused the last request to the model that learns, as an error code; None
        when that request was let through, or the session is not open.
        """
        try:
            session = self._sessions.get(session_id)
        except KeyError:
            return None
        return session.exceeded

    def refused(self, session_id: str) -> str | None:
        """What refused the last request to the model that learns, limit or not, as an error code;
        None likewise.
        """
        try:
            return self._sessions.get(session_id).refused
        except KeyError:
            return None

    async def close_session(self, session_id: str) -> tuple[Call, ...]:
        """End a session: its key stops working, requests in flight are aborted and recorded.

        Returns:
            All its calls, in index order; () when it is not open.
        """
        session = self._sessions.remove(session_id)
        if session is None:
            return ()
        await self._flights.drain(session.all_running)
        if self._on_close is not None:
            self._on_close(session_id)
        return tuple(session.calls)

    async def close(self) -> None:
        """Close every session and end requests that belong to none."""
        await asyncio.gather(*(self.close_session(name) for name in self._sessions.ids))
        await self._flights.drain(self._flights.running)

    # ------------------------------------------------------------------ requests

    async def chat(
        self,
        key: str | None,
        body: openai_chat.ChatRequest | dict[str, Any],
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """`ask` in the terms of OpenAI's chat completions: body in, body out.

        Raises:
            ApiError: see `ask`.
        """
        credentials = Credentials(api_key=key)
        with self._counting_errors():
            self.admit(credentials)
            request = convert(body, openai_chat.ChatRequest) if isinstance(body, dict) else body
            turn = openai_chat.read(request)
        answers = await self.ask(credentials, turn, idempotency_key=idempotency_key)
        return openai_chat.write(answers, self.shown(turn.model))

    async def ask(
        self,
        credentials: Credentials,
        turn: Turn,
        *,
        idempotency_key: str | None = None,
        listener: Listener | None = None,
    ) -> list[Answer]:
        """Answer one request.

        Once begun, a request runs to its end and is recorded even if the caller stops waiting,
        except that nobody else can want an answer that is streamed without an idempotency key: it
        is aborted, and what was sampled is recorded.

        Args:
            credentials: where the client showed its session's key.
            turn: the request.
            idempotency_key: repeating a key in a session gives the first answers again, also while
                they are still being generated; one key generates once.
            listener: told of the answers as they come.

        Raises:
            ApiError: everything a client can cause, and engines that refuse.
        """
        with self._counting_errors():
            session = self._find(credentials)
            # What a judge is refused is not the agent's doing.
            watched = None if turn.model in self._others else session
            with noting_limits(watched):
                task, ours = self._begin(session, turn, idempotency_key, listener)
            try:
                with noting_limits(watched):
                    answers = await asyncio.shield(task)
            except asyncio.CancelledError:
                if listener is not None and idempotency_key is None and not task.done():
                    await asyncio.shield(self._flights.abort(task))
                raise
            if listener is not None and not ours:
                replay(answers, listener)
            return answers

    @contextlib.contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self.counters[f"error.{error.code}"] += 1
            raise

    def conversation(self, credentials: Credentials, response_id: str) -> list[dict[str, Any]]:
        """Messages up to and with an earlier response of the session, in chat form.

        Raises:
            ApiError: 401 or 404.
        """
        with self._counting_errors():
            return self._find(credentials).conversation(response_id)

    def transcript(self, credentials: Credentials) -> Transcript:
        """Where bodies of the session that the credentials name are read; a new one without any."""
        try:
            session = self.admit(credentials)
        except ApiError:
            session = None  # refused, and counted, when it asks
        return Transcript() if session is None else session.transcript

    def count(self, credentials: Credentials, turn: Turn) -> int:
        """Tokens of the prompt that a turn would have, were it rendered afresh.

        Raises:
            ApiError: 400 or 401.
        """
        with self._counting_errors():
            self.admit(credentials)
            served = self._served(turn.model)
            return len(render(self._renderer_for(served, turn), turn.messages, turn))

    def shown(self, name: str) -> str:
        """The name that an answer bears to a request for the model `name`."""
        return name if name in self._others else self.model

    def _served(self, name: str) -> "_Served":
        """The model that a request names; without further models, any name is the one's.

        Raises:
            ApiError: 404, no such model.
        """
        if not self._others or name in ("", self.model):
            return self._policy
        served = self._others.get(name)
        if served is None:
            raise ApiError(
                404,
                "model_not_found",
                f"model {name!r} is not served here; use one of {', '.join(self.models)}",
                param="model",
            )
        return served

    def admit(self, credentials: Credentials) -> Session | None:
        """The session that the credentials name; None for a request without one, if that is
        allowed.

        Raises:
            ApiError: 401.
        """
        session = self._sessions.find(credentials)
        if session is None and self._require_key:
            raise ApiError(
                401, "invalid_api_key", "the API key belongs to no open session; open one"
            )
        return session

    def _find(self, credentials: Credentials) -> Session:
        """The session that the credentials name, or one for this request."""
        session = self.admit(credentials)
        if session is not None:
            return session
        self._anonymous += 1
        limits = SessionLimits(concurrent=self._max_running_per_session)
        session = self._new_session(f"anonymous-{self._anonymous}", limits, None)
        session.anonymous = True
        return session

    def _begin(
        self,
        session: Session,
        turn: Turn,
        idempotency_key: str | None,
        listener: Listener | None,
    ) -> tuple[asyncio.Task[list[Answer]], bool]:
        """The task that answers, and whether it is this request's own."""
        served = self._served(turn.model)
        renderer = self._renderer_for(served, turn)
        check_constraint(turn, renderer, followed=self._constrained)
        session = session.of(served.name)
        known, fingerprint = repeated(session, turn, idempotency_key)
        if known is not None:
            self.counters["repeated"] += 1
            return known, False
        self._flights.admit(session, turn)
        request = ClientRequest(
            session,
            turn,
            renderer,
            thinking_budget(served.renderer, turn),
            idempotency_key,
            session.next_serial(),
            session.calls_begun,
            listener,
        )
        return self._flights.begin(request, served.answering, fingerprint), True

    def _renderer_for(self, served: "_Served", turn: Turn) -> ChatRenderer:
        """See `renderer_for`; thinking modes are for the model that learns alone."""
        return renderer_for(served.renderer, turn, self._thinking if served.name is None else None)
