"""The vLLM adapter: what it sends and refuses, how it updates, and what it makes of failures."""

import asyncio
import json
import shutil

import httpx
import pytest
from adapter_rigs import save_tiny, vllm
from engine_harness import VOCAB, ask, output
from toy_server import until
from vllm_fake import VllmFake

from headrace.engine.servers.vllm import VllmEngine
from headrace.engine.types import EngineError
from headrace.errors import UserError
from headrace.rollout.types import FinishReason

PROMPT = (5, 17, 3, 60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return [save_tiny(folder, seed) for seed in range(2)]


@pytest.fixture
async def opened(checkpoints):
    """Makes connected engines; called with options of the fake and of the engine."""
    engines = []

    async def make(engine_options=None, **fake_options):
        fake = VllmFake(str(checkpoints[0]), **fake_options)
        engine = vllm(fake, checkpoints[0], **(engine_options or {}))
        engines.append(engine)
        await engine.start()
        return fake, engine

    yield make
    for engine in engines:
        await engine.close()


async def refusal(engine, request):
    with pytest.raises(EngineError) as caught:
        await engine.generate(request)
    return caught.value


# -- connecting ----------------------------------------------------------------------------------


async def test_a_server_that_cannot_do_it_is_refused_with_the_option_it_lacks(opened):
    with pytest.raises(UserError, match="--enable-scale-out"):
        await opened(scale_out=False)
    with pytest.raises(UserError, match="takes at most 128 tokens"):
        await opened({"max_context": 129})
    fake, _ = await opened()
    fake.moving.clear()
    second = vllm(fake, fake.model.path)
    with pytest.raises(UserError, match="is paused"):
        await second.start()
    await second.close()


async def test_the_stamp_is_the_servers_or_is_given_to_it(opened):
    fake, engine = await opened({"version": 4})
    assert (engine.weight_version, fake.label) == (4, "4")
    second = vllm(fake, fake.model.path)
    await second.start()
    assert second.weight_version == 4
    third = vllm(fake, fake.model.path, version=5)
    with pytest.raises(UserError, match="stamped 4, not 5"):
        await third.start()
    for one in (second, third):
        await one.close()


async def test_another_model_behind_the_url_is_noticed(checkpoints, tmp_path):
    other = shutil.copytree(checkpoints[0], tmp_path / "other")
    cut_tensor(other)
    engine = vllm(VllmFake(str(checkpoints[0])), other)
    with pytest.raises(UserError, match=r"model\.norm\.weight is .* checkpoint of the same model"):
        await engine.start()
    await engine.close()


def cut_tensor(path):
    """Take one tensor out of a safetensors file and leave the rest valid."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://[::1"])
def test_no_url(checkpoints, url):
    with pytest.raises(UserError, match="engine URL"):
        VllmEngine(url, checkpoints[0])


async def test_nobody_there(checkpoints):
    engine = VllmEngine("http://127.0.0.1:9", checkpoints[0])
    with pytest.raises(UserError, match="cannot be reached"):
        await engine.start()
    assert (await refusal(engine, ask("a", PROMPT))).code == EngineError.CLOSED
    await engine.close()


# -- requests ------------------------------------------------------------------------------------


async def test_what_is_sent(opened):
    fake, engine = await opened({"version": 2})
    request = ask(
        "mine", PROMPT, temperature=1.0, seed=-1, stop_ids=(3, VOCAB), logprobs=2, priority=4
    )
    await engine.generate(request)
    (body,) = fake.bodies
    params = body.pop("sampling_params")
    assert len(body.pop("request_id")) == 32
    assert body == {"token_ids": list(PROMPT), "cache_salt": "version-2", "priority": -4}
    assert params == {
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 3,
        "detokenize": False,
        "skip_special_tokens": False,
        "seed": 2**63 - 1,
    }


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.005}, "0.01 to 2.0"),
        ({"temperature": 2.5}, "0.01 to 2.0"),
        ({"temperature": 1.0, "min_p": 0.1, "top_p": 0.9}, "use one of them"),
        ({"temperature": 0.7, "logprobs": 3}, "raw only at temperature 1"),
        ({"logit_bias": {1: 1.0}, "logprobs": 3}, "raw only at temperature 1"),
        ({"stop": ("x",)}, "skip-tokenizer-init"),
    ],
)
async def test_what_it_would_do_otherwise_is_refused(opened, sampling, words):
    fake, engine = await opened()
    error = await refusal(engine, ask("a", PROMPT, **sampling))
    assert error.code == EngineError.INVALID
    assert words in str(error)
    assert not fake.bodies


async def test_raw_logprobs_serve_where_they_are_those_of_the_draw(opened):
    _, engine = await opened(logprobs_mode="raw_logprobs", policy="fcfs")
    result = await engine.generate(ask("a", PROMPT, temperature=1.0, seed=1))
    assert result.raw_logprobs == tuple(p for span in result.spans for p in span.logprobs)
    for request in (
        ask("b", PROMPT, temperature=0.5),
        ask("b", PROMPT, temperature=1.0, top_k=5),
        ask("b", PROMPT, min_tokens=2, stop_ids=(1,)),
    ):
        error = await refusal(engine, request)
        assert "--logprobs-mode processed_logprobs" in str(error)
    assert "--scheduling-policy" in str(await refusal(engine, ask("c", PROMPT, priority=1)))


async def test_a_server_without_its_development_routes_samples_and_takes_no_weights(
    opened, checkpoints
):
    _, engine = await opened(dev_mode=False)
    (span,) = (await engine.generate(ask("a", PROMPT))).spans
    assert (span.weight_version, span.newest_version) == (0, None)
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        await engine.load_weights(str(checkpoints[1]), 1)


async def test_an_abort_before_the_first_token_has_none(opened):
    fake, engine = await opened()
    fake.moving.clear()
    asked = asyncio.create_task(engine.generate(ask("a", PROMPT)))
    await until(lambda: bool(fake.requests))
    await engine.abort("a")
    result = await asked
    assert (result.finish_reason, result.spans) == (FinishReason.ABORTED, ())
    fake.moving.set()


async def test_an_end_that_nobody_asked_for_is_a_failure(opened):
    fake, engine = await opened()
    asked = asyncio.create_task(engine.generate(ask("a", PROMPT, max_tokens=100)))
    await until(lambda: fake.sampled >= 3)
    fake.abort(list(fake.requests))
    with pytest.raises(EngineError, match="without being asked") as caught:
        await asked
    assert caught.value.code == EngineError.FAILED


# -- new weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "mode"), [("continue", "keep"), ("requeue", "abort")])
async def test_the_order_of_an_update(opened, checkpoints, policy, mode):
    fake, engine = await opened()
    fake.calls.clear()
    await engine.load_weights(str(checkpoints[1]), 1, policy)
    assert fake.calls == [f"pause {mode}", "reload", "reset", "label 1", "resume"]


async def test_without_stamps_versions_are_bounded(opened, checkpoints):
    fake, engine = await opened(stamps=False)
    asked = asyncio.create_task(engine.generate(ask("a", PROMPT, max_tokens=100)))
    await until(lambda: fake.sampled >= 3)
    await engine.load_weights(str(checkpoints[1]), 1)
    (span,) = (await asked).spans
    assert (span.weight_version, span.newest_version) == (0, 1)
    (span,) = (await engine.generate(ask("b", PROMPT))).spans
    assert (span.weight_version, span.newest_version) == (1, None)


async def test_a_load_that_fails_puts_the_old_weights_back(opened, checkpoints):
    fake, engine = await opened()
    before = await engine.generate(ask("a", PROMPT))
    asked = asyncio.create_task(engine.generate(ask("b", PROMPT, max_tokens=100)))
    await until(lambda: fake.sampled >= 11)
    fake.failures = 1
    with pytest.raises(EngineError, match=r"no space left.*weights of version 0 are back"):
        await engine.load_weights(str(checkpoints[1]), 1, "requeue")
    assert (engine.weight_version, fake.label) == (0, "0")
    result = await asked
    assert {span.weight_version for span in result.spans} == {0}
    assert result.finish_reason is FinishReason.LENGTH
    assert output(await engine.generate(ask("c", PROMPT))) == output(before)


async def test_an_engine_in_an_unknown_state_refuses_until_weights_were_loaded(opened, checkpoints):
    fake, engine = await opened()
    asked = asyncio.create_task(engine.generate(ask("a", PROMPT, max_tokens=100)))
    await until(lambda: fake.sampled >= 3)
    fake.failures = 2
    with pytest.raises(EngineError, match="could not be loaded again") as caught:
        await engine.load_weights(str(checkpoints[1]), 1)
    assert caught.value.code == EngineError.FAILED
    with pytest.raises(EngineError, match="could not be loaded again"):
        await asked
    assert (await refusal(engine, ask("b", PROMPT))).code == EngineError.FAILED
    await engine.load_weights(str(checkpoints[1]), 2)
    (span,) = (await engine.generate(ask("c", PROMPT))).spans
    assert span.weight_version == 2


async def test_a_cancelled_update_is_finished(opened, checkpoints):
    fake, engine = await opened()
    update = asyncio.create_task(engine.load_weights(str(checkpoints[1]), 1))
    await until(lambda: "reload" in fake.calls)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert fake.moving.is_set()
    assert engine.weight_version == 1
    assert output(await engine.generate(ask("a", PROMPT)))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"n_routed_experts": 8}, "experts"), ({"kv_lora_rank": 16}, "latent attention")],
)
async def test_models_that_do_not_reload_in_place_are_refused(checkpoints, tmp_path, change, words):
    paths = [shutil.copytree(path, tmp_path / path.name) for path in checkpoints]
    for path in paths:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    for trusted in (False, True):
        fake = VllmFake(str(paths[0]))
        engine = vllm(fake, paths[0], reload_experts=trusted)
        await engine.start()
        if trusted:
            await engine.load_weights(str(paths[1]), 1)
        else:
            with pytest.raises(EngineError, match=f"model with {words} in place"):
                await engine.load_weights(str(paths[1]), 1)
            assert "reload" not in fake.calls
        await engine.close()


async def test_weights_that_miss_a_tensor_or_lie_in_shared_memory(opened, checkpoints, tmp_path):
    fake, engine = await opened()
    fewer = shutil.copytree(checkpoints[1], tmp_path / "fewer")
    cut_tensor(fewer)
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight is absent there"):
        await engine.load_weights(str(fewer), 1)
    with pytest.raises(UserError, match="weight_transport"):
        await engine.load_weights("/dev/shm/x/v00000001.weights", 1)
    assert "reload" not in fake.calls


# -- failures of the exchange --------------------------------------------------------------------


def answering(status, content):
    """A transport that connects as vLLM and answers a generation with this."""
    fine = {
        "/v1/models": {"data": [{"id": "m", "max_model_len": 128}]},
        "/collective_rpc": None,
    }

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path in fine:
            body = fine[request.url.path]
            return httpx.Response(404 if body is None else 200, json=body)
        if json.loads(request.content) == {}:
            return httpx.Response(400)
        if isinstance(content, Exception):
            raise content
        return httpx.Response(status, content=content)

    return httpx.MockTransport(handle)


def generated(**choice):
    scored = {"content": [{"token_id": 1, "logprob": -0.5}]}
    whole = {"finish_reason": "length", "token_ids": [1], "logprobs": scored, **choice}
    return json.dumps({"choices": [whole]}).encode()


@pytest.mark.parametrize(
    ("status", "content", "code", "words"),
    [
        (401, b"", EngineError.FAILED, "refuses the API key"),
        (404, b'{"detail":"Not Found"}', EngineError.FAILED, "Not Found"),
        (429, b"", EngineError.OVERLOADED, ""),
        (503, b'{"error":{"message":"busy","code":503}}', EngineError.OVERLOADED, "busy"),
        (400, b'{"error":{"message":"bad top_k"}}', EngineError.INVALID, "bad top_k"),
        (400, b"longer than the maximum model length", EngineError.TOO_LONG, "length"),
        (500, b"<html>oops" + b"x" * 9999, EngineError.FAILED, "oops"),
        (200, b"not json", EngineError.FAILED, "unexpected answer"),
        (200, b'{"choices": []}', EngineError.FAILED, "unexpected answer"),
        (200, generated(token_ids=[2]), EngineError.FAILED, "other tokens"),
        (200, generated(token_ids=None, logprobs=None, finish_reason="?"), EngineError.FAILED, "?"),
        (
            200,
            generated(logprobs={"content": [{"token_id": 1, "logprob": -9999.0}]}),
            EngineError.FAILED,
            "without a finite logprob",
        ),
        (0, httpx.ReadError("reset"), EngineError.FAILED, "connection lost"),
        (0, httpx.ConnectError("no"), EngineError.CLOSED, "cannot be reached"),
    ],
)
async def test_what_goes_wrong_has_a_code_and_words(checkpoints, status, content, code, words):
    engine = VllmEngine("http://vllm", checkpoints[0], transport=answering(status, content))
    await engine.start()
    error = await refusal(engine, ask("a", PROMPT))
    assert error.code == code
    assert words in str(error)
    assert len(str(error)) < 700
    assert (await engine.stats())["requests_failed"] == 1
    await engine.close()
