"""Each sampling parameter does what transformers or the OpenAI API define, in the stated order."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.engine.checks import check
from headrace.engine.sampling.batch import SamplingBatch
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from headrace.rollout.types import FinishReason, Span

VOCAB = 60


def oracle(p: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    """[V] probabilities through transformers; OpenAI's penalties by their formula."""
    ids = torch.LongTensor([prompt + output])
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if p.logit_bias:
        before.append(
            SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in p.logit_bias.items()])
        )
    before.append(RepetitionPenaltyLogitsProcessor(float(p.repetition_penalty)))
    scores = before(ids, logits[None].float())
    for token, count in Counter(output).items():
        scores[0, token] -= p.frequency_penalty * count + p.presence_penalty
    if p.stop_ids:
        after.append(MinNewTokensLengthLogitsProcessor(len(prompt), p.min_tokens, list(p.stop_ids)))
    if p.temperature:
        after.append(TemperatureLogitsWarper(float(p.temperature)))
        if p.top_k:
            after.append(TopKLogitsWarper(p.top_k))
        if p.top_p < 1:
            after.append(TopPLogitsWarper(p.top_p))
        if p.min_p:
            after.append(MinPLogitsWarper(p.min_p))
    return torch.softmax(after(ids, scores)[0], -1)


def agree(p: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]) -> None:
    batch = SamplingBatch([p], [5], [len(output)], [prompt], [output])
    got = batch.distribution(logits[None])[0]
    want = oracle(p, logits, prompt, output)
    assert torch.equal(got > 0, want > 0), p
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    draw = batch.sample(logits[None])
    token = int(draw.ids)
    assert want[token] > 0
    assert float(draw.logprobs) == pytest.approx(math.log(want[token]), abs=1e-4)
    if p.temperature == 0:
        assert token == int(want.argmax())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {3: 5.0}},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.4},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -1.0},
        {"logit_bias": {0: 100.0, 9: -100.0, 59: 1.5}},
        {"min_tokens": 6, "stop_ids": (0, 4)},
        {"min_tokens": 5, "stop_ids": (0, 4)},
        {"min_tokens": 6, "stop_ids": (4, VOCAB + 7)},
    ],
)
def test_one_parameter(changes: dict[str, object]) -> None:
    torch.manual_seed(1)
    p = SamplingParams(**{"max_tokens": 9, **changes})  # type: ignore[arg-type]  # a shorthand
    agree(p, torch.randn(VOCAB) * 2, [1, 2, 3, 3, 50], [3, 4, 4, 4, 51])


sampling = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    top_k=st.sampled_from([0, 2, 11, 100]),
    min_p=st.sampled_from([0.0, 0.03, 0.3]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.2]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.9]),
    frequency_penalty=st.sampled_from([-0.3, 0.0, 0.6]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 0.5, 3.0])),
    stop_ids=st.sampled_from([(), (3,), (3, 8, 40)]),
    min_tokens=st.sampled_from([0, 2, 10]),
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sampling, st.integers(0, 10**6), tokens.filter(bool), tokens)
def test_all_together(p: SamplingParams, seed: int, prompt: list[int], output: list[int]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    agree(p, logits, prompt, output)


def test_penalties_follow_what_is_drawn() -> None:
    """A batch that lives on knows what a batch built anew from all ids so far knows."""
    torch.manual_seed(2)
    p = SamplingParams(
        max_tokens=99, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    )
    plain = SamplingParams(max_tokens=99)
    prompt, output = [1, 2], [2, 9]
    living = SamplingBatch([plain, p], [0, 3], [0, 2], [[], prompt], [[], output])
    for _ in range(90):
        logits = torch.randn(2, 200)
        anew = SamplingBatch([p], [3], [len(output)], [prompt], [output])
        assert torch.equal(living.distribution(logits)[1], anew.distribution(logits[1:])[0])
        token = int(living.sample(logits).ids[1])
        assert token == int(anew.sample(logits[1:]).ids)
        output.append(token)
    assert len(set(output)) > 66, "the arrays never grew"


def test_draws_made_elsewhere_are_observed() -> None:
    p = SamplingParams(max_tokens=9, frequency_penalty=2.0, min_tokens=2, stop_ids=(1,))
    batch = SamplingBatch([p], [0], [0], None, [[]])
    flat = torch.zeros(1, 4)
    for seen in (2, 2):
        assert float(batch.distribution(flat)[0, 1]) == 0
        batch.observe([seen])
    expected = torch.softmax(torch.tensor([0.0, 0.0, -4.0, 0.0]), -1)
    torch.testing.assert_close(batch.distribution(flat)[0], expected)


def test_penalties_without_the_ids_they_need_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has a repetition penalty but no prompt ids"):
        SamplingBatch(
            [SamplingParams(1), SamplingParams(1, repetition_penalty=1.1)], [0, 0], [0, 0]
        )
    with pytest.raises(ValueError, match="drew 3 tokens, but 0 output ids"):
        SamplingBatch([SamplingParams(1, presence_penalty=1.0)], [0], [3])


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9}, "max_tokens, which is 8"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-9}, "use 0 for greedy"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": NAN}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": NAN}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias names id {VOCAB}"),
        ({"logit_bias": {3: float("-inf")}}, "logit_bias of id 3 is -inf"),
        ({"stop_ids": (3, -1)}, "stop_ids holds -1"),
        ({"stop_ids": tuple(range(VOCAB)), "min_tokens": 1}, "the whole vocabulary"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ],
)
def test_what_cannot_be_sampled_is_refused(changes: dict[str, object], message: str) -> None:
    p = SamplingParams(**{"max_tokens": 8, **changes})  # type: ignore[arg-type]  # a shorthand
    with pytest.raises(EngineError, match=message) as refused:
        check(GenerationRequest("r", (1,), p), vocab=VOCAB, max_context=100)
    assert refused.value.code == EngineError.INVALID


def test_the_extremes_of_every_range_are_allowed() -> None:
    for p in (
        SamplingParams(8, min_p=1.0, repetition_penalty=100.0, presence_penalty=2.0, min_tokens=8),
        SamplingParams(8, stop_ids=tuple(range(1, VOCAB + 1)), min_tokens=1),
        SamplingParams(
            1,
            temperature=0.0,
            repetition_penalty=0.01,
            frequency_penalty=-2.0,
            logit_bias={0: -100.0, VOCAB - 1: 100.0},
            logprobs=20,
            prompt_logprobs=0,
        ),
    ):
        check(GenerationRequest("r", (1,), p), vocab=VOCAB, max_context=100)


def test_results_with_data_of_different_lengths_are_refused() -> None:
    spans = (Span((1, 2), (-1.0, -1.0), 0, "e"),)
    GenerationResult("r", spans, FinishReason.STOP, raw_logprobs=(-1.0, -2.0))
    for field in ("raw_logprobs", "alternatives"):
        with pytest.raises(ValueError, match=f"2 output ids but 1 {field}"):
            GenerationResult("r", spans, FinishReason.STOP, **{field: (-1.0,)})  # type: ignore[arg-type]  # by name
    with pytest.raises(ValueError, match="1 prompt_logprobs but 2 prompt_alternatives"):
        GenerationResult(
            "r", spans, FinishReason.STOP, prompt_logprobs=(NAN,), prompt_alternatives=((), ())
        )
