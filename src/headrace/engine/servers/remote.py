"""Another headrace engine as an engine, over its own HTTP surface (`headrace engine`).

It stamps versions, restarts requests and streams by itself, so this only translates.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec

from headrace.engine.config import USER_ERROR, UpdatePolicy
from headrace.engine.servers.engine import Answer, HttpEngine
from headrace.engine.servers.updates import LOAD_TIMEOUT_S
from headrace.engine.types import EngineError, GenerationRequest, OnProgress, Progress
from headrace.errors import UserError
from headrace.rollout.types import FinishReason, Span

_LONGEST_TIMEOUT_S = 3600.0
"""The server takes no longer ones."""

_Pairs = tuple[tuple[tuple[int, float | None], ...], ...]


class _SpanPart(msgspec.Struct):
    start: int
    end: int
    weight_version: int
    engine_id: str
    newest_version: int | None = None


class _Output(msgspec.Struct):
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    raw_logprobs: tuple[float | None, ...]
    spans: tuple[_SpanPart, ...]
    finish_reason: FinishReason
    stop: str | None = None
    alternatives: _Pairs = ()
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    queue_s: float = 0.0


class _Generated(msgspec.Struct):
    outputs: tuple[_Output, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_alternatives: _Pairs | None = None


class _Token(msgspec.Struct):
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    raw_logprobs: tuple[float | None, ...]
    weight_version: int


class _Health(msgspec.Struct):
    weight_version: int
    max_context: int | None = None


class _Weights(msgspec.Struct):
    version: int


class HeadraceEngine(HttpEngine):
    """An engine that `headrace engine` serves, on this machine or another.

    Args:
        url: of the server.
        api_key: that it asks for.
        max_context: tokens of prompt + output; None takes what the server says.
        options: as `HttpEngine`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        max_context: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            url,
            checkpoint=None,
            name="headrace",
            api_key=api_key,
            max_context=max_context,
            **options,
        )

    async def _ready(self) -> bool:
        return await self._http.answers("/health")

    async def _connect(self) -> tuple[int, int | None]:
        health = await self._http.get("/health", _Health)
        context = health.max_context or self._asked_context
        if context is None:
            raise UserError(
                f"headrace at {self._http.url} does not say its context; give max_context"
            )
        return context, health.weight_version

    async def _stamp(self, version: int) -> None:
        raise RuntimeError("a headrace engine always says its version")

    def _unsupported(self, request: GenerationRequest) -> Iterator[str]:
        return iter(())

    async def _ask(
        self, key: str, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Answer:
        sampling = msgspec.to_builtins(request.sampling)
        sampling["logit_bias"] = {str(i): bias for i, bias in request.sampling.logit_bias.items()}
        if not request.sampling.grammar:
            # A server that knows no grammars takes all other requests.
            del sampling["grammar"], sampling["grammar_after"]
        body = {
            "id": key,
            "prompt_ids": request.prompt_ids,
            "sampling": sampling,
            "stream": on_progress is not None,
            "session": request.session,
            "priority": request.priority,
            "timeout_s": min(request.timeout_s, _LONGEST_TIMEOUT_S),
        }
        if on_progress is None:
            content = await self._http.post("/generate", body, timeout_s=None)
        else:
            content = await self._watch(request.id, body, on_progress)
        return _answer(self._http.read("/generate", content, _Generated))

    async def _watch(self, request_id: str, body: dict[str, Any], on_progress: OnProgress) -> bytes:
        """Tell what comes; returns the data of the last event."""
        async with self._http.stream("POST", "/generate", body, None, None) as response:
            try:
                async for name, data in _events(response):
                    if name == "done":
                        return data
                    if name == "error":
                        raise self._http.refusal("/generate", 500, data)
                    if name == "restart":
                        version = self._version
                        on_progress(Progress(request_id, (), (), (), version, restart=True))
                    elif name == "token":
                        on_progress(_progress(request_id, self._http.read(name, data, _Token)))
            except httpx.HTTPError as error:
                raise self._http.lost("/generate", error) from error
        raise EngineError(
            EngineError.FAILED, f"headrace at {self._http.url}: /generate ended without an answer"
        )

    async def _abort_at_server(self, key: str) -> None:
        await self._http.post("/abort", {"id": key})

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        """See `EngineClient.load_weights`; `path` is on the server's machine."""
        self._require_usable()
        body = {"path": path, "version": version, "policy": policy}
        async with self._loading:
            try:
                content = await self._http.post("/weights", body, timeout_s=LOAD_TIMEOUT_S)
            except EngineError as error:
                if error.code == USER_ERROR:
                    raise UserError(str(error)) from error
                raise
            self._version = self._newest = self._http.read("/weights", content, _Weights).version
            self._counts["updates"] += 1

    async def stats(self) -> dict[str, Any]:
        """What this client counted; the server's own counters are at its /metrics."""
        counted, health = await asyncio.gather(
            super().stats(), self._http.get("/health", dict[str, Any])
        )
        known = {name: health[name] for name in ("running", "waiting") if name in health}
        return counted | known


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, bytes]]:
    """Name and data of each server-sent event."""
    name, data = "", []
    async for line in response.aiter_lines():
        if not line:
            if name and data:
                yield name, "\n".join(data).encode()
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        if field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data.append(value.removeprefix(" "))


def _numbers(values: tuple[float | None, ...]) -> tuple[float, ...]:
    """JSON has no NaN; null stands for it."""
    return tuple(math.nan if value is None else value for value in values)


def _pairs(rows: _Pairs | None) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(
        tuple((token, -math.inf if p is None else p) for token, p in row) for row in rows or ()
    )


def _progress(request_id: str, token: _Token) -> Progress:
    return Progress(
        request_id,
        token.ids,
        _numbers(token.logprobs),
        _numbers(token.raw_logprobs),
        token.weight_version,
    )


def _answer(generated: _Generated) -> Answer:
    (output,) = generated.outputs
    logprobs = _numbers(output.logprobs)
    return Answer(
        output.ids,
        logprobs,
        output.finish_reason,
        spans=tuple(
            Span(
                output.ids[part.start : part.end],
                logprobs[part.start : part.end],
                part.weight_version,
                part.engine_id,
                part.newest_version,
            )
            for part in output.spans
        ),
        raw_logprobs=_numbers(output.raw_logprobs),
        alternatives=_pairs(output.alternatives),
        prompt_logprobs=_numbers(generated.prompt_logprobs or ()),
        prompt_alternatives=_pairs(generated.prompt_alternatives),
        stop=output.stop,
        reused_tokens=output.reused_tokens,
        drafted_tokens=output.drafted_tokens,
        accepted_tokens=output.accepted_tokens,
        preemptions=output.preemptions,
        queue_s=output.queue_s,
    )
