"""Outputs with a grammar spell what it allows, whatever else happens to their requests."""

import json
import re
from typing import Any

import msgspec
import pytest
import torch
from engine_harness import VOCAB, ask, drain, latent_model, output, tiny_model

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.sampling import constrained
from headrace.engine.types import EngineError, GenerationFailure, GenerationResult, Progress
from headrace.rollout.types import FinishReason

needs_llguidance = pytest.mark.skipif(
    not constrained.installed(), reason="llguidance is not installed (the extra 'constrained')"
)

END, THOUGHT, TAG = 95, 96, 94
PIECES = [bytes([32 + i]) for i in range(94)] + [b"<tag>", b"<end>", b"</think>"]
"""Printable ASCII, and three tokens that are no text; what they spell means nothing."""
PROMPT = (3, 1, 4, 1, 5)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "age"],
    "additionalProperties": False,
}
JSON = "start: %json " + json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
DIGITS = "start: /[0-9]{3}/"


def core(model: Any = None, **config: Any) -> EngineCore:
    fields = {"max_running": 8, "max_context": 200, "block_tokens": 8, "seed": 1}
    return EngineCore(
        tiny_model() if model is None else model,
        EngineConfig(**{**fields, **config}),
        pieces=PIECES,
        tags=(TAG, END, THOUGHT),
    )


def spelled(ids: Any) -> str:
    return b"".join(PIECES[i] for i in ids).decode()


def hot(name: str, grammar: str, seed: int, **more: Any) -> Any:
    """A request that would sample anything, were it not for its grammar."""
    fields = {"max_tokens": 80, "temperature": 4.0, "seed": seed, "stop_ids": (END,)}
    return ask(name, PROMPT, grammar=grammar, **{**fields, **more})


@needs_llguidance
@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_json_of_a_schema_beside_requests_that_are_free(temperature: float) -> None:
    engine = core()
    for seed in range(4):
        engine.add(hot(f"json-{seed}", JSON, seed, temperature=temperature))
        engine.add(ask(f"free-{seed}", PROMPT, max_tokens=30, temperature=4.0, seed=seed))
    results = drain(engine)
    alone = core()
    for seed in range(4):
        result = results[f"json-{seed}"]
        *body, last = output(result)
        assert (last, result.finish_reason) == (END, FinishReason.STOP)
        value = json.loads(spelled(body))
        assert value["kind"] in ("cat", "dog")
        assert 0 <= value["age"] <= 99
        alone.add(ask(f"free-{seed}", PROMPT, max_tokens=30, temperature=4.0, seed=seed))
    for name, result in drain(alone).items():
        assert output(results[name]) == output(result), "a neighbour's grammar changes nothing"


@needs_llguidance
def test_logprobs_are_of_what_was_drawn_from_and_raw_ones_of_the_model() -> None:
    model = tiny_model()
    engine = core(model)
    engine.add(hot("r", DIGITS, 3, temperature=1.0))
    (result,) = drain(engine).values()
    ids = output(result)
    assert re.fullmatch("[0-9]{3}<end>", spelled(ids))
    with torch.no_grad():
        rows = model(torch.tensor([[*PROMPT, *ids]]))[0]
        logits = model.logits(rows)[len(PROMPT) - 1 : -1].double()
    (span,) = result.spans
    digits = list(range(ord("0") - 32, ord("9") - 31))
    for place, (token, allowed) in enumerate(zip(ids, [digits] * 3 + [[END]], strict=True)):
        raw = logits[place].log_softmax(-1)[token].item()
        among = logits[place][allowed].log_softmax(-1)[allowed.index(token)].item()
        assert result.raw_logprobs[place] == pytest.approx(raw, abs=1e-4)
        assert span.logprobs[place] == pytest.approx(among, abs=1e-4)
    assert span.logprobs[-1] == 0.0, "nothing else could follow"


@needs_llguidance
def test_without_stop_ids_sampling_ends_where_nothing_can_follow() -> None:
    engine = core()
    engine.add(hot("r", DIGITS, 1, stop_ids=()))
    engine.add(hot("cut", DIGITS, 1, stop_ids=(), max_tokens=2))
    results = drain(engine)
    assert results["r"].finish_reason is FinishReason.STOP
    assert re.fullmatch("[0-9]{3}", spelled(output(results["r"])))
    assert results["cut"].finish_reason is FinishReason.LENGTH
    assert output(results["cut"]) == output(results["r"])[:2]


@needs_llguidance
def test_it_may_begin_behind_an_id_before_which_nothing_ends() -> None:
    engine = core()
    # Thinking ends by itself now and then, and never with the end of the output.
    bias = {THOUGHT: 6.0, END: 6.0}
    for seed in range(4):
        engine.add(hot(f"r{seed}", DIGITS, seed, grammar_after=THOUGHT, logit_bias=bias))
    lengths = []
    for result in drain(engine).values():
        ids = list(output(result))
        thought = ids[: ids.index(THOUGHT)]
        assert END not in thought
        assert re.fullmatch("[0-9]{3}<end>", spelled(ids[len(thought) + 1 :]))
        lengths.append(len(thought))
    assert max(lengths) > 0


