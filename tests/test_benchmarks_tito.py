"""The benchmark of exact tokens against re-tokenised text: its detour, alignment and RL problem."""

import pytest
import torch

import respelling
import tito_vs_text as bench
from conversations import Answer, Conversation
from headrace.tasks.terminal.agent import TOOLS
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.messages import normalise
from headrace.tokens.training import train_tokenizer
from retokenising import (
    Rollout,
    Turn,
    aligned_pairs,
    assistant_message,
    encoded_again,
    errors,
    exact,
    from_text,
    look_at,
)

TEXT = "count the lines of notes and answer"


@pytest.fixture(scope="module")
def renderer() -> CompactRenderer:
    return CompactRenderer(train_tokenizer([TEXT] * 20 + ['{"command": "ls"}'] * 20, 340))


def rolled(renderer: CompactRenderer, *sampled: list[int]) -> Rollout:
    """A conversation whose answers are given."""
    asked = normalise([{"role": "user", "content": "count"}])
    one = Rollout(Conversation(), [], asked, TOOLS)
    added = renderer.render(asked, TOOLS)
    for ids in sampled:
        one.held.read(added)
        answer = Answer(ids, [-0.5] * len(ids))
        one.held.wrote(answer)
        one.answers.append(answer)
        said = assistant_message(renderer.parse(one.held.before, ids, TOOLS))
        calls = said.get("tool_calls", ())
        after = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
        new = normalise([said, *(after or [{"role": "user", "content": "again"}])])
        one.messages.extend(new)
        bridge = renderer.bridge(one.held.before, ids, new[1:], TOOLS)
        assert bridge is not None
        added = bridge
    last = max(i for i, m in enumerate(one.messages) if m["role"] == "assistant")
    return one._replace(messages=one.messages[: last + 1])


def only_turn(renderer: CompactRenderer, ids: list[int]) -> Turn:
    one = rolled(renderer, ids)
    (turn,) = look_at(one, from_text(one, renderer), renderer)
    return turn


def test_what_text_would_spell_the_same_way_comes_back_unchanged(renderer):
    special = renderer.tokenizer.special_ids
    encode = renderer.tokenizer.encode_text
    call = [special["<tool_call>"], *encode("bash"), special["<arg_key>"], *encode("command")]
    call += [special["</arg_key>"], special["<arg_value>"], *encode("ls"), special["</arg_value>"]]
    call += [special["</tool_call>"], special["<|observation|>"]]
    one = rolled(renderer, call, [*encode("the lines"), special["<|user|>"]])
    text = from_text(one, renderer)
    assert (text.ids, text.turns) == (exact(one).ids, exact(one).turns)
    first, second = look_at(one, text, renderer)
    assert (first.differs, first.calls, second.differs, second.calls) == (False, True, False, False)


def test_every_cause_is_told_apart(renderer):
    special = renderer.tokenizer.special_ids
    encode, stop = renderer.tokenizer.encode_text, special["<|user|>"]
    letters = [i for letter in "lines" for i in encode(letter)]
    assert letters != encode("lines")
    assert encoded_again([*letters, stop], renderer) == [*encode("lines"), stop]
    assert only_turn(renderer, [*letters, stop]) == Turn(True, True, False, False, False, False)
    half = renderer.tokenizer.encode_text("é")[:1]
    lost = only_turn(renderer, [*half, stop])
    assert (lost.differs, lost.bytes_lost, lost.remerged) == (True, True, False)
    spelt = only_turn(renderer, [*encode("a"), special["<arg_key>"], stop])
    assert (spelt.differs, spelt.specials_spelt, spelt.reserialised) == (True, True, False)
    stopped = only_turn(renderer, [*encode("lines"), special["<|observation|>"]])
    assert (stopped.differs, stopped.reserialised, stopped.remerged) == (True, True, False)


def test_a_cut_turn_gets_no_stop_token_to_train_on(renderer):
    one = rolled(renderer, renderer.tokenizer.encode_text("lines"))
    text = from_text(one, renderer)
    assert [text.ids[p] for p in text.turns[0]] == one.answers[0].ids
    assert not look_at(one, text, renderer)[0].differs


