"""A request that another engine began goes on as if it had always been here."""

import msgspec
import pytest
from engine_harness import drain, latent_model, logprobs, new_core, output, tiny_model

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    Progress,
    SamplingParams,
)
from headrace.rollout.replicas.resuming import Received

KINDS = {
    "plain": SamplingParams(max_tokens=12, seed=5),
    "greedy": SamplingParams(max_tokens=12, temperature=0.0),
    "penalties": SamplingParams(
        max_tokens=12, seed=6, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3
    ),
    "minimum": SamplingParams(max_tokens=12, seed=7, min_tokens=8, stop_ids=tuple(range(60))),
    "filters": SamplingParams(max_tokens=12, seed=8, top_p=0.9, top_k=20),
}
PROMPT = (3, 1, 4, 1, 5)


def finish(core: EngineCore, request: GenerationRequest) -> tuple[int, ...]:
    core.add(request)
    return output(drain(core)[request.id])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("model", ["grouped", "glm_moe_dsa"])
def test_the_rest_of_a_request_is_what_it_would_have_been(name: str, model: str) -> None:
    core = new_core(tiny_model() if model == "grouped" else latent_model(model))
    sampling = KINDS[name]
    whole = finish(core, GenerationRequest("whole", PROMPT, sampling))
    for known in (1, 5, len(whole) - 1):
        rest = GenerationRequest(
            f"rest-{known}",
            (*PROMPT, *whole[:known]),
            msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - known),
            resumed=known,
        )
        assert finish(core, rest) == whole[known:]


def test_a_stop_text_may_begin_in_what_was_sampled_before() -> None:
    pieces = [bytes([65 + i % 26]) for i in range(97)]
    core = EngineCore(tiny_model(), EngineConfig(max_running=4, max_context=64), pieces=pieces)
    sampling = SamplingParams(max_tokens=12, seed=5)
    whole = finish(core, GenerationRequest("whole", PROMPT, sampling))
    stop = b"".join(pieces[i] for i in whole[2:5]).decode()
    rest = GenerationRequest(
        "rest",
        (*PROMPT, *whole[:4]),
        SamplingParams(max_tokens=8, seed=5, stop=(stop,)),
        resumed=4,
    )
    core.add(rest)
    (result,) = drain(core).values()
    assert output(result) == whole[4:5]
    assert result.stop == stop


def test_the_bookkeeping_of_two_engines_makes_one_result_of_both() -> None:
    """Wherever the first one dies, the whole result is there: alternatives and stop text too."""
    pieces = [bytes([65 + i % 26]) for i in range(97)]
    model = tiny_model()

    def run(request: GenerationRequest, told: list[Progress]) -> GenerationResult:
        core = EngineCore(model, EngineConfig(max_running=4, max_context=64), pieces=pieces)
        core.add(msgspec.structs.replace(request, stream=True))
        return drain(core, watch=told.append)[request.id]

    free = SamplingParams(max_tokens=12, seed=5, logprobs=3)
    spelled = b"".join(pieces[i] for i in output(run(GenerationRequest("r", PROMPT, free), [])))
    sampling = msgspec.structs.replace(free, stop=(spelled[5:8].decode(),))
    request = GenerationRequest("r", PROMPT, sampling)
    steps: list[Progress] = []
    whole = run(request, steps)
    assert whole.stop is not None
    assert len(whole.alternatives) == len(output(whole)) == len(steps) >= 4
    for known in range(1, len(steps) + 1):
        received = Received(request, None)
        listen = received.listener("first")
        for progress in steps[:known]:
            listen(progress)
        assert received.lose(0) == {"resumed_tokens": known}
        reason = received.end(aborted=False, expired=False)
        if reason is None:
            joined = received.complete(run(received.rest(1.0), []), 1.0)
        else:
            assert known == len(steps)
            joined = received.without_engine(reason, 1.0)
        assert output(joined) == output(whole)
        assert (joined.stop, joined.finish_reason) == (whole.stop, whole.finish_reason)
        # A prompt that holds the first tokens is computed in other batches.
        assert logprobs(joined) == pytest.approx(logprobs(whole), abs=1e-4)
        assert joined.raw_logprobs == pytest.approx(whole.raw_logprobs, abs=1e-4)
        for here, there in zip(joined.alternatives, whole.alternatives, strict=True):
            assert [token for token, _ in here] == [token for token, _ in there]


@pytest.mark.parametrize("resumed", [-1, 5, 9])
def test_a_count_that_leaves_no_prompt_is_refused(resumed: int) -> None:
    core = new_core(tiny_model())
    with pytest.raises(EngineError, match=f"resumed is {resumed}"):
        core.add(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=2), resumed=resumed))
