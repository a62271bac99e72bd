"""Stop texts end a request at the token that completes them, wherever tokens are cut."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_harness import (
    VOCAB,
    Oracle,
    ask,
    drain,
    greedy_reference,
    latent_model,
    new_core,
    output,
    random_prompt,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.core import EngineCore
from headrace.engine.sampling.stops import StopMatcher
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.rollout.types import FinishReason

torch.set_num_threads(1)

PIECES = [bytes([65 + i % 26]) * (1 + i // 26) for i in range(VOCAB - 7)]
"""Of test models' ids: A to Z, AA to ZZ and so on; the last seven ids spell nothing."""


def spelled(ids: Sequence[int]) -> bytes:
    return b"".join(PIECES[i] for i in ids if i < len(PIECES))


def first_stop(
    ids: Sequence[int], stops: Sequence[str], pieces: Sequence[bytes], after: int = 0
) -> tuple[int, str] | None:
    """By brute force: tokens up to the first completed text, of at least `after`, and the text."""
    text = b""
    for count, token in enumerate(ids, 1):
        before, text = len(text), text + (pieces[token] if token < len(pieces) else b"")
        ends = [
            (end, number)
            for number, stop in enumerate(stops)
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(stop.encode())
        ]
        if ends and count >= after:
            return count, stops[min(ends)[1]]
    return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("abé", max_size=4), min_size=1, max_size=5),
    tokens=st.lists(st.integers(0, 6), max_size=40),
    stops=st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=4),
    cut=st.integers(1, 3),
)
def test_the_first_completed_text_is_found(
    pieces: list[str], tokens: list[int], stops: list[str], cut: int
) -> None:
    # Characters of two bytes may be cut in half.
    parts = [part.encode()[i : i + cut] for part in pieces for i in (0, cut)]
    matcher = StopMatcher(stops, parts)
    for _ in range(2):
        found = None
        for count, token in enumerate(tokens, 1):
            stop = matcher.feed(token)
            if stop is not None:
                found = (count, stop)
                break
        assert found == first_stop(tokens, stops, parts)
        matcher.restart()


def spelling_core(**config: object) -> EngineCore:
    core = new_core(tiny_model(), **config)
    return EngineCore(core.model, core.config, pieces=PIECES)


def some_stops(text: bytes) -> list[str]:
    """What lies across tokens, ends inside one, or never comes."""
    middle = len(text) // 2
    return [text[middle : middle + 3].decode(), text[-2:].decode(), "never"]


def varied(name: str, seed: int, **sampling: object) -> GenerationRequest:
    """Sampled so hot that a test model's text does not go round in circles."""
    options = {"max_tokens": 24, "temperature": 12.0, "seed": seed, **sampling}
    return ask(name, random_prompt(seed, 9 + seed), **options)  # type: ignore[arg-type]  # a shorthand


def run(core: EngineCore, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    for request in requests:
        core.add(request)
    return drain(core)


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("minimum", [0, 14])
def test_requests_end_where_their_text_is_complete(drafts: int, minimum: int) -> None:
    model = latent_model("glm_moe_dsa") if drafts else tiny_model()
    requests = [varied(f"r{i}", i) for i in range(8)]
    core = EngineCore(model, new_core(model, draft_tokens=drafts).config, pieces=lambda: PIECES)
    plain = {name: output(result) for name, result in run(core, requests).items()}
    if drafts:
        oracle = Oracle(model, {}, 0)
        oracle.texts = {r.id: (*r.prompt_ids, *plain[r.id]) for r in requests}
        core._drafter = oracle  # type: ignore[assignment]  # a stand-in
    stops = {name: some_stops(spelled(ids)) for name, ids in plain.items()}
    results = run(
        core,
        [varied(f"r{i}", i, min_tokens=minimum, stop=tuple(stops[f"r{i}"])) for i in range(8)],
    )
    ended = 0
    for name, result in results.items():
        count, stop = first_stop(plain[name], stops[name], PIECES, minimum) or (24, None)
        assert output(result) == plain[name][:count]
        assert result.stop == stop
        assert result.finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
        ended += 0 < count < 24
    assert ended >= 4
    if drafts:
        assert core.stats().tokens_accepted > 8
    assert core.stats().blocks_free + core.stats().blocks_cached == core.stats().blocks


def test_a_restarted_request_searches_its_new_output_alone(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(1), tmp_path / "new")
    old = output(run(new_core(tiny_model(0)), [varied("r", 3)])["r"])
    new = output(run(new_core(tiny_model(1)), [varied("r", 3)])["r"])
    # Complete if the two were one text.
    stop = (spelled(old[:6])[-2:] + spelled(new[:1])).decode()
    assert first_stop(new, [stop], PIECES) is None
    core = spelling_core()
    core.add(varied("r", 3, stop=(stop,)))
    for _ in range(6):
        core.step()
    core.load_weights(str(tmp_path / "new"), 1, "requeue")
    result = drain(core)["r"]
    assert output(result) == new
    assert result.finish_reason is FinishReason.LENGTH
    assert core.stats().requests_restarted == 1


def test_the_prompt_is_not_searched_and_stop_ids_still_count() -> None:
    prompt = random_prompt(4, 10)
    plain = greedy_reference(tiny_model(), prompt, 3)
    core = spelling_core()
    core.add(ask("r", prompt, max_tokens=3, stop=(spelled(prompt)[:3].decode(),)))
    core.add(ask("s", prompt, max_tokens=3, stop=("never",), stop_ids=plain[:1]))
    results = drain(core)
    assert output(results["r"]) == plain
    assert (output(results["s"]), results["s"].stop) == (plain[:1], None)


def test_what_cannot_be_searched_is_refused() -> None:
    core = spelling_core()
    for stop, problem in (
        (("",), "of 0 bytes; it must have 1 to 256"),
        (("é" * 129,), "of 258 bytes"),
        (("x",) * 17, "17 texts; at most 16"),
        (("\ud800",), "lone surrogate"),
    ):
        with pytest.raises(EngineError, match=problem) as caught:
            core.add(ask("r", (1,), stop=stop))
        assert caught.value.code == EngineError.INVALID
    with pytest.raises(EngineError, match="does not know what its tokens spell") as caught:
        new_core(tiny_model()).add(ask("r", (1,), stop=("x",)))
    assert caught.value.code == EngineError.INVALID

    def missing() -> list[bytes]:
        raise UserError("no tokenizer.json there")

    lacking = EngineCore(tiny_model(), new_core(tiny_model()).config, pieces=missing)
    lacking.add(ask("plain", (1,)))
    with pytest.raises(EngineError, match=r"stop cannot be used here: no tokenizer\.json"):
        lacking.add(ask("r", (1,), stop=("x",)))