def test_errors_compare_tokens_with_their_own_recorded_logprob(renderer):
    encode, stop = renderer.tokenizer.encode_text, renderer.tokenizer.special_ids["<|user|>"]
    letters = [i for letter in "lines" for i in encode(letter)]
    one = rolled(renderer, [*letters, stop])
    assert aligned_pairs([1, 2, 3, 9], [7, 3, 9]) == [(2, 1), (3, 2)]
    text = from_text(one, renderer)
    found = errors(one, text, [[-2.0] * (len(text.turns[0]) - 1) + [-0.75]])
    assert found.aligned == [0.25]  # the stop token alone is the same
    assert found.trained == len(text.turns[0])
    assert found.by_position == [1.5] * (found.trained - 1) + [0.25]
    assert found.whole == pytest.approx(abs(-2.0 * (found.trained - 1) - 0.75 + 0.5 * 6))
    same = errors(one, exact(one), [[-0.5] * len(one.answers[0].ids)])
    assert (same.aligned, same.whole) == ([0.0] * 6, 0.0)


def test_answers_have_many_spellings_and_rewards_know_none():
    spelling = respelling.spelling()
    one_by_one = [i for letter in "dcba" for i in spelling.encode(letter)]
    assert len(one_by_one) == 4 > len(spelling.encode("dcba"))
    assert spelling.decode(one_by_one) == spelling.decode(spelling.encode("dcba")) == "dcba"
    assert respelling.reward_of("ABCD", "dcba") == 1.0
    assert respelling.reward_of("ABCD", "dc") == 0.5
    assert respelling.reward_of("ABCD", "dcbaa") == pytest.approx(0.8)


def test_variants_differ_in_what_the_trainer_is_given():
    policy = respelling.new_policy(0)
    prompts = respelling.new_prompts(16, torch.Generator().manual_seed(0))
    answers = respelling.roll_out(policy, prompts, torch.Generator().manual_seed(0))
    given = {v: respelling.trained_as(v, policy, prompts, answers) for v in respelling.VARIANTS}
    assert given["tokens"] == [(a.ids, a.logprobs) for a in answers]
    sampled = respelling.score(policy, prompts, [a.ids for a in answers])
    for answer, own, (ids, logprobs), (same, laid) in zip(
        answers, sampled, given["text"], given["text_by_position"], strict=True
    ):
        assert own == pytest.approx(answer.logprobs, abs=1e-5)
        assert ids == same == respelling.spelt_as_text(answer)
        assert len(ids) == len(logprobs) == len(laid)
        if ids == answer.ids:
            assert logprobs == pytest.approx(laid, abs=1e-5)
    assert any(ids != a.ids for a, (ids, _) in zip(answers, given["text"], strict=True))


@pytest.mark.parametrize("variant", respelling.VARIANTS)
def test_every_variant_trains(variant):
    one = respelling.run(respelling.Job(variant, 0, 0, 2, 2, 4, 1e-3))
    assert 0.0 <= one.final <= 1.0
    assert 0.0 < one.respelt < 1.0
    assert (one.masked > 0.0) == (variant == "text_by_position")


def test_rollouts_can_be_of_older_weights():
    one = respelling.run(respelling.Job("tokens", 4, 0, 12, 4, 4, 1e-2))
    assert one.masked > 0.0


def test_intervals_are_students_and_differences_are_paired():
    low, mid, high = 0.25, 0.5, 0.75
    mean, least, most = bench.interval([low, mid, high])
    assert (mean, most - mean) == (mid, pytest.approx(4.303 * 0.25 / 3**0.5))
    assert mean - least == pytest.approx(most - mean)
    outcomes = [respelling.Outcomes(r, r, 0.1, 0.0) for r in (low, mid, high)]
    worse = [one._replace(final=one.final - 0.1) for one in outcomes]
    metrics = bench.summarise_rewards(
        {("tokens", 0): outcomes, ("text", 0): worse}
        | {("tokens", 8): worse, ("text_by_position", 8): worse}
    )
    assert metrics["reward_difference_text"] == pytest.approx(0.1)
    assert metrics["reward_difference_text_high"] == pytest.approx(0.1)
    assert metrics["progress_difference_text_by_position_lag8_low"] == 0.0
