"""What every engine does, whoever made it: one battery for the embedded one and all adapters.

vLLM and SGLang are fakes here that speak their wire formats; the same battery runs against a real
vLLM where HEADRACE_VLLM_PYTHON names an interpreter that has it (`-m slow`).
"""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from adapter_rigs import MAX_OPEN, VLLM_PYTHON, Rig, rig, save_tiny
from engine_harness import VOCAB, ask, greedy_reference, logprobs, output

from headrace.engine.servers.commands import vllm_command, vllm_environment
from headrace.engine.servers.process import ServerProcess, free_port
from headrace.engine.servers.vllm import VllmEngine
from headrace.engine.types import EngineError, Progress
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint
from headrace.rollout.types import FinishReason

PROMPT = (5, 17, 3, 60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return [save_tiny(folder, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def real_vllm(checkpoints, tmp_path_factory):
    """URL of a running server."""
    if VLLM_PYTHON is None:
        pytest.skip("HEADRACE_VLLM_PYTHON names no interpreter with vLLM")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = vllm_command(
        VLLM_PYTHON, checkpoints[0], port, max_running=4, options=("--enforce-eager",)
    )
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    server = ServerProcess("vLLM", command, environment=vllm_environment(1), log_path=log)
    probe = VllmEngine(url, checkpoints[0])
    # A loop may be running here; another thread has none.
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(asyncio.run, server.start(probe._ready, 300)).result()
        yield url
        elsewhere.submit(asyncio.run, server.stop()).result()


@pytest.fixture(
    params=[
        "embedded",
        "vllm",
        "sglang",
        pytest.param("vllm-real", marks=pytest.mark.slow),
    ]
)
async def made(request, checkpoints):
    real = request.param == "vllm-real"
    url = request.getfixturevalue("real_vllm") if real else None
    async with rig(request.param, checkpoints[0], url) as made:
        first = made.engine.weight_version
        yield made
        if real and made.engine.weight_version != first:
            # The next test finds the weights as this one did.
            await made.engine.load_weights(str(checkpoints[0]), made.engine.weight_version + 1)


def tokens(result):
    """Each token's id and bounds of its version."""
    return [
        (token, span.weight_version, span.newest_version or span.weight_version)
        for span in result.spans
        for token in span.ids
    ]


async def refused(made: Rig, request):
    with pytest.raises(EngineError) as caught:
        await made.engine.generate(request)
    return caught.value.code


# -- sampling ------------------------------------------------------------------------------------


async def test_greedy_repeats_itself_and_both_logprobs_are_one(made):
    first, second = [await made.engine.generate(ask(name, PROMPT)) for name in "ab"]
    assert first.finish_reason is FinishReason.LENGTH
    assert len(output(first)) == 8
    assert output(first) == output(second)
    assert all(p <= 0 for p in logprobs(first))
    assert first.raw_logprobs == pytest.approx(logprobs(first), abs=1e-5)
    (span,) = first.spans
    assert (span.weight_version, span.newest_version) == (made.engine.weight_version, None)
    assert span.engine_id == "engine-0"


async def test_a_seed_fixes_the_draws_and_logprobs_are_of_the_tempered_distribution(made):
    results = [
        await made.engine.generate(
            ask(f"r{i}", PROMPT, temperature=temperature, seed=seed, max_tokens=24)
        )
        for i, (temperature, seed) in enumerate([(1.7, 7), (1.7, 7), (1.7, 8), (1.0, 7)])
    ]
    same, again, other, plain = results
    assert output(same) == output(again) != output(other)
    assert logprobs(same) == pytest.approx(logprobs(again), abs=1e-5)
    assert plain.raw_logprobs == pytest.approx(logprobs(plain), abs=1e-5)
    # Raw ones that are not those of the distribution sampled from are absent or other numbers.
    assert same.raw_logprobs != logprobs(same)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
async def test_every_seed_is_one(made, seed):
    asked = {"temperature": 1.0, "seed": seed, "max_tokens": 12}
    first, second = [await made.engine.generate(ask(n, PROMPT, **asked)) for n in "ab"]
    assert output(first) == output(second)


async def test_a_stop_id_ends_the_output_and_stays_in_it(made):
    free = await made.engine.generate(ask("free", PROMPT, temperature=1.0, seed=3, max_tokens=9))
    stop = output(free)[4]
    end = output(free).index(stop)
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 9}
    result = await made.engine.generate(ask("stops", PROMPT, stop_ids=(VOCAB + 5, stop), **asked))
    assert result.finish_reason is FinishReason.STOP
    assert output(result) == output(free)[: end + 1]


async def test_no_stop_before_min_tokens(made):
    first = output(await made.engine.generate(ask("a", PROMPT)))[0]
    result = await made.engine.generate(ask("b", PROMPT, stop_ids=(first,), min_tokens=4))
    assert first not in output(result)[:4]
    assert len(output(result)) >= 4


async def test_a_bias_forces_a_token(made):
    result = await made.engine.generate(ask("a", PROMPT, logit_bias={9: 100.0}, max_tokens=3))
    assert output(result) == (9, 9, 9)
    assert logprobs(result) == pytest.approx([0.0] * 3, abs=1e-3)


async def test_alternatives_and_scores_of_the_prompt_are_raw(made):
    result = await made.engine.generate(ask("a", PROMPT, logprobs=3, prompt_logprobs=2))
    assert [len(row) for row in result.alternatives] == [3] * 8
    for token, p, row in zip(output(result), logprobs(result), result.alternatives, strict=True):
        assert row[0] == (token, pytest.approx(p, abs=1e-5))
        assert [q for _, q in row] == sorted((q for _, q in row), reverse=True)
    assert math.isnan(result.prompt_logprobs[0])
    assert all(p < 0 for p in result.prompt_logprobs[1:])
    assert [len(row) for row in result.prompt_alternatives] == [0, 2, 2, 2]


async def test_the_context_bounds_an_output(made):
    prompt = tuple(i % VOCAB for i in range(made.context - 5))
    result = await made.engine.generate(ask("a", prompt, max_tokens=50))
    assert result.finish_reason is FinishReason.LENGTH
    assert len(output(result)) == 5


# -- refusals ------------------------------------------------------------------------------------


async def test_what_cannot_run_is_refused_and_the_engine_lives_on(made):
    assert made.engine.max_context == made.context
    assert await refused(made, ask("long", [1] * made.context)) == EngineError.TOO_LONG
    for name, request in {
        "id": ask("id", (1, VOCAB)),
        "empty": ask("empty", ()),
        "bias": ask("bias", (1,), logit_bias={VOCAB: 1.0}),
        "heat": ask("heat", (1,), temperature=float("nan")),
        "timeout": ask("timeout", (1,), timeout_s=0.0),
    }.items():
        assert await refused(made, request) == EngineError.INVALID, name
    assert output(await made.engine.generate(ask("fine", PROMPT)))


async def test_an_id_is_used_once_and_too_many_requests_are_refused(made):
    long = [
        asyncio.create_task(made.engine.generate(ask(f"r{i}", PROMPT, max_tokens=made.long)))
        for i in range(MAX_OPEN)
    ]
    await made.running()
    assert await refused(made, ask("r0", PROMPT)) == EngineError.INVALID
    assert await refused(made, ask("more", PROMPT)) == EngineError.OVERLOADED
    await asyncio.gather(*(made.engine.abort(f"r{i}") for i in range(MAX_OPEN)))
    for result in await asyncio.gather(*long):
        assert result.finish_reason is FinishReason.ABORTED


async def test_closed_is_closed(made):
    await made.engine.close()
    await made.engine.close()
    assert await refused(made, ask("late", PROMPT)) == EngineError.CLOSED


# -- early ends ----------------------------------------------------------------------------------


async def test_an_abort_hands_over_what_was_sampled(made):
    whole = asyncio.create_task(made.engine.generate(ask("a", PROMPT, max_tokens=made.long)))
    await made.running()
    await made.engine.abort("unknown")
    await made.engine.abort("a")
    result = await whole
    assert result.finish_reason is FinishReason.ABORTED
    assert 0 < len(output(result)) < made.long
    assert len(logprobs(result)) == len(output(result))


async def test_a_deadline_ends_a_request(made):
    result = await made.engine.generate(ask("a", PROMPT, max_tokens=made.long, timeout_s=0.05))
    assert result.finish_reason is FinishReason.DEADLINE
    assert len(output(result)) < made.long


async def test_a_cancelled_request_is_ended_at_the_engine(made):
    gone = asyncio.create_task(made.engine.generate(ask("a", PROMPT, max_tokens=made.long)))
    await made.running()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    # The id is free again, and the engine has nothing else to do.
    assert len(output(await made.engine.generate(ask("a", PROMPT)))) == 8
    assert (await made.engine.stats())["running"] == 0
    if made.server is not None:
        assert not made.server.requests


async def test_who_watches_sees_the_tokens_of_the_result(made):
    seen: list[Progress] = []
    result = await made.engine.generate(ask("a", PROMPT), seen.append)
    assert tuple(i for part in seen for i in part.ids) == output(result)
    assert tuple(p for part in seen for p in part.logprobs) == logprobs(result)
    assert {part.id for part in seen} == {"a"}


# -- new weights ---------------------------------------------------------------------------------


async def test_running_requests_go_on_over_new_weights(made, checkpoints):
    old = made.engine.weight_version
    running = asyncio.create_task(made.engine.generate(ask("a", PROMPT, max_tokens=made.long)))
    await made.running()
    await made.engine.load_weights(str(checkpoints[1]), old + 1)
    assert made.engine.weight_version == old + 1
    await made.running()
    await made.engine.abort("a")
    result = await running
    assert result.finish_reason is FinishReason.ABORTED
    bounds = [(low, high) for _, low, high in tokens(result)]
    if made.exact:
        assert sorted(set(bounds)) == [(old, old), (old + 1, old + 1)]
        assert bounds == sorted(bounds)
    else:
        assert set(bounds) == {(old, old + 1)}
    fresh = await made.engine.generate(ask("b", PROMPT))
    assert {(low, high) for _, low, high in tokens(fresh)} == {(old + 1, old + 1)}
    assert (await made.engine.stats())["updates"] == 1


async def test_or_begin_again(made, checkpoints):
    old = made.engine.weight_version
    asked = {"max_tokens": made.long, "temperature": 1.0, "seed": 11}
    seen: list[Progress] = []
    running = asyncio.create_task(made.engine.generate(ask("a", PROMPT, **asked), seen.append))
    await made.running()
    await made.engine.load_weights(str(checkpoints[1]), old + 1, "requeue")
    await made.running()
    await made.engine.abort("a")
    result = await running
    assert result.finish_reason is FinishReason.ABORTED
    assert {(low, high) for _, low, high in tokens(result)} == {(old + 1, old + 1)}
    asked["max_tokens"] = len(output(result))
    again = await made.engine.generate(ask("b", PROMPT, **asked))
    assert output(again) == output(result)
    last = max((i for i, part in enumerate(seen) if part.restart), default=0)
    assert tuple(i for part in seen[last:] for i in part.ids) == output(result)


async def test_weights_that_do_not_fit_change_nothing(made, checkpoints, tmp_path):
    engine, old = made.engine, made.engine.weight_version
    before = output(await engine.generate(ask("a", PROMPT)))
    incomplete = save_tiny(tmp_path, 3)
    file = incomplete / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for path in (tmp_path / "missing", incomplete):
        with pytest.raises(UserError, match=path.name):
            await engine.load_weights(str(path), old + 1)
    for version, policy in ((-1, "continue"), (old + 1, "hope")):
        with pytest.raises(EngineError) as caught:
            await engine.load_weights(str(checkpoints[1]), version, policy)
        assert caught.value.code == EngineError.INVALID
    assert engine.weight_version == old
    assert output(await engine.generate(ask("b", PROMPT))) == before


# -- the real server against the embedded engine ---------------------------------------------------


@pytest.mark.slow
async def test_real_vllm_samples_what_the_embedded_engine_does(real_vllm, checkpoints):
    model = load_checkpoint(checkpoints[0])
    prompts = [tuple((7 * i + k) % VOCAB for i in range(12 + k)) for k in range(8)]
    async with (
        rig("embedded", checkpoints[0]) as ours,
        rig("vllm-real", checkpoints[0], real_vllm) as theirs,
    ):
        worst = 0.0
        for k, prompt in enumerate(prompts):
            request = ask(f"r{k}", prompt, max_tokens=24)
            mine, other = [await made.engine.generate(request) for made in (ours, theirs)]
            assert output(mine) == output(other) == greedy_reference(model, prompt, 24)
            differences = [abs(a - b) for a, b in zip(logprobs(mine), logprobs(other), strict=True)]
            worst = max(worst, *differences)
        assert worst < 1e-4, worst
