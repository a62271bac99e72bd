"""Retrieval documents: exact ids and spans, true answers, keys kept from training."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.retrieval import (
    FILLER,
    RetrievalSpec,
    RetrievalWriter,
    is_held_out_key,
    retrieval_example,
    retrieval_examples,
)
from headrace.errors import UserError
from headrace.tokens.training import train_tokenizer

TOKENIZER = train_tokenizer(
    [*FILLER[::7], *["The value of QXB is 4821.\nWhat is the value of QXB?\n"] * 50], 500
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 2**40),
    target=st.integers(300, 900),
    keys=st.integers(1, 8),
    queries=st.integers(1, 8),
    split=st.sampled_from(["train", "held_out"]),
    depth=st.none() | st.floats(0, 1),
)
def test_examples(seed, target, keys, queries, split, depth):
    queries = min(queries, keys)
    example = retrieval_example(
        seed, target, keys, TOKENIZER, split=split, queries=queries, depth=depth
    )
    facts = dict(re.findall(r"^The value of ([A-Z]+) is (\d+)\.$", example.text, re.M))
    asked = re.findall(r"^What is the value of ([A-Z]+)\? (\d+)$", example.text, re.M)
    assert len(facts) == keys
    assert len(dict(asked)) == queries
    assert all(facts[key] == value for key, value in asked)
    assert all(is_held_out_key(key) == (split == "held_out") for key in facts)
    # The spans are the answers, and the ids are what encoding the text gives.
    values = [TOKENIZER.decode(example.ids[a:b].tolist()) for a, b in example.answers]
    assert values == [value for _, value in asked]
    assert example.ids.tolist() == TOKENIZER.encode_text(example.text)
    assert example.ids.dtype == np.int32
    longest = max(len(TOKENIZER.encode_text(line)) for line in FILLER)
    assert target - longest < len(example.ids) <= target
    assert TOKENIZER.decode(example.ids[: example.answer_start].tolist()).endswith(
        f"What is the value of {asked[-1][0]}? "
    )
    assert example.answer_ids.tolist() == TOKENIZER.encode_text(asked[-1][1])
    if depth is not None:
        assert abs(example.depth - depth) < 0.35
    weights = example.weights(answer=3.0, context=0.5)
    inside = {t for a, b in example.answers for t in range(a, b)}
    assert weights.tolist() == [3.0 if t in inside else 0.5 for t in range(len(example.ids))]


def test_equal_seeds_equal_documents_and_others_differ():
    first = retrieval_example(5, 400, 3, TOKENIZER)
    again = retrieval_example(5, 400, 3, TOKENIZER)
    assert first.text == again.text
    assert first.answers == again.answers
    assert retrieval_example(6, 400, 3, TOKENIZER).text != first.text
    assert retrieval_example(5, 400, 3, TOKENIZER, split="held_out").text != first.text


def test_depth_places_the_needle():
    ends = [retrieval_example(1, 600, 1, TOKENIZER, depth=d).depth for d in (0.0, 0.5, 1.0)]
    assert ends[0] == 0.0
    assert ends[1] == pytest.approx(0.5, abs=0.1)
    assert ends[2] > 0.9


def test_own_filler_is_used():
    writer = RetrievalWriter(TOKENIZER, filler=["return x\n"], key_letters=4, value_digits=2)
    text = writer.example(0, 200, 2).text
    assert text.count("return x\n") > 20
    assert re.search(r"The value of [A-Z]{4} is \d{2}\.\n", text)


def test_spec_draws_sizes_in_its_ranges():
    spec = RetrievalSpec(tokens=(200, 300), keys=(2, 4), queries=3)
    examples = list(retrieval_examples(spec, TOKENIZER, 30, seed=1))
    assert {len(example.answers) for example in examples} == {2, 3}
    assert all(150 < len(example.ids) <= 300 for example in examples)
    assert len({example.text for example in examples}) == 30
    again = list(retrieval_examples(spec, TOKENIZER, 30, seed=1))
    assert [e.text for e in again] == [e.text for e in examples]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_target": 20}, "tokens_target = 20: 4 facts and 1 questions alone need"),
        ({"queries": 5}, "queries = 5: must be 1 to keys = 4"),
        ({"split": "test"}, "split 'test': use 'train' or 'held_out'"),
        ({"depth": 1.5}, r"depth = 1\.5: must be 0 to 1"),
        ({"keys": 5000}, "keys = 5000: at most 1098; raise key_letters"),
    ],
)
def test_impossible_examples_are_user_errors(arguments: dict, message: str):
    arguments = {"seed": 0, "tokens_target": 300, "keys": 4, **arguments}
    with pytest.raises(UserError, match=message):
        retrieval_example(**arguments, tokenizer=TOKENIZER)


def test_bad_specs():
    with pytest.raises(UserError, match="filler is empty"):
        RetrievalWriter(TOKENIZER, filler=[])
    with pytest.raises(UserError, match="key_letters = 1: must be 2 to 8"):
        RetrievalWriter(TOKENIZER, key_letters=1)
    with pytest.raises(UserError, match=r"tokens = \[9, 3\]"):
        RetrievalSpec(tokens=(9, 3))
    with pytest.raises(UserError, match="must not be negative"):
        RetrievalSpec(answer_weight=-1.0)
