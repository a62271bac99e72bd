"""From a prompt to recorded calls and the answer of a client, through the engine.

One answer may take several calls: a thinking budget ends thinking in between, and a tool call that
cannot be read may be told to the model. Between taking an index and recording a call there is no
await, so indices of a session are gapless.
"""

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import msgspec

from headrace.engine.types import (
    EngineClient,
    EngineError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from headrace.gateway.apis import openai_chat
from headrace.gateway.constraints import grammar_of
from headrace.gateway.context import Change
from headrace.gateway.echo import require_scores, scored_answer
from headrace.gateway.history import ForkReason, Node, tools_key
from headrace.gateway.plain import PlainReader
from headrace.gateway.prompts import Mode, build_prompt
from headrace.gateway.reading import OutputReader
from headrace.gateway.request import Attempt, ClientRequest, Prompt, output_ids
from headrace.gateway.sampling import next_seed, of_answer, sampling_of, scoring
from headrace.gateway.streams import AnswerStream
from headrace.gateway.turn import Answer, ApiError, Start, ToolCall, Usage
from headrace.rollout.types import Call, FinishReason, ParseState
from headrace.tokens.messages import Message
from headrace.tokens.parsed import ParsedMessage, StreamReader
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.thinking import next_leg, thinking_stop_ids

ENGINE_GRACE_S = 5.0
"""How much later than its own deadline an engine may answer before it counts as hung."""

_ENGINE_ERRORS = {
    EngineError.INVALID: 400,
    EngineError.TOO_LONG: 400,
    EngineError.OVERLOADED: 429,
    EngineError.CLOSED: 503,
}


class AnswerOptions(msgspec.Struct, frozen=True):
    """How a gateway answers.

    Attributes:
        request_timeout_s: deadline of one generation.
        default_max_tokens: for requests that do not say.
        mode: see `Mode`.
        repairs: how often the model is told, as a tool result, that its call cannot be read, and
            answers again before its client sees it. Not while streaming.
    """

    request_timeout_s: float = 60.0
    default_max_tokens: int = 1024
    mode: Mode = "continue"
    repairs: int = 0


class Answering:
    """Answers requests of all sessions.

    Args:
        engine: what generates.
        renderer: the checkpoint's renderer.
        options: see there.
        counters: calls, forks, parse states, finish reasons and tokens are counted here.
        model: what to record calls under; None is the model that learns.

    Attributes:
        on_call: receives every finished call, or None.
    """

    def __init__(
        self,
        engine: EngineClient,
        renderer: ChatRenderer,
        options: AnswerOptions,
        counters: Counter[str],
        on_call: Callable[[Call], None] | None,
        *,
        model: str | None = None,
    ) -> None:
        self.counters = counters
        self.on_call = on_call
        self._engine = engine
        self._renderer = renderer
        self._options = options
        self._model = model
        self._reader = OutputReader(renderer)
        native = "" if options.mode == "continue" else f":{options.mode}"
        self._renderer_id = renderer.id + native

    async def abort(self, request_id: str) -> None:
        """End a request of the engine early, if it is there and can."""
        try:
            async with asyncio.timeout(ENGINE_GRACE_S):
                await self._engine.abort(request_id)
        except (TimeoutError, EngineError):
            self.counters["abort_failed"] += 1

    async def answer(self, request: ClientRequest, ids: list[str]) -> list[Answer]:
        """All answers to a request, each recorded before this returns.

        Args:
            ids: engine request ids, one for each.

        Raises:
            ApiError: refused, failed or aborted; what was sampled is recorded.
        """
        started_at = time.time()
        session, turn = request.session, request.turn
        prompt = build_prompt(request, self._options.mode)
        sampling = sampling_of(
            request,
            prompt,
            context=self._engine.max_context,
            default_max_tokens=self._options.default_max_tokens,
            stop_ids=self._renderer.stop_ids,
        )
        timeout_s = self._options.request_timeout_s
        if session.expires_at is not None:
            timeout_s = max(min(timeout_s, session.expires_at - time.monotonic()), 0.001)
        if request.listener is not None:
            request.listener.start(Start(request.response_id, int(started_at), len(prompt.ids)))
        if turn.wish.max_tokens == 0:
            return [await self._only_scored(request, prompt, ids[0], sampling, timeout_s)]
        ones = [
            self._one(request, prompt, ids[k], of_answer(sampling, k), timeout_s, k, started_at)
            for k in range(turn.n)
        ]
        answers: list[Answer]
        if len(ones) == 1:
            answers = [await ones[0]]
        else:
            # What was sampled is recorded even if another answer failed: it was sampled.
            outcomes = await asyncio.gather(*ones, return_exceptions=True)
            answers = []
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                answers.append(outcome)
            answers = [msgspec.structs.replace(a, echo=answers[0].echo) for a in answers]
        if turn.messages:
            kept = [*turn.sent, openai_chat.message(answers[0])]
            session.remember(request.response_id, kept)
        return answers

    async def _only_scored(
        self,
        request: ClientRequest,
        prompt: Prompt,
        request_id: str,
        sampling: SamplingParams,
        timeout_s: float,
    ) -> Answer:
        """The prompt told back. No call is recorded: the token that an engine samples after a
        prompt is nobody's."""
        result = await self._generate(
            request.generation(request_id, prompt.ids, scoring(sampling), timeout_s), None
        )
        require_scores(request, prompt, result)
        self.counters["scored_prompts"] += 1
        self.counters["scored_tokens"] += len(prompt.ids)
        return scored_answer(request, prompt, self._reader.echo(request, prompt, result))

    async def _one(
        self,
        request: ClientRequest,
        prompt: Prompt,
        request_id: str,
        sampling: SamplingParams,
        timeout_s: float,
        k: int,
        started_at: float,
    ) -> Answer:
        """Answer k, which may take several calls: its client sees the last one's message.

        A thinking budget ends thinking with ids that nobody sampled, and a tool call that cannot be
        read may be told to the model, as a tool result: what follows is a call of its own each
        time, which continues the one before.
        """
        stream = self._stream(request, prompt, k)
        attempt = Attempt(prompt)

        async def generate(params: SamplingParams) -> GenerationResult:
            ids = attempt.prompt.ids
            return await self._generate(
                request.generation(request_id, ids, params, timeout_s), stream
            )

        # A form that begins at once leaves no room for thinking.
        if request.budget is not None and (
            not sampling.grammar or sampling.grammar_after is not None
        ):
            first = msgspec.structs.replace(
                sampling,
                max_tokens=max(1, min(request.budget, sampling.max_tokens)),
                stop_ids=thinking_stop_ids(request.renderer),
            )
            result = await generate(first)
            output = output_ids(result)
            left = sampling.max_tokens - len(output)
            delta = None
            if left > 0 and result.stop is None and result.finish_reason in _GO_ON:
                delta = next_leg(request.renderer, attempt.prompt.ids, output)
            if delta is None:
                parsed = self._reader.parse(request, attempt, result)
                return self._finish(request, attempt, result, parsed, stream, k, started_at)
            parsed = request.renderer.parse(prompt.ids, output, request.turn.tools)
            _, node = self._record(request, attempt, result, parsed, k, started_at, whole=False)
            attempt.go_on(node, result, delta)
            if stream is not None:
                stream.feed(delta)
            sampling = msgspec.structs.replace(
                sampling, max_tokens=left, seed=next_seed(sampling.seed), grammar_after=None
            )
        repairs = 0
        while True:
            result = await generate(sampling)
            parsed = self._reader.parse(request, attempt, result)
            told = None
            if stream is None and repairs < self._options.repairs:
                told = self._repair(request, attempt, result, parsed)
            if told is None:
                return self._finish(request, attempt, result, parsed, stream, k, started_at)
            _, node = self._record(request, attempt, result, parsed, k, started_at)
            repairs += 1
            self.counters["repaired"] += 1
            attempt = attempt.anew(node, result, told)
            grammar, after = grammar_of(request, attempt.prompt.ids)
            sampling = msgspec.structs.replace(
                sampling, seed=next_seed(sampling.seed), grammar=grammar, grammar_after=after
            )

    def _finish(
        self,
        request: ClientRequest,
        attempt: Attempt,
        result: GenerationResult,
        parsed: ParsedMessage,
        stream: AnswerStream | None,
        k: int,
        started_at: float,
    ) -> Answer:
        answer, _ = self._record(request, attempt, result, parsed, k, started_at)
        if stream is not None:
            stream.finish(answer)
        return answer

    def _repair(
        self,
        request: ClientRequest,
        attempt: Attempt,
        result: GenerationResult,
        parsed: ParsedMessage,
    ) -> list[int] | None:
        """Ids that tell the model what was wrong with its call; None where that cannot be done."""
        left = request.session.tokens_left()
        if parsed.error is None or parsed.state is not ParseState.MALFORMED or left == 0:
            return None
        told: Message = {"role": "tool", "content": parsed.error}
        ids, output = attempt.prompt.ids, output_ids(result)
        delta = request.renderer.bridge(ids, output, [told], request.turn.tools)
        if delta is None:
            return None
        room = self._engine.max_context - len(ids) - len(output) - len(delta)
        return delta if room >= self._options.default_max_tokens else None

    def _stream(self, request: ClientRequest, prompt: Prompt, k: int) -> AnswerStream | None:
        if request.listener is None:
            return None
        turn, renderer = request.turn, request.renderer
        new_reader: Callable[[], StreamReader] | None = None
        if turn.prompt is not None:
            new_reader = functools.partial(PlainReader, self._reader.token_bytes, renderer.stop_ids)
        elif turn.calls_allowed:
            # Without calls, an attempted one makes the whole text content: known at the end only.
            new_reader = functools.partial(renderer.reader, prompt.ids, turn.tools)
        return AnswerStream(
            k,
            new_reader,
            request.listener.piece,
            stops=turn.wish.stop,
            call_id=functools.partial(request.call_id, k),
        )

    async def _generate(
        self, request: GenerationRequest, stream: AnswerStream | None
    ) -> GenerationResult:
        try:
            async with asyncio.timeout(request.timeout_s + ENGINE_GRACE_S):
                return await self._engine.generate(
                    request, None if stream is None else stream.progress
                )
        except TimeoutError as error:
            await self.abort(request.id)
            raise ApiError(
                504, "engine_timeout", "the engine did not answer in time; retry"
            ) from error
        except EngineError as error:
            overloaded = error.code == EngineError.OVERLOADED
            raise ApiError(
                _ENGINE_ERRORS.get(error.code, 500),
                error.code,
                str(error),
                retry_after_s=1.0 if overloaded else None,
            ) from error

    def _record(
        self,
        request: ClientRequest,
        attempt: Attempt,
        result: GenerationResult,
        parsed: ParsedMessage,
        k: int,
        started_at: float,
        *,
        whole: bool = True,
    ) -> tuple[Answer, Node]:
        """Record and shape the answer. No await: index and record are one step.

        Args:
            whole: False where another call goes on with this answer: no client ever sees it so.
        """
        session, turn, prompt = request.session, request.turn, attempt.prompt
        output = output_ids(result)
        sampled = attempt.sampled + len(output)
        calls: tuple[ToolCall, ...] = ()
        content = parsed.content
        if parsed.tool_calls and not turn.calls_allowed:
            content = parsed.raw_text
        else:
            calls = tuple(
                ToolCall(request.call_id(k, i), call.name, call.arguments, call.reasoning)
                for i, call in enumerate(parsed.tool_calls)
            )
        finish: Literal["stop", "length", "tool_calls"] = "length"
        if result.finish_reason is FinishReason.STOP:
            finish = "tool_calls" if calls else "stop"
        index = len(session.calls)
        fork = prompt.fork
        if k and prompt.parent is None and fork is None:
            fork = ForkReason.REPEATED
        record = {
            "call_id": f"{session.id}/{index}",
            "parent_id": None if prompt.parent is None else prompt.parent.call.id,
            "fork_reason": None if fork is None else str(fork),
            "parse_state": parsed.state,
            "finish_reason": result.finish_reason,
            "weight_versions": sorted({span.weight_version for span in result.spans}),
        }
        if prompt.change is not Change.NOTHING:
            record["context"] = prompt.change
            self.counters[f"context.{prompt.change}"] += 1
        answer = Answer(
            response_id=request.response_id,
            index=k,
            content=content,
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish=finish,
            stop=result.stop,
            scores=self._reader.scores(request, [*attempt.results, result]),
            prompt_ids=prompt.ids if turn.prompt is not None else (),
            ids=tuple(output) if turn.prompt is not None else (),
            echo=self._reader.echo(request, prompt, result),
            usage=Usage(
                attempt.prompt_length,
                sampled,
                self._reader.reasoning_tokens(parsed, [*attempt.lead, *output], sampled),
                min(attempt.prompt_length, result.reused_tokens),
            ),
            record=record,
            created=int(time.time()),
        )
        message = openai_chat.message(answer)
        response = dict(message)
        if parsed.raw_text != content:
            response["raw_text"] = parsed.raw_text
        call = Call(
            id=record["call_id"],
            session_id=session.id,
            index=index,
            parent_id=record["parent_id"],
            fork_reason=record["fork_reason"],
            idempotency_key=request.idempotency_key,
            messages=turn.sent,
            tools=turn.tools,
            renderer_id=self._renderer_id,
            prompt_delta=prompt.delta,
            spans=result.spans,
            finish_reason=result.finish_reason,
            parse_state=parsed.state,
            response=response,
            started_at=started_at,
            finished_at=time.time(),
            model=self._model,
        )
        if self.on_call is not None:
            self.on_call(call)
        normalised: Message = {**message, "content": content}
        node = Node.of(call, prompt.parent, normalised, tools_key(turn.tools))
        session.calls.append(call)
        session.history.add(node, prompt.messages if whole else [])
        session.sampled_tokens += len(output)
        self._count(call, len(prompt.ids), len(output))
        if result.finish_reason is FinishReason.ABORTED:
            if session.closed:
                raise ApiError(401, "session_closed", f"session {session.id} is closed")
            raise ApiError(503, "aborted", "the generation was aborted; retry")
        if not k:
            require_scores(request, prompt, result)
        return answer, node

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


_GO_ON = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends of a first leg after which a second one makes sense."""
