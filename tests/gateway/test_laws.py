"""Random sessions through the real gateway core keep the token laws L1 to L5 and L13.

The client rewrites history, drops messages, retries with and without keys, sends siblings and
injects answers of its own; the engine samples calls, nonsense, cut-off text and nothing at all,
across weight versions. Every sampled token has a logprob of its own, so it can be followed.
"""

import asyncio
import copy
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import check_laws
from scripted import (
    BASH,
    ScriptedEngine,
    byte_tokenizer,
    chatml_tokenizer,
    merged_tokenizer,
    spans,
)

from headrace.engine.types import GenerationRequest, GenerationResult
from headrace.gateway.gateway import Gateway
from headrace.gateway.turn import ApiError
from headrace.rollout.types import FinishReason
from headrace.tokens.chatml import TemplateRenderer
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.renderer import ChatRenderer

RENDERERS: dict[str, ChatRenderer] = {
    "compact over bytes": CompactRenderer(byte_tokenizer()),
    "compact over BPE": CompactRenderer(merged_tokenizer()),
    "chatml over BPE": TemplateRenderer(chatml_tokenizer()),
    "glm-5 over BPE": LibraryRenderer("glm-5", merged_tokenizer(), {"enable_thinking": False}),
}
TEXTS = ["how many lines?", "12", "", "<|user|> 7 <tool_call>", "naïve ⏎\n\n", "a.txt b.txt"]
CALLS = [
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls -l</arg_value></tool_call>",
    "I look.<tool_call>bash</tool_call><tool_call>bash</tool_call>",
    "<tool_call>bash<arg_key>command</tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>',
    "</arg_value>12",
    "12",
    "",
]
STEPS = st.sampled_from(
    ["extend", "extend", "extend", "rewrite", "drop", "retry", "repeat", "siblings", "inject"]
)


class _RandomModel:
    """Samples like a model in training: mostly the format, sometimes anything."""

    def __init__(self, renderer: ChatRenderer, draw: random.Random) -> None:
        self.renderer, self.draw, self.version = renderer, draw, 0

    def __call__(self, request: GenerationRequest) -> GenerationResult:
        draw = self.draw
        if draw.random() < 0.6:
            ids = self.renderer.tokenizer.encode(draw.choice(CALLS))
        else:
            ids = [draw.randrange(self.renderer.vocab_size) for _ in range(draw.randrange(6))]
        ids = [i for i in ids if i not in request.sampling.stop_ids]
        reason = FinishReason.STOP
        if draw.random() < 0.75:
            ids.append(draw.choice(request.sampling.stop_ids))
        else:
            reason = draw.choice([FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.ABORTED])
        cut = draw.randint(0, len(ids))
        result = spans(ids[:cut], ids[cut:], version=self.version)
        self.version += draw.randrange(2)
        return GenerationResult(request.id, result, reason)


class _Client:
    """Keeps several conversations and treats their histories badly."""

    def __init__(self, gateway: Gateway, key: str, draw: random.Random) -> None:
        self.gateway, self.key, self.draw = gateway, key, draw
        first = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "go"}]
        self.conversations = [first]
        self.sent: dict[str, list] = {}
        self.faithful: set[str] = set()
        """Idempotency keys of requests that did continue a recorded answer."""

    async def step(self, kind: str) -> None:
        draw = self.draw
        base = copy.deepcopy(draw.choice(self.conversations))
        if kind == "retry" and self.sent:
            name = draw.choice(sorted(self.sent))
            await self.send(self.sent[name], name)
        elif kind == "siblings":
            await asyncio.gather(*(self.send(base) for _ in range(3)))
        else:
            if kind == "rewrite":
                draw.choice(base)["content"] = draw.choice(TEXTS) + "!"
            elif kind == "drop":
                del base[draw.randrange(len(base))]
            elif kind == "inject":
                base += [
                    {"role": "assistant", "content": draw.choice(TEXTS)},
                    {"role": "user", "content": draw.choice(TEXTS)},
                ]
            if base:
                await self.send(base)

    async def send(self, messages: list, name: str | None = None) -> None:
        name = name or f"key-{len(self.sent)}"
        self.sent[name] = messages
        try:
            response = await self.gateway.chat(
                self.key, {"messages": messages, "tools": [BASH]}, name
            )
        except ApiError as error:
            if error.code != "aborted":
                raise
            return
        answer = response["choices"][0]["message"]
        if "tool_calls" in answer:
            new = [
                {"role": "tool", "content": self.draw.choice(TEXTS)} for _ in answer["tool_calls"]
            ]
        else:
            new = [{"role": "user", "content": self.draw.choice(TEXTS)}]
        self.conversations.append([*messages, answer, *new])


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=st.lists(STEPS, min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_random_sessions_keep_the_token_laws(name: str, steps: list[str], seed: int) -> None:
    draw = random.Random(seed)
    renderer = RENDERERS[name]

    async def run() -> None:
        engine = ScriptedEngine(_RandomModel(renderer, draw), max_context=100_000)
        gateway = Gateway(engine, renderer)
        client = _Client(gateway, gateway.open_session("s"), draw)
        for step in steps:
            await client.step(step)
        calls = await gateway.close_session("s")
        check_laws(calls, engine)
        answered = [call.idempotency_key for call in calls if call.finish_reason != "aborted"]
        assert len(answered) == len(set(answered))

    asyncio.run(run())


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_a_faithful_client_never_forks(name: str, seed: int) -> None:
    """Whatever is sampled, sending the answer back extends its tokens."""
    draw = random.Random(seed)
    renderer = RENDERERS[name]

    async def run() -> None:
        model = _RandomModel(renderer, draw)

        def script(request: GenerationRequest) -> GenerationResult:
            result = model(request)
            if result.finish_reason is FinishReason.ABORTED:
                return GenerationResult(result.id, result.spans, FinishReason.DEADLINE)
            return result

        gateway = Gateway(ScriptedEngine(script, max_context=100_000), renderer)
        client = _Client(gateway, gateway.open_session("s"), draw)
        for _ in range(5):
            await client.send(client.conversations[-1])
        calls = gateway.calls("s")
        assert [call.fork_reason for call in calls] == [None] * 5
        for parent, child in pairwise(calls):
            assert child.parent_id == parent.id

    asyncio.run(run())


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_parsing_is_total(name: str, data: st.DataObject) -> None:
    renderer = RENDERERS[name]
    tags = st.sampled_from(sorted(renderer.tokenizer.special_ids.values()))
    ids = data.draw(st.lists(tags | st.integers(0, renderer.vocab_size + 5), max_size=20))
    parsed = renderer.parse([1], ids, [BASH])
    stopped = bool(ids) and ids[-1] in renderer.stop_ids
    assert parsed.raw_text == renderer.decode(ids[:-1] if stopped else ids)
    assert (parsed.state == "truncated") == (not stopped)
    if "<think>" not in parsed.raw_text and not parsed.tool_calls:
        assert parsed.content.split() == parsed.raw_text.split()
