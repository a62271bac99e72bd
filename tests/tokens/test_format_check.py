"""Format scores: each aspect fails alone, and reports add up."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokens.compact import CompactRenderer
from headrace.tokens.format_check import (
    Expectation,
    ExpectedCall,
    FormatExample,
    FormatScore,
    accepts,
    check_completion,
    evaluate_format,
    format_examples,
    score_completions,
)
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.thinking import ThinkingMode
from headrace.tokens.training import train_tokenizer

TOKENIZER = train_tokenizer(["read a file, how many lines? 12 lines"] * 9, 300)
GLM = LibraryRenderer("glm-5", TOKENIZER)
READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["path"],
        },
    },
}
SAYS_12 = Expectation(thinking=False, answer="12")
THINKS_12 = Expectation(thinking=True, answer="12")
READS_A = Expectation(thinking=True, calls=(ExpectedCall("read", {"path": "a"}),))


def call(name="read", **arguments):
    return f"<tool_call>{name}" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    )


CALL = call(path="a") + "</tool_call>"


def prompt(expectation):
    tag = "<think>" if expectation.thinking else "</think>"
    return TOKENIZER.encode(f"[gMASK]<sop><|user|>how many?<|assistant|>{tag}")


def wrong(expectation, text, renderer: ChatRenderer = GLM):
    """Names of the aspects that fail."""
    score = check_completion(
        renderer, prompt(expectation), TOKENIZER.encode(text), [READ], expectation
    )
    aspects = {name: getattr(score, name) for name in FormatScore.__struct_fields__}
    failed = {name for name, right in aspects.items() if not right}
    assert score.following == (not failed - {"correct"})
    return failed


@pytest.mark.parametrize(
    ("expectation", "text", "failed"),
    [
        (SAYS_12, "12<|user|>", set()),
        (SAYS_12, " 12\n<|user|>", set()),
        (SAYS_12, "13<|user|>", {"correct"}),
        (SAYS_12, "12<|observation|>", {"ended"}),
        (SAYS_12, "12<|endoftext|>", {"ended"}),
        (SAYS_12, "12", {"parsed", "thinking", "call", "ended", "correct"}),
        (SAYS_12, "<|user|>", {"call", "correct"}),
        (SAYS_12, "", {"parsed", "thinking", "call", "ended", "correct"}),
        (SAYS_12, "<think>so</think>12<|user|>", {"thinking"}),
        (SAYS_12, "12<arg_key><|user|>", {"parsed", "correct"}),
        (SAYS_12, CALL + "<|observation|>", {"call", "correct"}),
        (THINKS_12, "so</think>12<|user|>", set()),
        (THINKS_12, "</think>12<|user|>", {"thinking"}),
        (THINKS_12, "12<|user|>", {"parsed", "thinking", "call", "correct"}),
        (THINKS_12, "so</think>12</think><|user|>", {"parsed", "correct"}),
        (READS_A, f"so</think>{CALL}<|observation|>", set()),
        (READS_A, f"so</think>I read.{CALL}<|observation|>", set()),
        (READS_A, f"so</think>{CALL}<|user|>", {"ended"}),
        (READS_A, f"so</think>{CALL}{CALL}<|observation|>", {"correct"}),
        (READS_A, f"so</think>{call(path='b')}</tool_call><|observation|>", {"correct"}),
        (READS_A, "so</think>12<|user|>", {"call", "correct"}),
        (
            READS_A,
            f"so</think>{call('write', path='a')}</tool_call><|observation|>",
            {"call", "correct"},
        ),
        (READS_A, f"so</think>{call(lines=2)}</tool_call><|observation|>", {"call", "correct"}),
        (
            READS_A,
            f"so</think>{call(path='a', lines='two')}</tool_call><|observation|>",
            {"call", "correct"},
        ),
        (
            READS_A,
            f"so</think>{call(path='a', lines=2)}</tool_call><|observation|>",
            {"correct"},
        ),
        (
            READS_A,
            f"so</think>{call(path='a', mode=1)}</tool_call><|observation|>",
            {"call", "correct"},
        ),
        (
            READS_A,
            f"so</think>{call(path='a')}<|observation|>",
            {"parsed", "call", "ended", "correct"},
        ),
    ],
)
def test_each_aspect(expectation, text, failed):
    assert wrong(expectation, text) == failed


def test_parallel_calls_are_right_in_any_order_and_each_once():
    a, b = ExpectedCall("read", {"path": "a"}), ExpectedCall("read", {"path": "b"})
    both = Expectation(thinking=False, calls=(a, b))
    call_b = call(path="b") + "</tool_call>"
    assert wrong(both, f"{call_b}{CALL}<|observation|>") == set()
    assert wrong(both, f"{CALL}{CALL}<|observation|>") == {"correct"}
    assert wrong(Expectation(False, (a, a)), f"{CALL}{call_b}<|observation|>") == {"correct"}


def test_formats_without_thinking_have_scores_too():
    assert wrong(SAYS_12, "12<|user|>", CompactRenderer(TOKENIZER)) == set()


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12), st.booleans())
def test_any_ids_have_a_score(ids, thinking):
    expectation = Expectation(thinking, READS_A.calls)
    assert check_completion(GLM, prompt(expectation), ids, [READ], expectation).following in (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [3, 3.0, -1], [True, "3", 3.5, None]),
        ({"type": "number"}, [3, 3.5], [True, "3"]),
        ({"type": "boolean"}, [True], [1, "true"]),
        ({"type": ["string", "null"]}, ["", None], [0]),
        ({"enum": ["a", 1]}, ["a", 1], ["b", None]),
        ({"const": 4}, [4], [5]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a"]], [["a", 1], "a"]),
        ({"type": "object"}, [{}, {"a": 1}], [[]]),
        ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, [{"a": ""}], [{}, {"a": 1}]),
        ({"properties": {"a": {}}}, [{"a": None}], [{"b": 1}]),
        ({"properties": {"a": {}}, "additionalProperties": True}, [{"b": 1}], []),
        ({"additionalProperties": {"type": "string"}}, [{"b": ""}], [{"b": 1}]),
        (True, [1], []),
        (False, [], [1]),
    ],
)
def test_schemas(schema, good, bad):
    assert [value for value in good if not accepts(schema, value)] == []
    assert [value for value in bad if accepts(schema, value)] == []


CONVERSATION = [
    {"role": "user", "content": "how many?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "so",
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "function": {"name": "read", "arguments": json.dumps({"path": "a"})},
            }
        ],
    },
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "13", "error": True},
    {"role": "user", "content": "no, how many?"},
    {"role": "assistant", "content": "12"},
]


def test_examples_are_the_trained_turns_of_a_conversation():
    examples = format_examples(GLM, CONVERSATION, [READ], ThinkingMode.TURN)
    assert [example.expectation for example in examples] == [READS_A, SAYS_12]
    ends = [GLM.decode(example.prompt_ids[-2:]) for example in examples]
    assert ends == ["<|assistant|><think>", "<|assistant|></think>"]


def test_a_report_counts_what_a_model_does():
    examples = format_examples(GLM, CONVERSATION, [READ], ThinkingMode.TURN)
    report = evaluate_format(GLM, examples, lambda ids: TOKENIZER.encode("12<|user|>"))
    assert (report.count, report.following) == (2, 0.5)
    assert report.rates == {
        "parsed": 0.5,
        "thinking": 0.5,
        "call": 0.5,
        "ended": 1.0,
        "correct": 0.5,
        "thinking_on": 0.0,
        "thinking_off": 1.0,
        "call_expected": 0.0,
        "answer_expected": 1.0,
    }
    worst = report.examples[0]
    assert worst.prompt == "<|user|>how many?<|assistant|><think>"
    assert (worst.completion, worst.expected) == ("12<|user|>", READS_A)


def test_reports_need_one_completion_for_each_example():
    example = FormatExample(prompt(SAYS_12), [], SAYS_12)
    with pytest.raises(ValueError, match="1 examples but 0 completions"):
        score_completions(GLM, [example], [])
    with pytest.raises(ValueError, match="0 examples"):
        score_completions(GLM, [], [])
