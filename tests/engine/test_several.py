"""Several samples of one prompt: the prompt is computed once, and all end or none is kept."""

import asyncio

import msgspec
import pytest
from engine_harness import ask, drain, greedy_reference, new_core, output, random_prompt, tiny_model

from headrace.engine.local import LocalEngine
from headrace.engine.sampling.seeds import derive_seed
from headrace.engine.several import expand, generate_several
from headrace.engine.types import EngineError, Progress


def test_samples_are_requests_of_their_own() -> None:
    request = ask("q", (1, 2, 3), seed=5, temperature=1.0, prompt_logprobs=2, priority=3)
    samples = expand(request, 3)
    assert [one.id for one in samples] == ["q/0", "q/1", "q/2"]
    assert [one.sampling.seed for one in samples] == [derive_seed(5, k) for k in range(3)]
    assert [one.sampling.prompt_logprobs for one in samples] == [2, None, None]
    assert {(one.session, one.priority, one.prompt_ids) for one in samples} == {("q", 3, (1, 2, 3))}
    # More of them leave the first as they are.
    assert expand(request, 5)[:3] == samples
    unseeded = ask("q", (1,), session="s")
    seeds = {one.sampling.seed for _ in range(20) for one in expand(unseeded, 2)}
    assert len(seeds) == 40
    assert {one.session for one in expand(unseeded, 2)} == {"s"}
    for n in (0, 129):
        with pytest.raises(EngineError, match=f"n is {n}; it must lie in 1 to 128"):
            expand(request, n)


@pytest.mark.parametrize("scored", [None, 1])
def test_the_prompt_is_computed_once(scored: int | None) -> None:
    core = new_core(tiny_model(), prefill_tokens=128, max_running=8)
    prompt = random_prompt(0, 90)
    for one in expand(
        ask("q", prompt, temperature=9.0, seed=1, max_tokens=6, prompt_logprobs=scored), 6
    ):
        core.add(one)
    results = drain(core)
    outputs = [output(results[f"q/{k}"]) for k in range(6)]
    assert len(set(outputs)) > 1
    assert len(results["q/0"].prompt_logprobs) == (0 if scored is None else 90)
    # Five found it; each computes at least the last token of the prompt for its own logits.
    assert 90 <= core.stats().tokens_prefilled <= 90 + 5 * 2
    assert core.stats().tokens_reused >= 5 * 88


async def test_all_end_or_an_error_ends_the_others() -> None:
    engine = LocalEngine(
        new_core(tiny_model(max_positions=4096), max_context=4096, max_running=2, max_waiting=2)
    )
    told: list[Progress] = []
    request = ask("q", random_prompt(0, 40), max_tokens=5)
    results = await generate_several(engine, request, 4, told.append)
    assert [result.id for result in results] == [f"q/{k}" for k in range(4)]
    want = greedy_reference(tiny_model(), request.prompt_ids, 5)
    for result in results:
        assert output(result) == want
        assert tuple(i for p in told if p.id == result.id for i in p.ids) == want
    # There is room for four.
    with pytest.raises(EngineError, match="waiting already") as caught:
        await generate_several(engine, ask("q", (1, 2), max_tokens=4000), 6)
    assert caught.value.code == EngineError.OVERLOADED
    stats = await engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    # Whoever stops waiting ends them, too.
    began = asyncio.Event()
    task = asyncio.create_task(
        generate_several(engine, ask("q", (1, 2), max_tokens=4000), 3, lambda progress: began.set())
    )
    async with asyncio.timeout(30):
        await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = await engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    await engine.close()


async def test_a_sample_alone_is_what_it_is_among_others() -> None:
    engine = LocalEngine(new_core(tiny_model(), deterministic=True))
    request = ask("q", random_prompt(3, 20), temperature=1.0, seed=9, max_tokens=12)
    several = await generate_several(engine, request, 3)
    (alone,) = await generate_several(engine, request, 1)
    direct = await engine.generate(msgspec.structs.replace(expand(request, 3)[2], id="direct"))
    assert alone.spans == several[0].spans
    assert direct.spans == several[2].spans
    await engine.close()
