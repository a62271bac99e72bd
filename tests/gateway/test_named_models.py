"""A judge and a teacher behind one gateway and one key: named by requests, never mixed."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from scripted import ScriptedEngine, answers, byte_tokenizer, merged_tokenizer

from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.rollout.segments import accounting, segments
from headrace.rollout.types import Call, DropReason, Outcome, Session, SessionLimits
from headrace.tokens.compact import CompactRenderer

POLICY = CompactRenderer(merged_tokenizer())
JUDGE = CompactRenderer(byte_tokenizer())
USER: Any = {"role": "user", "content": "how many lines?"}


def says(renderer: CompactRenderer, text: str) -> list[int]:
    return [*renderer.tokenizer.encode(text), min(renderer.stop_ids)]


class Served(NamedTuple):
    server: GatewayServer
    policy: ScriptedEngine
    judge: ScriptedEngine
    calls: list[Call]
    closed: list[str]

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    def client(self, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.server.base_url, api_key=key, max_retries=0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    policy = ScriptedEngine(answers(says(POLICY, "there are 12")))
    judge = ScriptedEngine(answers(says(JUDGE, "yes")))
    calls: list[Call] = []
    closed: list[str] = []
    gateway = Gateway(
        policy,
        POLICY,
        model="tiny",
        models={"judge": (judge, JUDGE)},
        on_call=calls.append,
        on_close=closed.append,
    )
    server = await GatewayServer.start(gateway)
    yield Served(server, policy, judge, calls, closed)
    await server.stop()


async def test_requests_go_to_the_model_they_name(served: Served) -> None:
    key = served.gateway.open_session("s")
    async with served.client(key) as client:
        assert [m.id for m in (await client.models.list()).data] == ["tiny", "judge"]
        assert (await client.models.retrieve("judge")).id == "judge"
        messages: list[Any] = [USER]
        said = await client.chat.completions.create(model="tiny", messages=messages)
        messages += [said.choices[0].message.model_dump(exclude_none=True), USER]
        judged = await client.chat.completions.create(model="judge", messages=messages)
        assert (judged.model, judged.choices[0].message.content) == ("judge", "yes")
        messages[-1] = {"role": "user", "content": "and words?"}
        await client.chat.completions.create(model="tiny", messages=messages)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="judge", messages=[*messages], stream=True
            )
        ]
        assert {chunk.model for chunk in chunks} == {"judge"}
    calls = await served.gateway.close_session("s")
    assert calls == tuple(served.calls)
    assert served.closed == ["s"]
    assert [call.index for call in calls] == [0, 1, 2, 3]
    assert len({call.id for call in calls}) == 4
    assert [call.model for call in calls] == [None, "judge", None, "judge"]
    # The judge's first prompt holds what the policy's call said: no parent, and no fork either.
    assert [call.parent_id for call in calls] == [None, None, "s/0", None]
    assert calls[1].fork_reason is None
    assert len(served.policy.log) == len(served.judge.log) == 2
    session = Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=calls)
    account = accounting(session)
    judged_tokens = len(calls[1].output_ids) + len(calls[3].output_ids)
    assert account.dropped == {DropReason.OTHER_MODEL: judged_tokens}
    assert account.sampled == account.trainable + judged_tokens
    assert [segment.call_ids for segment in segments(session)] == [("s/0", "s/2")]


async def test_an_unknown_model_is_refused_as_each_api_does(served: Served) -> None:
    key = served.gateway.open_session("s")
    async with served.client(key) as client:
        with pytest.raises(openai.NotFoundError, match="use one of tiny, judge") as refused:
            await client.chat.completions.create(model="teacher", messages=[USER])
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="use one of tiny, judge"):
            await client.responses.create(model="teacher", input="hello")
    root = served.server.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as other:
        with pytest.raises(anthropic.NotFoundError, match="use one of tiny, judge"):
            await other.messages.create(model="teacher", max_tokens=9, messages=[USER])
        judged = await other.messages.create(model="judge", max_tokens=9, messages=[USER])
        assert judged.model == "judge"
    assert served.gateway.counters["error.model_not_found"] == 3
    assert len(served.calls) == 1


async def test_limits_are_of_each_model_and_a_closed_session_is_closed_for_all(
    served: Served,
) -> None:
    key = served.gateway.open_session("s", limits=SessionLimits(calls=1, context=60))
    async with served.client(key) as client:
        for model, exceeded in (("judge", None), ("tiny", "session_call_limit")):
            await client.chat.completions.create(model=model, messages=[USER])
            assert served.gateway.exceeded("s") is None
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=model, messages=[USER])
            assert refused.value.code == "session_call_limit"
            # What a judge is refused is not the agent's doing.
            assert served.gateway.exceeded("s") == served.gateway.refused("s") == exceeded
        await served.gateway.close_session("s")
        for model in ("tiny", "judge"):
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model=model, messages=[USER])


async def test_without_further_models_any_name_will_do() -> None:
    engine = ScriptedEngine(answers(says(POLICY, "12")))
    gateway = Gateway(engine, POLICY, model="tiny")
    key = gateway.open_session("s")
    answer = await gateway.chat(key, {"model": "gpt-4", "messages": [USER]})
    assert answer["model"] == "tiny"
    assert gateway.models == ("tiny",)
    with pytest.raises(ValueError, match="two models are named 'tiny'"):
        Gateway(engine, POLICY, model="tiny", models={"tiny": (engine, JUDGE)})


async def test_a_refusal_that_is_no_limit_is_told_apart(served: Served) -> None:
    key = served.gateway.open_session("s")
    same = {"Idempotency-Key": "k"}
    async with served.client(key) as client:
        await client.chat.completions.create(model="tiny", messages=[USER], extra_headers=same)
        other = {**USER, "content": "something else"}
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(
                model="tiny",
                messages=[other],  # type: ignore[list-item]
                extra_headers=same,
            )
        assert served.gateway.refused("s") == "idempotency_key_reused"
        assert served.gateway.exceeded("s") is None
        await client.chat.completions.create(model="tiny", messages=[USER])
        assert served.gateway.refused("s") is None
    await served.gateway.close_session("s")
    assert served.gateway.refused("s") is None
