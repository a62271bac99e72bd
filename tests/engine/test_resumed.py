"""A request that another engine began goes on as if it had always been here."""

import msgspec
import pytest
from engine_harness import drain, latent_model, new_core, output, tiny_model

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import EngineError, GenerationRequest, SamplingParams

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


@pytest.mark.parametrize("resumed", [-1, 5, 9])
def test_a_count_that_leaves_no_prompt_is_refused(resumed: int) -> None:
    core = new_core(tiny_model())
    with pytest.raises(EngineError, match=f"resumed is {resumed}"):
        core.add(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=2), resumed=resumed))
