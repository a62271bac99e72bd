"""What a session may use, used up by the official clients: over HTTP, on a real engine, into the
ledger."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from scripted import byte_tokenizer

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.local import LocalEngine
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import RolloutRunner, Ticket
from headrace.rollout.types import LIMIT_WORDS, Outcome, SessionLimits
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from headrace.tokens.compact import CompactRenderer
from small_runs import ChatTask

CONTEXT, ANSWER = 1024, 8
RENDERER = CompactRenderer(byte_tokenizer())

Say = Callable[[list[dict[str, str]]], Awaitable[tuple[str, str | None]]]
"""A conversation in; what the model said and why it ended, in the API's words, out."""


class Case(NamedTuple):
    """A limit, and what it does.

    Attributes:
        limits: of the session.
        goes_on: the agent sends its whole conversation each time, not its first message alone.
        code: of the refusal.
        status: of the refusal.
        outcome, failure: of the rollout.
    """

    limits: SessionLimits
    goes_on: bool
    code: str
    status: int
    outcome: Outcome
    failure: FailureReason


CASES = {
    "tokens": Case(
        SessionLimits(sampled_tokens=29),
        False,
        "session_token_limit",
        400,
        Outcome.AGENT_FAILED,
        FailureReason.SESSION_TOKENS,
    ),
    "calls": Case(
        SessionLimits(calls=3),
        True,
        "session_call_limit",
        400,
        Outcome.AGENT_FAILED,
        FailureReason.SESSION_CALLS,
    ),
    "context": Case(
        SessionLimits(context=96),
        True,
        "context_length_exceeded",
        400,
        Outcome.AGENT_FAILED,
        FailureReason.SESSION_CONTEXT,
    ),
    "time": Case(
        SessionLimits(calls=100_000, wall_s=0.4),
        False,
        "session_expired",
        401,
        Outcome.TIMEOUT,
        FailureReason.SESSION_TIME,
    ),
}


def chat(client: openai.AsyncOpenAI, model: str) -> Say:
    async def say(messages: list[Any]) -> tuple[str, str | None]:
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=ANSWER
        )
        return answer.choices[0].message.content or "", answer.choices[0].finish_reason

    return say


def messages_api(client: anthropic.AsyncAnthropic, model: str) -> Say:
    async def say(messages: list[Any]) -> tuple[str, str | None]:
        answer = await client.messages.create(model=model, messages=messages, max_tokens=ANSWER)
        said = "".join(block.text for block in answer.content if block.type == "text")
        return said, answer.stop_reason

    return say


class Talkative(ChatTask):
    """A task whose agent asks until it is refused, and does not catch the refusal.

    Args:
        api: "openai" or "anthropic".
        goes_on: see `Case`.
    """

    name = "talk"

    def __init__(self, api: str, goes_on: bool) -> None:
        self.api, self.goes_on = api, goes_on
        self.finishes: list[str | None] = []
        self.refusal: openai.APIStatusError | anthropic.APIStatusError | None = None

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        key, url = endpoint.api_key, endpoint.base_url
        if self.api == "openai":
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                return await self.talk(chat(client, endpoint.model))
        root = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as other:
            return await self.talk(messages_api(other, endpoint.model))

    async def talk(self, say: Say) -> RolloutResult:
        messages = [{"role": "user", "content": "hello"}]
        try:
            while True:
                said, finish = await say(messages)
                self.finishes.append(finish)
                if self.goes_on:
                    messages += [
                        {"role": "assistant", "content": said},
                        {"role": "user", "content": "go on"},
                    ]
        except (openai.APIStatusError, anthropic.APIStatusError) as refusal:
            self.refusal = refusal
            raise


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    config = ModelConfig(
        vocab_size=RENDERER.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=CONTEXT,
        tie_embeddings=True,
    )
    model = Decoder(config)
    model.init_weights(0)
    made = LocalEngine(EngineCore(model, EngineConfig(max_running=4, max_context=CONTEXT, seed=3)))
    yield made
    await made.close()


def check_shape(refusal: Any, case: Case) -> None:
    """The refusal is the API's own: its exception, its status, its body."""
    module: Any = openai if isinstance(refusal, openai.APIStatusError) else anthropic
    kind = module.AuthenticationError if case.status == 401 else module.BadRequestError
    assert type(refusal) is kind
    assert refusal.status_code == case.status
    body = refusal.response.json()
    of_a_key = case.status == 401
    type_name = "authentication_error" if of_a_key else "invalid_request_error"
    if module is openai:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert (body["error"]["code"], body["error"]["type"]) == (case.code, type_name)
        assert refusal.code == case.code
    else:
        assert body == {
            "type": "error",
            "error": {"type": type_name, "message": body["error"]["message"]},
        }
    assert body["error"]["message"]


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("limit", CASES)
async def test_a_limit_ends_a_session_with_the_apis_error_and_a_recorded_reason(
    engine: LocalEngine, tmp_path: Path, api: str, limit: str
) -> None:
    case = CASES[limit]
    task = Talkative(api, case.goes_on)
    with Ledger.create(tmp_path) as ledger:
        ledger.stage_started("rl")
        ledger.dispatch("rl", "train", "g", "talk", {}, ["s"])
        gateway = Gateway(engine, RENDERER, model="tiny", on_call=ledger.record_call)
        server = await GatewayServer.start(gateway)
        runner = RolloutRunner(
            tasks={"talk": task},
            gate=gateway,
            ledger=ledger,
            base_url=server.base_url,
            model="tiny",
            limits=case.limits,
        )
        try:
            finished = await runner.run(
                Ticket("s", "g", "rl", "train", task.instance(1), 1.0, seed=5)
            )
        finally:
            await server.stop()
        check_shape(task.refusal, case)
        session = finished.session
        reason = f"session limit ({case.code}): {LIMIT_WORDS[case.code]}; then "
        assert (session.outcome, session.failure) == (case.outcome, case.failure)
        assert session.reason.startswith(reason)
        assert finished.reward == 0.0
        (kept,) = ledger.sessions()
        assert (kept.outcome, kept.failure, kept.reward) == (case.outcome, case.failure, 0.0)
        assert kept.reason == session.reason
        assert [call.id for call in ledger.session("s").calls] == [
            call.id for call in session.calls
        ]
        sampled = [len(call.output_ids) for call in session.calls]
        assert len(sampled) == len(task.finishes) > 0, "the refused call was never begun"
        check_use(case, sampled, session.calls, task.finishes)


def check_use(case: Case, sampled: list[int], calls: Any, finishes: list[str | None]) -> None:
    """The session used what it may, to the last of it, and not more."""
    limits = case.limits
    if limits.sampled_tokens is not None:
        assert sum(sampled) == limits.sampled_tokens
        assert finishes[-1] in ("length", "max_tokens")
    if limits.calls == 3:
        assert len(calls) == 3
    if limits.context is not None:
        held: dict[str | None, int] = {None: 0}
        for call in calls:
            held[call.id] = held[call.parent_id] + len(call.prompt_delta) + len(call.output_ids)
        assert max(held.values()) <= limits.context
        assert max(held.values()) > limits.context - ANSWER - len(b"go on") - 4
