"""A prompt's logprobs over HTTP, asked for with the `openai` package: those that the engine and the
model itself have for the same ids."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import openai
import pytest
import torch
from openai import AsyncOpenAI
from scripted import ScriptedEngine, answers, merged_tokenizer

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.local import LocalEngine
from headrace.engine.scoring import score_tokens
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.types import Call
from headrace.tokens.compact import CompactRenderer

RENDERER = CompactRenderer(merged_tokenizer())
IDS = RENDERER.tokenizer.encode("how many lines are in notes.txt? there are 12 lines")


def tiny(seed: int) -> Decoder:
    model = Decoder(
        ModelConfig(
            vocab_size=360,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_positions=64,
        )
    )
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)  # opinions that differ from token to token
    return model.eval()


class Served(NamedTuple):
    client: AsyncOpenAI
    models: dict[str, Decoder]
    engines: dict[str, LocalEngine]
    gateway: Gateway
    calls: list[Call]

    async def complete(self, **body: Any) -> Any:
        return await self.client.completions.create(**{"model": "teacher", "prompt": IDS, **body})


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    models = {name: tiny(seed) for seed, name in enumerate(("tiny", "teacher"))}
    config = EngineConfig(max_running=4, max_context=64)
    engines = {name: LocalEngine(EngineCore(model, config)) for name, model in models.items()}
    calls: list[Call] = []
    gateway = Gateway(
        engines["tiny"],
        RENDERER,
        model="tiny",
        models={"teacher": (engines["teacher"], RENDERER)},
        on_call=calls.append,
    )
    server = await GatewayServer.start(gateway)
    key = gateway.open_session("s")
    async with AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0) as client:
        yield Served(client, models, engines, gateway, calls)
    await server.stop()
    for engine in engines.values():
        await engine.close()


@pytest.mark.parametrize("name", ["tiny", "teacher"])
async def test_the_logprobs_are_the_engines_and_the_models_own(served: Served, name: str):
    answer = await served.complete(model=name, echo=True, max_tokens=0, logprobs=3)
    (choice,) = answer.choices
    assert answer.model == name
    assert choice.text == RENDERER.tokenizer.decode(IDS)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), 0)
    first, *rest = choice.logprobs.token_logprobs
    assert first is None, "nothing predicts the first token"
    assert choice.logprobs.top_logprobs[0] is None
    own = await score_tokens(served.engines[name], IDS, alternatives=3)
    assert rest == pytest.approx(own.logprobs, abs=1e-5)
    with torch.no_grad():
        model = served.models[name]
        logits = model.logits(model(torch.tensor([IDS]))).float()
    table = torch.log_softmax(logits[0, :-1], -1)
    exact = table.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert rest == pytest.approx(exact.tolist(), abs=1e-5)
    named = await served.complete(
        model=name,
        echo=True,
        max_tokens=0,
        logprobs=3,
        extra_body={"return_tokens_as_token_ids": True},
    )
    best = [{f"token_id:{i}": row[i].item() for i in row.topk(3).indices.tolist()} for row in table]
    for shown, by_id, expected in zip(
        choice.logprobs.top_logprobs,
        named.choices[0].logprobs.top_logprobs,
        [None, *best],
        strict=True,
    ):
        assert by_id == (expected and pytest.approx(expected, abs=1e-5))
        # Ids that spell the same, such as halves of characters, share one text.
        assert expected is None or max(shown.values()) == max(by_id.values())
    tokens = choice.logprobs.tokens
    assert "".join(tokens) == choice.text
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    assert choice.logprobs.text_offset == starts
    assert served.calls == [], "nothing was sampled for anybody"
    assert served.gateway.counters["scored_tokens"] == 2 * len(IDS)


async def test_ids_come_back_as_they_were_sent_whatever_they_spell(served: Served):
    spelled = [[i] for i in RENDERER.tokenizer.encode("lines")] + [[300, 301, 7, 300, 5]]
    for ids in (*spelled, IDS[:1]):
        answer = await served.complete(
            prompt=ids,
            echo=True,
            max_tokens=0,
            logprobs=1,
            extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
        )
        choice = answer.choices[0]
        assert choice.prompt_token_ids == ids
        assert choice.token_ids == []
        assert choice.logprobs.tokens == [f"token_id:{i}" for i in ids]
        assert [len(shown) for shown in choice.logprobs.top_logprobs[1:]] == [1] * (len(ids) - 1)


async def test_prompt_and_answer_together(served: Served):
    plain = await served.complete(max_tokens=5, logprobs=0, seed=3)
    both = await served.complete(
        prompt=RENDERER.tokenizer.decode(IDS),
        max_tokens=5,
        logprobs=0,
        seed=3,
        n=2,
        echo=True,
        extra_body={"return_token_ids": True},
    )
    scores = await score_tokens(served.engines["teacher"], IDS)
    for choice in both.choices:
        assert choice.prompt_token_ids == IDS
        assert len(choice.token_ids) == 5
        assert choice.logprobs.token_logprobs[1 : len(IDS)] == pytest.approx(scores.logprobs, 1e-5)
        assert len(choice.logprobs.tokens) == len(IDS) + 5
    prompt = RENDERER.tokenizer.decode(IDS)
    assert both.choices[0].text == prompt + plain.choices[0].text
    ends = both.choices[0].logprobs.token_logprobs[len(IDS) :]
    assert ends == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-5)
    silent = await served.complete(max_tokens=2, echo=True)
    assert silent.choices[0].text.startswith(prompt)
    assert silent.choices[0].logprobs is None
    assert len(served.calls) == 4
    assert {call.model for call in served.calls} == {"teacher"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is too small"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n=2 with max_tokens=0"),
        ({"max_tokens": 0, "echo": True, "logprobs": 21}, "logprobs=21 is out of range"),
        ({"echo": True, "stream": True}, "echo=True is not supported"),
        ({"max_tokens": 0, "echo": True, "prompt": [1, -1]}, "-1 is no token id"),
        ({"max_tokens": 0, "echo": True, "prompt": [1, 360], "logprobs": 0}, "360"),
        ({"max_tokens": 0, "echo": True, "prompt": [1] * 64}, "64 tokens and the context is 64"),
        ({"max_tokens": 0, "echo": True, "model": "other"}, "use one of tiny, teacher"),
    ],
)
async def test_what_cannot_be_scored_is_refused_and_said(
    served: Served, body: dict[str, Any], words: str
):
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        await served.complete(**body)
    assert caught.value.status_code in (400, 404)


async def test_an_engine_without_such_logprobs_is_said():
    engine = ScriptedEngine(answers([40, 41]))
    gateway = Gateway(engine, RENDERER, require_key=False)
    server = await GatewayServer.start(gateway)
    async with AsyncOpenAI(base_url=server.base_url, api_key="-", max_retries=0) as client:
        for most in (0, 2):
            with pytest.raises(openai.BadRequestError, match="no logprobs of prompts"):
                await client.completions.create(
                    model="x", prompt=[1, 2], echo=True, logprobs=1, max_tokens=most
                )
        told = await client.completions.create(model="x", prompt="hi", echo=True, max_tokens=2)
        assert told.choices[0].text.startswith("hi")
    await server.stop()
