"""The SGLang adapter: what it sends and refuses, how it updates, and how it bounds versions."""

import asyncio
import json

import httpx
import pytest
from adapter_rigs import save_tiny, sglang
from engine_harness import VOCAB, ask, output
from sglang_fake import SglangFake
from toy_server import until

from headrace.engine.servers.sglang import SglangEngine
from headrace.engine.types import EngineError
from headrace.rollout.types import FinishReason

PROMPT = (5, 17, 3, 60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return [save_tiny(folder, seed) for seed in range(2)]


@pytest.fixture
async def opened(checkpoints):
    """Makes connected engines; called with options of the fake."""
    engines = []

    async def make(**options):
        fake = SglangFake(str(checkpoints[0]), **options)
        engines.append(sglang(fake, checkpoints[0]))
        await engines[-1].start()
        return fake, engines[-1]

    yield make
    for engine in engines:
        await engine.close()


async def refusal(engine, request):
    with pytest.raises(EngineError) as caught:
        await engine.generate(request)
    return caught.value


async def test_what_is_sent(opened):
    fake, engine = await opened()
    assert fake.label == "0"
    request = ask(
        "mine", PROMPT, temperature=0.7, seed=-1, stop_ids=(3, VOCAB), logit_bias={4: 0.5}
    )
    await engine.generate(request)
    (body,) = fake.bodies
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": list(PROMPT),
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "sampling_params": {
            "max_new_tokens": 8,
            "min_new_tokens": 0,
            "temperature": 0.7,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": 2**63 - 1,
            "logit_bias": {"4": 0.5},
        },
    }


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 1.0, "top_p": 0.9}, "top_p is 0.9"),
        ({"temperature": 1.0, "top_k": 5}, "top_k is 5"),
        ({"temperature": 1.0, "min_p": 0.1}, "min_p is 0.1"),
        ({"repetition_penalty": 1.1}, "leave it at 1"),
        ({"temperature": 1.0, "seed": 1}, "--enable-deterministic-inference"),
        ({"temperature": 0.7, "logprobs": 3}, "raw only at temperature 1"),
        ({"min_tokens": 1}, "skip-tokenizer-init"),
        ({"stop": ("x",)}, "skip-tokenizer-init"),
    ],
)
async def test_what_it_would_do_otherwise_is_refused(opened, sampling, words):
    fake, engine = await opened(deterministic=False, tokenizer=False)
    error = await refusal(engine, ask("a", PROMPT, **sampling))
    assert error.code == EngineError.INVALID
    assert words in str(error)
    assert not fake.bodies


@pytest.mark.parametrize(("policy", "mode"), [("continue", "retract"), ("requeue", "abort")])
@pytest.mark.parametrize("old_names", [False, True])
async def test_the_order_of_an_update(opened, checkpoints, policy, mode, old_names):
    fake, engine = await opened(old_names=old_names)
    fake.calls.clear()
    await engine.load_weights(str(checkpoints[1]), 1, policy)
    assert fake.calls == [f"pause {mode}", "reload", "label 1", "reset", "resume"]


async def test_an_abort_ends_one_request_though_the_server_goes_by_beginnings(opened):
    fake, engine = await opened()
    asked = [
        asyncio.create_task(engine.generate(ask(name, PROMPT, max_tokens=60)))
        for name in ("a", "ab")
    ]
    await until(lambda: fake.sampled >= 4)
    await engine.abort("a")
    results = await asyncio.gather(*asked)
    assert [result.finish_reason for result in results] == [
        FinishReason.ABORTED,
        FinishReason.LENGTH,
    ]


async def test_a_version_that_somebody_else_loaded_widens_the_bounds(opened):
    fake, engine = await opened()
    fake.label = "7"
    (span,) = (await engine.generate(ask("a", PROMPT))).spans
    assert (span.weight_version, span.newest_version) == (0, 7)


async def test_a_load_that_fails_puts_the_old_weights_back(opened, checkpoints):
    fake, engine = await opened()
    before = output(await engine.generate(ask("a", PROMPT)))
    fake.failures = 1
    with pytest.raises(EngineError, match=r"no space left.*version 0 are back"):
        await engine.load_weights(str(checkpoints[1]), 1)
    assert fake.moving.is_set()
    assert output(await engine.generate(ask("b", PROMPT))) == before


DOCUMENTED = {
    "text": " Paris",
    "output_ids": [12, 13],
    "meta_info": {
        "id": "5f5d",
        "finish_reason": {"type": "stop", "matched": "is"},
        "prompt_tokens": 4,
        "weight_version": "default",
        "total_retractions": 0,
        "output_token_logprobs": [[-0.25, 12, None], [-1.5, 13, None]],
        "completion_tokens": 2,
        "cached_tokens": 3,
        "e2e_latency": 0.04,
    },
}
"""An answer as its documentation shows it."""


def changed(**meta):
    return DOCUMENTED | {"meta_info": DOCUMENTED["meta_info"] | meta}


@pytest.mark.parametrize(
    ("status", "answer", "code"),
    [
        (200, changed(output_token_logprobs=[[-1.0, 12, None], [None, 13, None]]), "FAILED"),
        (200, changed(output_token_logprobs=[[-1.0, 12, None]]), "FAILED"),
        (200, changed(finish_reason=None), "FAILED"),
        (200, changed(finish_reason={"type": "odd"}), "FAILED"),
        (400, {"error": {"message": "longer than the model's context length"}}, "TOO_LONG"),
        (503, {"error": {"message": "The request queue is full."}}, "OVERLOADED"),
    ],
)
async def test_answers_that_are_none(checkpoints, status, answer, code):
    engine = SglangEngine("http://x", checkpoints[0], transport=answering(status, answer))
    await engine.start()
    assert (await refusal(engine, ask("a", PROMPT))).code == getattr(EngineError, code)
    await engine.close()


async def test_the_documented_answer_is_understood(checkpoints):
    engine = SglangEngine("http://x", checkpoints[0], transport=answering(200, DOCUMENTED))
    await engine.start()
    result = await engine.generate(ask("a", PROMPT, stop=("is",)))
    (span,) = result.spans
    assert (span.ids, span.logprobs) == ((12, 13), (-0.25, -1.5))
    assert (result.finish_reason, result.stop) == (FinishReason.STOP, "is")
    assert result.reused_tokens == 3
    await engine.close()


def answering(status, answer):
    """A transport that connects as SGLang and answers a generation with this."""
    fine = {
        "/model_info": {"model_path": "m", "is_generation": True, "weight_version": "default"},
        "/server_info": {"context_length": 128},
        "/update_weight_version": {"success": True},
    }

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path in fine:
            return httpx.Response(200, json=fine[request.url.path])
        return httpx.Response(status, content=json.dumps(answer))

    return httpx.MockTransport(handle)
