"""The gateway without HTTP: sessions, and one chat request from messages to a recorded call.

A call is matched to the session's history by its messages, its prompt extends the tokens held for
the matched call (law L1) or is rendered afresh as a counted fork, and the finished call is handed
to the ledger before the client sees the answer. One event loop owns a `Gateway`; between taking an
index and recording the call there is no await, so indices are gapless.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from headrace.engine.seeds import derive_seed
from headrace.engine.types import (
    EngineClient,
    EngineError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from headrace.gateway.history import ForkReason, History, Node, tools_key
from headrace.gateway.protocol import (
    ApiError,
    ChatRequest,
    ChatTurn,
    check,
    completion_body,
    convert_body,
    invalid,
)
from headrace.rollout.types import Call, FinishReason
from headrace.tokens.messages import Message
from headrace.tokens.renderer import ChatRenderer, ParsedMessage

_ENGINE_GRACE_S = 5.0
"""How much later than its own deadline an engine may answer before it counts as hung."""

_ENGINE_ERRORS = {
    EngineError.INVALID: 400,
    EngineError.TOO_LONG: 400,
    EngineError.OVERLOADED: 429,
    EngineError.CLOSED: 503,
}


class _Keyed(msgspec.Struct, frozen=True):
    """What an idempotency key stands for."""

    fingerprint: bytes
    task: asyncio.Task[dict[str, Any]]


class _Session:
    """One open session."""

    def __init__(
        self, session_id: str, *, max_calls: int, expires_at: float | None, seed: int | None
    ) -> None:
        self.id = session_id
        self.max_calls = max_calls
        self.expires_at = expires_at
        self.seed = seed
        self.closed = False
        self.history = History()
        self.by_key: dict[str, _Keyed] = {}
        self.running: dict[asyncio.Task[dict[str, Any]], str] = {}
        """Its requests in flight and their engine request ids."""

    @property
    def calls_begun(self) -> int:
        return len(self.history.calls) + len(self.running)


class _Prompt(msgspec.Struct, frozen=True):
    """The tokens of a request and where they come from."""

    parent: Node | None
    fork: ForkReason | None
    ids: tuple[int, ...]
    delta: tuple[int, ...]


class Gateway:
    """Chat completions over an engine, recorded per session.

    Attributes:
        model: name shown to clients; requests may name any model.
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
        """
        self.model = model
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._renderer = renderer
        self._on_call = on_call
        self._request_timeout_s = request_timeout_s
        self._default_max_tokens = default_max_tokens
        self._max_running = max_running
        self._max_running_per_session = max_running_per_session
        self._require_key = require_key
        self._sessions: dict[str, _Session] = {}
        self._keys: dict[str, str] = {}
        """Key of each open session, by session id."""
        self._running: dict[asyncio.Task[dict[str, Any]], str] = {}
        """Requests in flight of all sessions and their engine request ids."""
        self._anonymous = 0

    @property
    def weight_version(self) -> int:
        """Newest weights every engine has."""
        return self._engine.weight_version

    # ------------------------------------------------------------------ sessions

    def open_session(
        self,
        session_id: str,
        *,
        max_calls: int = 256,
        lifetime_s: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Open a session and return its bearer key.

        Args:
            session_id: unique among open sessions.
            max_calls: calls it may make.
            lifetime_s: seconds until its key stops working; None for no limit.
            seed: makes the sampling seeds of its calls, in order, a function of this number;
                None leaves them to the engine.

        Raises:
            ValueError: the id is open already.
        """
        if session_id in self._keys:
            raise ValueError(f"session {session_id!r} is open already")
        expires_at = None if lifetime_s is None else time.monotonic() + lifetime_s
        key = secrets.token_urlsafe(24)
        self._sessions[key] = _Session(
            session_id, max_calls=max_calls, expires_at=expires_at, seed=seed
        )
        self._keys[session_id] = key
        return key

    def calls(self, session_id: str) -> tuple[Call, ...]:
        """Calls an open session has recorded, in index order.

        Raises:
            KeyError: no such open session.
        """
        return tuple(self._sessions[self._keys[session_id]].history.calls)

    async def close_session(self, session_id: str) -> tuple[Call, ...]:
        """End a session: its key stops working, requests in flight are aborted and recorded.

        Returns:
            All its calls, in index order; () when it is not open.
        """
        key = self._keys.pop(session_id, None)
        if key is None:
            return ()
        session = self._sessions.pop(key)
        session.closed = True
        await self._drain(session.running)
        return tuple(session.history.calls)

    async def close(self) -> None:
        """Close every session and end requests that belong to none."""
        await asyncio.gather(*(self.close_session(session_id) for session_id in list(self._keys)))
        await self._drain(self._running)

    async def _drain(self, requests: dict[asyncio.Task[dict[str, Any]], str]) -> None:
        running = dict(requests)
        if not running:
            return
        await asyncio.gather(*(self._abort(request_id) for request_id in running.values()))
        _, late = await asyncio.wait(running, timeout=_ENGINE_GRACE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=_ENGINE_GRACE_S)

    async def _abort(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(_ENGINE_GRACE_S):
                await self._engine.abort(request_id)
        except (TimeoutError, EngineError):
            self.counters["abort_failed"] += 1

    # ------------------------------------------------------------------ requests

    async def chat(
        self,
        key: str | None,
        body: ChatRequest | dict[str, Any],
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Answer one chat completion request.

        Once begun, a request runs to its end and is recorded even if the caller stops waiting.

        Args:
            key: the session's bearer key.
            body: the request body.
            idempotency_key: repeating a key in a session gives the first answer again, also while
                it is still being generated; one key generates once.

        Returns:
            The response body.

        Raises:
            ApiError: everything a client can cause, and engines that refuse.
        """
        try:
            session = self._find(key)
            request = convert_body(body) if isinstance(body, dict) else body
            task = self._begin(session, request, idempotency_key)
            return await asyncio.shield(task)
        except ApiError as error:
            self.counters[f"error.{error.code}"] += 1
            raise

    def _find(self, key: str | None) -> _Session:
        session = self._sessions.get(key or "")
        if session is None:
            if self._require_key:
                raise ApiError(
                    401, "invalid_api_key", "the API key belongs to no open session; open one"
                )
            self._anonymous += 1
            return _Session(f"anonymous-{self._anonymous}", max_calls=1, expires_at=None, seed=None)
        if session.expires_at is not None and time.monotonic() >= session.expires_at:
            raise ApiError(401, "session_expired", f"session {session.id} reached its time limit")
        return session

    def _begin(
        self, session: _Session, request: ChatRequest, idempotency_key: str | None
    ) -> asyncio.Task[dict[str, Any]]:
        fingerprint = b""
        if idempotency_key is not None:
            fingerprint = hashlib.blake2b(msgspec.msgpack.encode(request)).digest()
            known = session.by_key.get(idempotency_key)
            if known is not None:
                if known.fingerprint != fingerprint:
                    raise invalid(
                        f"Idempotency-Key {idempotency_key!r} was used for another request; "
                        "send a new key",
                        code="idempotency_key_reused",
                    )
                self.counters["repeated"] += 1
                return known.task
        turn = check(request)
        if session.calls_begun >= session.max_calls:
            raise invalid(
                f"session {session.id} may make {session.max_calls} calls and has made them",
                code="session_call_limit",
            )
        limit = self._max_running_per_session
        if len(self._running) >= self._max_running or len(session.running) >= limit:
            raise ApiError(429, "overloaded", "too many requests in flight; retry later")
        ordinal = session.calls_begun
        request_id = f"{session.id}:{ordinal}:{secrets.token_hex(4)}"
        task = asyncio.create_task(
            self._answer(session, turn, idempotency_key, request_id, ordinal), name=request_id
        )
        self._running[task] = session.running[task] = request_id
        if idempotency_key is not None:
            session.by_key[idempotency_key] = _Keyed(fingerprint, task)

        def ended(task: asyncio.Task[dict[str, Any]]) -> None:
            del self._running[task], session.running[task]
            failed = task.cancelled() or task.exception() is not None
            if failed and idempotency_key is not None:
                del session.by_key[idempotency_key]  # nothing was answered, so a retry may try

        task.add_done_callback(ended)
        return task

    async def _answer(
        self,
        session: _Session,
        turn: ChatTurn,
        idempotency_key: str | None,
        request_id: str,
        ordinal: int,
    ) -> dict[str, Any]:
        started_at = time.time()
        prompt = self._prompt(session, turn)
        room = self._engine.max_context - len(prompt.ids)
        if room < 1:
            raise invalid(
                f"the conversation has {len(prompt.ids)} tokens and the model's context is "
                f"{self._engine.max_context}; shorten it",
                param="messages",
                code="context_length_exceeded",
            )
        seed = turn.seed
        if seed is None and session.seed is not None:
            seed = derive_seed(session.seed, ordinal)
        sampling = SamplingParams(
            max_tokens=min(turn.max_tokens or self._default_max_tokens, room),
            temperature=turn.temperature,
            top_p=turn.top_p,
            top_k=turn.top_k,
            seed=seed,
            stop_ids=self._renderer.stop_ids,
        )
        timeout_s = self._request_timeout_s
        if session.expires_at is not None:
            timeout_s = max(min(timeout_s, session.expires_at - time.monotonic()), 0.001)
        result = await self._generate(
            GenerationRequest(request_id, prompt.ids, sampling, timeout_s=timeout_s)
        )
        return self._record(session, turn, prompt, result, idempotency_key, started_at)

    def _prompt(self, session: _Session, turn: ChatTurn) -> _Prompt:
        match = session.history.match(turn.messages, turn.tools)
        fork = match.fork
        if match.parent is not None:
            held, sampled = match.parent.prompt_ids, match.parent.call.output_ids
            delta = self._renderer.bridge(held, sampled, match.new_messages, turn.tools)
            if delta is not None:
                ids = (*held, *sampled, *delta)
                return _Prompt(match.parent, None, ids, tuple(delta))
            fork = ForkReason.BRIDGE_REFUSED
        try:
            ids = tuple(self._renderer.render(turn.messages, turn.tools))
        except ValueError as error:
            raise invalid(f"messages cannot be rendered: {error}", param="messages") from error
        return _Prompt(None, fork, ids, ids)

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        try:
            async with asyncio.timeout(request.timeout_s + _ENGINE_GRACE_S):
                return await self._engine.generate(request)
        except TimeoutError as error:
            await self._abort(request.id)
            raise ApiError(
                504, "engine_timeout", "the engine did not answer in time; retry"
            ) from error
        except EngineError as error:
            raise ApiError(_ENGINE_ERRORS.get(error.code, 500), error.code, str(error)) from error

    def _record(
        self,
        session: _Session,
        turn: ChatTurn,
        prompt: _Prompt,
        result: GenerationResult,
        idempotency_key: str | None,
        started_at: float,
    ) -> dict[str, Any]:
        """Parse, record, and shape the answer. No await: index and record are one step."""
        output = [token for span in result.spans for token in span.ids]
        parsed = self._renderer.parse(prompt.ids, output, turn.tools)
        index = len(session.history.calls)
        message, answer = _shape(parsed, index, calls_allowed=turn.calls_allowed)
        response = dict(message)
        if parsed.raw_text != answer["content"]:
            response["raw_text"] = parsed.raw_text
        call = Call(
            id=f"{session.id}/{index}",
            session_id=session.id,
            index=index,
            parent_id=None if prompt.parent is None else prompt.parent.call.id,
            fork_reason=None if prompt.fork is None else str(prompt.fork),
            idempotency_key=idempotency_key,
            messages=turn.sent,
            tools=turn.tools,
            renderer_id=self._renderer.id,
            prompt_delta=prompt.delta,
            spans=result.spans,
            finish_reason=result.finish_reason,
            parse_state=parsed.state,
            response=response,
            started_at=started_at,
            finished_at=time.time(),
        )
        if self._on_call is not None:
            self._on_call(call)
        node = Node(call, prompt.ids, answer, tools_key(turn.tools))
        session.history.add(node, turn.messages)
        self._count(call, len(prompt.ids), len(output))
        if result.finish_reason is FinishReason.ABORTED:
            if session.closed:
                raise ApiError(401, "session_closed", f"session {session.id} is closed")
            raise ApiError(503, "aborted", "the generation was aborted; retry")
        return completion_body(
            completion_id=f"chatcmpl-{call.id}",
            model=self.model,
            created=int(call.finished_at),
            message=message,
            finish_reason=_finish(result.finish_reason, message),
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(output),
            extra={
                "call_id": call.id,
                "parent_id": call.parent_id,
                "fork_reason": call.fork_reason,
                "parse_state": call.parse_state,
                "finish_reason": call.finish_reason,
                "weight_versions": sorted({span.weight_version for span in result.spans}),
            },
        )

    def _count(self, call: Call, prompt_tokens: int, sampled_tokens: int) -> None:
        self.counters["calls"] += 1
        self.counters["prompt_tokens"] += prompt_tokens
        self.counters["sampled_tokens"] += sampled_tokens
        self.counters[f"parse.{call.parse_state}"] += 1
        self.counters[f"finish.{call.finish_reason}"] += 1
        if call.parent_id is not None:
            self.counters["bridged"] += 1
        if call.fork_reason is not None:
            self.counters[f"fork.{call.fork_reason}"] += 1


def _shape(
    parsed: ParsedMessage, index: int, *, calls_allowed: bool
) -> tuple[dict[str, Any], Message]:
    """The assistant message for the client, and the same one normalised."""
    answer: Message = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls and not calls_allowed:
        answer["content"] = parsed.raw_text
    elif parsed.tool_calls:
        answer["tool_calls"] = [
            {
                "id": f"call_{index}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(parsed.tool_calls)
        ]
    if parsed.reasoning is not None:
        answer["reasoning_content"] = parsed.reasoning
    message = dict(answer)
    if "tool_calls" in answer and not answer["content"]:
        message["content"] = None
    return message, answer


def _finish(
    reason: FinishReason, message: dict[str, Any]
) -> Literal["stop", "length", "tool_calls"]:
    if reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"
