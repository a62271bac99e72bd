"""Conversations from JSONL: what a row means, and mistakes named by line and field."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from headrace.data.chat import (
    Conversation,
    chat_samples,
    conversation_samples,
    parse_conversation,
    read_conversations,
)
from headrace.errors import UserError
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.thinking import ThinkingMode
from headrace.tokens.training import train_tokenizer

TOKENIZER = train_tokenizer(["how many lines? I count 12 lines"] * 9, 300)
GLM = LibraryRenderer("glm-5", TOKENIZER)
HI = {"role": "user", "content": "hi"}


def file_of(tmp_path, *rows):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def one(*messages, **more):
    return parse_conversation({"messages": list(messages), **more})


def test_rows_become_conversations(tmp_path):
    call = {"function": {"name": "read", "arguments": {"path": "a"}}}
    rows = [
        {
            "messages": [
                HI,
                {"role": "assistant", "tool_calls": [call], "error": True},
                {"role": "tool", "content": "no", "error": True},
                {"role": "assistant", "content": "12", "train": 0.5, "mask": [[0, 1]]},
            ],
            "tools": [{"type": "function", "function": {"name": "read"}}],
            "thinking": "preserved",
            "source": "anything",
        },
        "",
        {"messages": [HI, {"role": "assistant", "content": "12", "reasoning_content": "so"}]},
    ]
    first, second = read_conversations(file_of(tmp_path, *rows), ThinkingMode.INTERLEAVED)
    assert (first.mode, second.mode) == (ThinkingMode.PRESERVED, ThinkingMode.INTERLEAVED)
    assert first.tools == rows[0]["tools"]
    assert first.messages[1]["error"] is True
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"path":"a"}'
    assert first.messages[3] == {
        "role": "assistant",
        "content": "12",
        "train": 0.5,
        "mask": [[0, 1]],
    }
    assert second.messages[1]["reasoning_content"] == "so"


def test_thinking_in_the_content_is_moved_where_it_belongs():
    read = one(HI, {"role": "assistant", "content": "<think>\nso it is\n</think>\n\n12"})
    assert read.messages[1] == {
        "role": "assistant",
        "content": "12",
        "reasoning_content": "so it is",
    }
    empty = one(HI, {"role": "assistant", "content": "<think></think>12"})
    assert empty.messages[1] == {"role": "assistant", "content": "12"}
    quoted = one(HI, {"role": "assistant", "content": "write <think> first"})
    assert quoted.messages[1]["content"] == "write <think> first"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ([], "row is list; write an object with 'messages'"),
        ({}, "messages is missing; write a list"),
        ({"messages": "hi"}, "messages is str"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\].role is 'bot'"),
        ({"messages": [HI, {"role": "assistant", "content": 3}]}, r"messages\[1\].content is int"),
        ({"messages": [HI], "tools": {}, "thinking": "often"}, "thinking is 'often'; use one of"),
        ({"messages": [HI], "tools": "read"}, "tools is str"),
        ({"messages": [HI], "tools": [{}]}, r"tools\[0\] has no function.name"),
        ({"messages": [HI | {"train": True}]}, r"messages\[0\].train is on a user message"),
        (
            {"messages": [HI, {"role": "assistant", "content": "a", "train": "no"}]},
            r"messages\[1\].train is 'no'",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": "a", "mask": [[0, 5]]}]},
            r"messages\[1\].mask\[0\] is \[0, 5\]",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": "a", "weight": 0}]},
            r"messages\[1\].weight is unknown; did you mean 'train'\?",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": "a", "reasoning_content": ["b"]}]},
            r"messages\[1\].reasoning_content is list",
        ),
        (
            {
                "messages": [
                    HI,
                    {"role": "assistant", "content": "<think>a</think>b", "mask": [[0, 1]]},
                ]
            },
            r"messages\[1\].mask counts characters of a content that holds thinking",
        ),
    ],
)
def test_mistakes_are_named_by_file_line_and_field(tmp_path, row, said):
    path = file_of(tmp_path, {"messages": [HI]}, "", row)
    with pytest.raises(UserError, match=f"chat.jsonl:3: .*{said}") as caught:
        list(read_conversations(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_broken_bytes_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(read_conversations(tmp_path / "none.jsonl"))
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "\xff"}]}\n')
    with pytest.raises(UserError, match=r"bytes\.jsonl:1: not valid JSON"):
        list(read_conversations(path))


def test_samples_carry_ids_and_weights():
    talk = one(HI, {"role": "assistant", "content": "12", "train": 0.5})
    (sample,) = conversation_samples(GLM, talk)
    ids = np.frombuffer(sample.ids, dtype="<i4").tolist()
    weights = np.frombuffer(sample.weights, dtype="<f4").tolist()
    assert GLM.decode(ids) == "[gMASK]<sop><|user|>hi<|assistant|></think>12<|user|>"
    assert weights == [0.0] * (len(ids) - 3) + [0.5] * 3


def test_long_samples_are_left_out_and_counted():
    short = one(HI, {"role": "assistant", "content": "12"})
    long = one(HI, {"role": "assistant", "content": "12 " * 50})
    samples, left_out = chat_samples(GLM, [short, long, short], max_tokens=30)
    assert (len(samples), left_out) == (2, 1)
    samples, left_out = chat_samples(GLM, [short, long])
    assert (len(samples), left_out) == (2, 0)


def test_what_cannot_be_trained_is_named_by_its_number():
    fine = one(HI, {"role": "assistant", "content": "12"})
    strict = Conversation(fine.messages, [], ThinkingMode.PRESERVED)
    with pytest.raises(UserError, match=r"demo: conversation 2: messages\[1\] has no reasoning"):
        chat_samples(GLM, [fine, strict], source="demo")


def test_the_documented_row_is_trained_as_the_page_says():
    page = Path(__file__).parents[2] / "docs" / "sft.md"
    (row,) = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (sample,) = conversation_samples(GLM, parse_conversation(json.loads(row)))
    ids = np.frombuffer(sample.ids, dtype="<i4").tolist()
    weights = np.frombuffer(sample.weights, dtype="<f4").tolist()
    assert set(weights) == {0.0, 0.5, 1.0}
    trained = GLM.decode([i for i, weight in zip(ids, weights, strict=True) if weight])
    assert trained == (
        "The name is plan.txt.</think><tool_call>read_file<arg_key>path</arg_key>"
        "<arg_value>plan.txt</arg_value></tool_call><|observation|>"
        "It is short.</think>It says: <|user|>"
    )
