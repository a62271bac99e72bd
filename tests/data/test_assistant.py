"""The synthetic course: repeatable, split by what is asked, and right about its own tools."""

import collections
import itertools
import json
import re

import pytest

from headrace.data.assistant import TOOLS, conversations, held_out, is_held_out
from headrace.data.chat import chat_samples
from headrace.tokens.format_check import check_completion, format_examples
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import normalise, tool_names
from headrace.tokens.thinking import ThinkingMode, has_thinking, sampled_turn
from headrace.tokens.training import train_tokenizer

COURSE = conversations(1, 300)
EVALUATION = held_out(1, 150)
GLM = LibraryRenderer("glm-5", train_tokenizer(["the file of the price"] * 9, 280))


def exchanges(conversation):
    """Messages from each user message to the next; a greeting and its follow-up stay together."""
    found = []
    for message in conversation.messages:
        follows = message["content"] in ("What is my name?", "What do I like?")
        if message["role"] == "user" and not follows:
            found.append([])
        if found:
            found[-1].append(message)
    return found


def questions(course):
    return {
        "\n".join(m["content"] for m in exchange if m["role"] == "user")
        for conversation in course
        for exchange in exchanges(conversation)
    }


def test_the_seed_decides_everything_and_count_nothing():
    assert conversations(1, 20) == COURSE[:20]
    assert held_out(1, 20) == EVALUATION[:20]
    assert conversations(2, 20) != COURSE[:20]


def test_no_question_of_the_evaluation_is_ever_trained():
    others = [talk for seed in range(2, 5) for talk in conversations(seed, 300)]
    assert not questions([*COURSE, *others]) & questions(EVALUATION)
    assert all(is_held_out(exchange) for talk in EVALUATION for exchange in exchanges(talk))
    assert not any(is_held_out(exchange) for talk in COURSE for exchange in exchanges(talk))


def test_the_course_is_varied():
    assert len(questions(COURSE)) > 400
    modes = collections.Counter(talk.mode for talk in COURSE)
    assert all(modes[mode] > 50 for mode in ThinkingMode)
    messages = [message for talk in COURSE for message in talk.messages]
    assistants = [message for message in messages if message["role"] == "assistant"]
    silent = sum(not has_thinking(message) for message in assistants)
    assert 0.05 < silent / len(assistants) < 0.4
    assert any(len(m.get("tool_calls", ())) == 2 for m in assistants)
    assert any(m.get("error") for m in assistants)
    used = {c["function"]["name"] for m in assistants for c in m.get("tool_calls", ())}
    assert used == set(TOOLS)
    assert any(not talk.tools for talk in COURSE)
    assert max(len(exchanges(talk)) for talk in COURSE) == 4


@pytest.mark.parametrize("talk", [*COURSE[:60], *EVALUATION[:30]], ids=lambda talk: "")
def test_conversations_are_well_formed(talk):
    assert normalise(talk.messages)  # OpenAI's format
    declared = tool_names(talk.tools)
    assert len(set(declared)) == len(declared)
    waiting = []
    for message in talk.messages:
        assert message["content"] == message["content"].strip()
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
            continue
        assert waiting == []
        if message["role"] == "assistant" and talk.mode is not ThinkingMode.TURN:
            assert has_thinking(message)
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in declared
            waiting.append(call["id"])
    assert talk.messages[-1]["role"] == "assistant"
    assert not talk.messages[-1].get("tool_calls")


def test_answers_come_from_the_tools():
    for talk in [*COURSE, *EVALUATION]:
        for exchange in exchanges(talk):
            results = [m for m in exchange if m["role"] == "tool" and not m.get("error")]
            final = exchange[-1]["content"]
            if results and not results[-1]["content"].startswith("error"):
                assert results[-1]["content"] in final
            asked = [c["function"] for m in exchange for c in m.get("tool_calls", ())]
            if [call["name"] for call in asked] == ["calculator"]:
                expression = json.loads(asked[0]["arguments"])["expression"]
                assert re.fullmatch(r"\d+ [-+*] \d+", expression)
                assert str(eval(expression)) == results[0]["content"]


def test_the_wrong_calls_differ_from_the_right_ones():
    wrong = right = 0
    for talk in COURSE:
        for exchange in exchanges(talk):
            calls = [m for m in exchange if "tool_calls" in m]
            for first, second in itertools.pairwise(calls):
                if first.get("error"):
                    wrong += 1
                    assert first["tool_calls"][0]["function"] != second["tool_calls"][0]["function"]
            right += any("in the folder" in m["content"] for m in exchange) and len(calls) == 1
    assert wrong
    assert right


def test_the_reference_turns_follow_the_format_and_are_right():
    for talk in EVALUATION[:40]:
        places = [
            i for i, m in enumerate(talk.messages) if m["role"] == "assistant" and "error" not in m
        ]
        examples = format_examples(GLM, talk.messages, talk.tools, talk.mode)
        for i, example in zip(places, examples, strict=True):
            turn = sampled_turn(GLM, talk.messages[: i + 1], talk.tools, talk.mode)
            score = check_completion(
                GLM, example.prompt_ids, turn.completion, example.tools, example.expectation
            )
            assert score.following, (GLM.decode(turn.completion), score)
            assert score.correct


def test_the_course_can_be_trained():
    samples, left_out = chat_samples(GLM, COURSE[:40])
    assert len(samples) >= 40
    assert left_out == 0
