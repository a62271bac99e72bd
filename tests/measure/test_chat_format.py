"""The chat format's measurement: which turns are asked, and that wrong and missing ones count."""

from collections.abc import Sequence

import pytest

from headrace.data.assistant import held_out
from headrace.engine.types import GenerationRequest, GenerationResult
from headrace.measure import format as measured
from headrace.measure.format import chat_examples, chat_format
from headrace.measure.worker import MeasureWorker
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder
from headrace.rollout.types import FinishReason, Span
from headrace.tokens.format_check import FormatExample, format_example
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.thinking import message_weight, sampled_turn


def turns(renderer: ChatRenderer, count: int) -> list[tuple[FormatExample, list[int]]]:
    """Held-out turns and what a finished conversation says there."""
    found = []
    for c in held_out(0, count):
        for i, message in enumerate(c.messages):
            if message_weight(message, "x"):
                messages = c.messages[: i + 1]
                right = sampled_turn(renderer, messages, c.tools, c.mode).completion
                found.append((format_example(renderer, messages, c.tools, c.mode), right))
    return found


def scripted(answers: Sequence[list[int]]) -> type:
    """An engine core that answers request number i with `answers[i]`, the last one first."""

    class Core:
        def __init__(self, model: object, config: object) -> None:
            self.waiting: list[GenerationRequest] = []

        def add(self, request: GenerationRequest) -> None:
            assert request.sampling.temperature == 0
            self.waiting.append(request)

        @property
        def has_work(self) -> bool:
            return bool(self.waiting)

        def step(self) -> list[GenerationResult]:
            request = self.waiting.pop()
            ids = tuple(answers[int(request.id)][: request.sampling.max_tokens])
            spans = (Span(ids, (0.0,) * len(ids), 0, "engine-0"),) if ids else ()
            return [GenerationResult(request.id, spans, FinishReason.STOP)]

    return Core


def test_right_turns_follow_and_prompts_without_room_do_not(renderer, model, monkeypatch):
    examples, answers = zip(*turns(renderer, 8), strict=True)
    monkeypatch.setattr(measured, "EngineCore", scripted(answers))
    lengths = sorted(len(e.prompt_ids) for e in examples)
    everything = chat_format(
        model, renderer, examples, max_context=lengths[-1] + 1, max_tokens=1000
    )
    assert (everything.count, everything.following) == (len(examples), 1.0)
    middle = lengths[len(lengths) // 2]
    shares: list[float] = []
    some = chat_format(
        model,
        renderer,
        examples,
        max_context=middle,
        max_tokens=1000,
        progress=shares.append,
    )
    assert some.following == pytest.approx(sum(n < middle for n in lengths) / len(lengths))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    none = chat_format(model, renderer, examples, max_context=lengths[0], max_tokens=1000)
    assert (none.count, none.following) == (len(examples), 0.0)


def test_turns_cut_short_do_not_follow(renderer, model, monkeypatch):
    examples, answers = zip(*turns(renderer, 4), strict=True)
    monkeypatch.setattr(measured, "EngineCore", scripted(answers))
    report = chat_format(model, renderer, examples, max_context=4000, max_tokens=1)
    assert report.rates["ended"] == 0.0


def test_a_real_engine_writes_the_turns(renderer, model: Decoder):
    examples = sorted(chat_examples(renderer, 12), key=lambda e: len(e.prompt_ids))[:3]
    assert len(examples[-1].prompt_ids) < 1000
    reports = [
        chat_format(model, renderer, examples, max_context=1024, max_tokens=4) for _ in range(2)
    ]
    assert reports[0] == reports[1]
    assert reports[0].count == 3


@pytest.mark.parametrize("count", [1, 5, 17])
def test_as_many_examples_as_asked_and_always_the_same(renderer, count):
    examples = chat_examples(renderer, count)
    assert len(examples) == count
    assert examples == chat_examples(renderer, count)
    if count > 5:
        prompts = [renderer.decode(e.prompt_ids) for e in examples]
        assert any("<|observation|>" in p for p in prompts)  # turns after tool results
        assert any("<|observation|>" not in p for p in prompts)


def test_the_measuring_process_serves_a_checkpoint(tokenizer, model, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    save_checkpoint(model, tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"file {i}: naïve 漢字 {i * i}")
    worker = MeasureWorker(None)  # type: ignore[arg-type]  # no request comes through it
    assert worker._do_load(str(tmp_path / "model")) == 1024
    corpus = {"source": str(tmp_path / "text"), "held_out": 0.5}
    text = worker._do_text(corpus, context=4096, max_bytes=60)
    assert 0 < text["text_bytes"] <= 60
    assert text["bits_per_byte"] > 0
    found = worker._do_retrieval(length=80, keys=1, examples=2, seed=0, letters=2, digits=3)
    assert (found["length"], found["examples"]) == (80, 2)
    report = worker._do_format("auto", examples=2, max_context=100_000, max_tokens=2)
    assert report["count"] == 2
