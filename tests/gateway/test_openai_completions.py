"""Completions through their official client: texts and token ids continued as they are."""

import openai
import pytest
from api_rig import TOKENIZER, Running
from openai import AsyncOpenAI
from scripted import answers


async def test_completions_continue_a_text_and_their_own_tokens(
    running: Running, client: AsyncOpenAI
) -> None:
    running.engine.script = answers(TOKENIZER.encode_text("é, two"))
    first = await client.completions.create(model="tiny", prompt="one", max_tokens=9, logprobs=0)
    assert first.choices[0].text == "é, two"
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].logprobs is not None
    path = [*TOKENIZER.encode("one"), *TOKENIZER.encode_text("é, two")]
    await client.completions.create(model="tiny", prompt=[*path, 5])
    assert running.calls[1].parent_id == "s/0"
    assert running.calls[1].prompt_delta == (5,)
    stream = await client.completions.create(model="tiny", prompt="one", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "é, two"
    rare = {"min_p": 0.25, "repetition_penalty": 1.5, "top_k": -1}
    await client.completions.create(model="tiny", prompt="x", top_p=0.5, extra_body=rare)
    sampling = running.engine.requests[-1].sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.top_k) == (0.25, 1.5, 0)
    assert (sampling.top_p, sampling.temperature, sampling.max_tokens) == (0.5, 1.0, 16)
    for fields in ({"echo": True, "stream": True}, {"suffix": "x"}, {"best_of": 3}):
        with pytest.raises(openai.BadRequestError, match="not supported"):
            await client.completions.create(model="tiny", prompt="x", **fields)  # type: ignore[call-overload]