@needs_llguidance
def test_tags_are_reached_by_number_and_never_by_what_they_spell() -> None:
    engine = core()
    engine.add(hot("number", f"start: <[{TAG}]> /[a-z]{{2}}/ <[{TAG}]>", 1))
    engine.add(hot("text", 'start: "<tag>" /[a-z]{2}/', 1))
    results = drain(engine)
    first, _, _, last, end = output(results["number"])
    assert (first, last, end) == (TAG, TAG, END)
    assert TAG not in output(results["text"])
    assert re.fullmatch("<tag>[a-z]{2}<end>", spelled(output(results["text"])))


@needs_llguidance
def test_drafts_change_nothing_and_some_stand() -> None:
    free, drafting = core(latent_model("glm_moe_dsa")), None
    drafting = core(latent_model("glm_moe_dsa"), draft_tokens=3)
    wanted = [hot(f"r{seed}", JSON, seed) for seed in range(4)]
    # One letter may follow the other, so that a guess is right now and then.
    wanted += [hot(f"g{seed}", "start: /[a-z]+/", seed, temperature=0.0) for seed in range(2)]
    for request in wanted:
        free.add(request)
        drafting.add(request)
    plain, drafted = drain(free), drain(drafting)
    for request in wanted:
        assert output(plain[request.id]) == output(drafted[request.id])
    assert drafting.stats().tokens_drafted > 0


@needs_llguidance
@pytest.mark.parametrize("policy", ["continue", "requeue"])
def test_new_weights_in_the_middle_change_nothing_of_the_form(policy: Any, tmp_path: Any) -> None:
    from headrace.model.checkpoint import save_checkpoint

    other = tiny_model(seed=1)
    save_checkpoint(other, tmp_path / "other")
    engine = core()
    engine.add(hot("r", JSON, 2))
    for _ in range(6):
        engine.step()
    engine.load_weights(str(tmp_path / "other"), 1, policy)
    (result,) = drain(engine).values()
    assert json.loads(spelled(output(result)[:-1])).keys() == {"kind", "age"}
    assert [span.weight_version for span in result.spans] == (
        [0, 1] if policy == "continue" else [1]
    )


@needs_llguidance
def test_a_request_goes_on_in_another_engine() -> None:
    engine = core()
    whole_request = hot("whole", JSON, 5)
    engine.add(whole_request)
    whole = output(drain(engine)["whole"])
    for known in (1, 7, len(whole) - 1):
        engine.add(
            msgspec.structs.replace(
                whole_request,
                id=f"rest-{known}",
                prompt_ids=(*PROMPT, *whole[:known]),
                resumed=known,
                sampling=msgspec.structs.replace(whole_request.sampling, max_tokens=80 - known),
            )
        )
    for name, result in drain(engine).items():
        assert output(result) == whole[int(name.removeprefix("rest-")) :]


@needs_llguidance
def test_a_text_that_no_token_spells_fails_its_request_alone() -> None:
    engine = core()
    engine.add(hot("stuck", 'start: "ab" /[äö]/', 1))
    engine.add(hot("fine", DIGITS, 1))
    told: dict[str, GenerationFailure | GenerationResult] = {}
    while engine.has_work:
        for item in engine.step():
            assert not isinstance(item, Progress)
            told[item.id] = item
    failure, fine = told["stuck"], told["fine"]
    assert isinstance(failure, GenerationFailure)
    assert failure.code == EngineError.FAILED
    assert "goes on with its grammar" in failure.message
    assert isinstance(fine, GenerationResult)
    engine.add(hot("later", DIGITS, 2))
    assert drain(engine)["later"].finish_reason is FinishReason.STOP
    assert engine.stats().blocks_cached > 0, "what was computed is not given up"


@needs_llguidance
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"grammar": "start: /[/"}, "grammar cannot be read: "),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": 'start: %json {"type": "wizard"}'}, "grammar cannot be read: "),
        ({"grammar": "start: " + '"x" ' * 20_000}, "grammar has 80007 bytes; at most 65536"),
        ({"grammar": DIGITS, "min_tokens": 2}, "min_tokens is 2; it must be 0 with a grammar"),
        ({"grammar": DIGITS, "grammar_after": VOCAB}, f"grammar_after is {VOCAB}"),
        ({"grammar": "\ud800"}, "lone surrogate"),
    ],
)
def test_what_cannot_be_followed_is_refused(more: dict[str, Any], words: str) -> None:
    engine = core()
    with pytest.raises(EngineError, match=re.escape(words)) as caught:
        engine.add(ask("r", PROMPT, **more))
    assert caught.value.code == EngineError.INVALID
    assert not engine.has_work


@needs_llguidance
def test_an_engine_that_does_not_know_its_tokens_says_so() -> None:
    engine = EngineCore(tiny_model(), EngineConfig(max_context=64))
    with pytest.raises(EngineError, match="does not know what its tokens spell"):
        engine.add(hot("r", DIGITS, 1))


def test_where_it_is_not_installed_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrained, "installed", lambda: False)
    with pytest.raises(EngineError, match=re.escape("pip install 'headrace[constrained]'")):
        core().add(hot("r", DIGITS, 1))
