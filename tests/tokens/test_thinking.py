"""Thinking modes and masks: readable golden layouts, and every token trained once where sampled.

`trained` prints a sequence with what is trained on in square brackets.
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import normalise
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.thinking import (
    ThinkingMode,
    TrainingSequence,
    message_weight,
    render_conversation,
    sampled_turn,
    sampling_renderer,
)
from headrace.tokens.training import train_tokenizer

TOKENIZER = train_tokenizer(
    ["how many lines are there? I count the lines. 12 lines, read"] * 9, 320
)
GLM = LibraryRenderer("glm-5", TOKENIZER)
COMPACT = CompactRenderer(TOKENIZER)
READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
INTERLEAVED, PRESERVED, TURN = ThinkingMode


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def says(text, thought=None, **keys):
    message = {"role": "assistant", "content": text, **keys}
    return message if thought is None else {**message, "reasoning_content": thought}


def calls(thought=None, path="a", **keys):
    function = {"name": "read", "arguments": json.dumps({"path": path})}
    call = {"id": "c", "type": "function", "function": function}
    return says("", thought, tool_calls=[call], **keys)


def trained(renderer: ChatRenderer, sequence: TrainingSequence) -> str:
    text, inside = "", False
    for token, weight in zip([*sequence.ids, -1], [*sequence.weights, 0], strict=True):
        text += ("[" if weight else "]") if bool(weight) != inside else ""
        inside = bool(weight)
        text += renderer.decode([token]) if token >= 0 else ""
    return text


def layouts(messages, mode, renderer: ChatRenderer = GLM):
    return [trained(renderer, s) for s in render_conversation(renderer, messages, [], mode)]


TWO_QUESTIONS = [
    user("lines?"),
    calls("I count."),
    tool("12"),
    says("12 lines", "So 12."),
    user("sure?"),
    says("yes", "I am."),
]

READ_A = "<tool_call>read<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>"
FIRST_QUESTION = (
    f"[gMASK]<sop><|user|>lines?<|assistant|><think>[I count.</think>{READ_A}<|observation|>]"
    "<tool_response>12</tool_response><|assistant|><think>[So 12.</think>12 lines<|user|>]"
)


# ---------------------------------------------------------------- golden layouts


def test_interleaved_thinking_is_dropped_when_the_user_speaks_again():
    assert layouts(TWO_QUESTIONS, INTERLEAVED) == [
        FIRST_QUESTION,
        f"[gMASK]<sop><|user|>lines?<|assistant|></think>{READ_A}<|observation|>"
        "<tool_response>12</tool_response><|assistant|></think>12 lines<|user|>sure?"
        "<|assistant|><think>[I am.</think>yes<|user|>]",
    ]


def test_preserved_thinking_makes_one_sequence():
    assert layouts(TWO_QUESTIONS, PRESERVED) == [
        f"{FIRST_QUESTION}sure?<|assistant|><think>[I am.</think>yes<|user|>]"
    ]


def test_turn_level_thinking_trains_silent_turns_after_a_closed_think():
    messages = [user("a?"), says("b"), user("c?"), calls("I read."), tool("d"), says("e")]
    assert layouts(messages, TURN) == [
        "[gMASK]<sop><|user|>a?<|assistant|></think>[b<|user|>]c?<|assistant|><think>"
        f"[I read.</think>{READ_A}<|observation|>]<tool_response>d</tool_response>"
        "<|assistant|></think>[e<|user|>]"
    ]


def test_turn_level_thinking_also_ends_with_the_next_user_message():
    messages = [user("a?"), says("b", "I know."), user("c?"), says("d")]
    assert layouts(messages, TURN) == [
        "[gMASK]<sop><|user|>a?<|assistant|><think>[I know.</think>b<|user|>]",
        "[gMASK]<sop><|user|>a?<|assistant|></think>b<|user|>c?<|assistant|></think>[d<|user|>]",
    ]


def test_a_format_without_thinking_makes_one_sequence():
    messages = [user("a?"), calls(), tool("b"), says("c"), user("d?"), says("e")]
    read = READ_A
    assert layouts(messages, TURN, COMPACT) == [
        f"<sop><|user|>a?<|assistant|>[{read}<|observation|>]b<|assistant|>[c<|user|>]d?"
        "<|assistant|>[e<|user|>]"
    ]


def test_errors_stay_in_the_context_and_out_of_the_loss():
    messages = [
        user("a?"),
        calls("I read b.", path="b", error=True),
        tool("no such file") | {"error": True},
        calls("It is a."),
        tool("12"),
        says("12", "So 12."),
    ]
    (text,) = layouts(messages, INTERLEAVED)
    assert (
        "<think>I read b.</think><tool_call>read<arg_key>path</arg_key><arg_value>b</arg_value>"
        "</tool_call><|observation|><tool_response>no such file</tool_response>"
        f"<|assistant|><think>[It is a.</think>{READ_A}<|observation|>]"
    ) in text


def test_messages_out_of_the_loss_cost_no_sequence_of_their_own():
    messages = [*TWO_QUESTIONS[:4], user("sure?"), says("yes", "I am.", train=False)]
    assert layouts(messages, INTERLEAVED) == [FIRST_QUESTION]
    messages = [m | {"train": False} for m in TWO_QUESTIONS[:4]] + TWO_QUESTIONS[4:]
    assert len(layouts(messages, INTERLEAVED)) == 1
    assert layouts([user("a"), says("b", train=False)], TURN) == []


def test_weights_may_be_numbers():
    messages = [user("a?"), says("b", train=0.25), user("c?"), says("d")]
    (sequence,) = render_conversation(GLM, messages, [], TURN)
    assert sorted({*sequence.weights}) == [0.0, 0.25, 1.0]
    assert sum(weight == 0.25 for weight in sequence.weights) == 2  # b<|user|>


# ---------------------------------------------------------------- spans


def masked(message, renderer: ChatRenderer = GLM, mode=TURN):
    (text,) = layouts([user("a?"), message], mode, renderer)
    return text.split("<|assistant|>")[1]


def test_masked_characters_take_every_token_they_touch():
    text = "I count 12 lines"
    tokens = [TOKENIZER.decode([i]) for i in TOKENIZER.encode_text(text)]
    assert tokens == ["I", " count", " ", "1", "2", " lines"]
    assert masked(says(text, mask=[[8, 10]])) == "</think>[I count ]12[ lines<|user|>]"
    assert masked(says(text, mask=[[4, 5], [15, 16]])) == "</think>[I] count[ 12] lines[<|user|>]"
    assert masked(says(text, mask=[[0, 16]]), COMPACT) == "I count 12 lines[<|user|>]"


def test_ranges_count_characters_of_the_text_as_written():
    text = "  über 12 😀 lines "
    at = text.index("😀")
    assert masked(says(text, mask=[[at, at + 1]])).replace(" ", "") == (
        "</think>[\ufffd\ufffdber12]" + "\ufffd" * 4 + "[lines<|user|>]"
    )
    start = text.index("1")
    assert masked(says(text, mask=[[start, start + 2]]), COMPACT).startswith(
        "[  \ufffd\ufffdber ]12["
    )


def test_thinking_has_ranges_of_its_own():
    message = says("12 lines", "I count 12", reasoning_mask=[[8, 10]], mask=[[3, 8]])
    assert masked(message) == "<think>[I count ]12[</think>12] lines[<|user|>]"


def test_a_masked_text_that_is_not_found_trains_nothing():
    """GLM-5 reads thinking inside the content apart, so its ranges mean nothing any more."""
    assert layouts([user("a"), says("", "x</think>y", reasoning_mask=[[0, 1]])], TURN)
    message = says("<think>x</think>y", mask=[[0, 1]])
    with pytest.raises(ValueError, match=r"messages\[1\] cannot be"):
        layouts([user("a"), message], TURN)


# ---------------------------------------------------------------- agreement with sampling


def conversations():
    text = st.sampled_from(["12", "how many lines?", "I count.", "a <|user|> b", "ü <think> x"])

    @st.composite
    def draw(pick):
        messages = [{"role": "system", "content": "s"}] if pick(st.booleans()) else []
        silent = pick(st.booleans())
        keys = st.sampled_from([{}, {}, {}, {"train": False}, {"error": True}, {"train": 2.0}])

        def thought():
            return None if silent and pick(st.booleans()) else pick(text)

        for _ in range(pick(st.integers(1, 3))):
            messages.append(user(pick(text)))
            for _ in range(pick(st.integers(0, 2))):
                messages.append(calls(thought(), pick(text), **pick(keys)))
                messages += [tool(pick(text)) for _ in range(pick(st.integers(1, 2)))]
            messages.append(says(pick(text), thought(), **pick(keys)))
        modes = [TURN] if silent else list(ThinkingMode)
        return messages, pick(st.sampled_from(modes))

    return draw()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_every_sampled_token_trains_once_in_the_context_it_is_sampled_in(drawn):
    tools = [READ]
    messages, mode = drawn
    wanted = []
    for i, message in enumerate(messages):
        thinking = bool(message.get("reasoning_content"))
        if mode is not TURN and message["role"] == "assistant" and not thinking:
            message["train"] = False
        if weight := message_weight(message):
            options = {"enable_thinking": thinking, "clear_thinking": mode is not PRESERVED}
            at_sampling = LibraryRenderer("glm-5", TOKENIZER, options)
            prompt = at_sampling.render(normalise(messages[:i]), tools)
            wanted.append((prompt, message, weight, at_sampling))
    sequences = render_conversation(GLM, messages, tools, mode)
    found = []
    for sequence in sequences:
        assert len(sequence.ids) == len(sequence.weights)
        at = 0
        while at < len(sequence.ids):
            end = at
            while end < len(sequence.ids) and bool(sequence.weights[end]) == bool(
                sequence.weights[at]
            ):
                end += 1
            if sequence.weights[at]:
                found.append((sequence.ids[:at], sequence.ids[at:end], sequence.weights[at:end]))
            at = end
    assert len(found) == len(wanted)
    for (before, sampled, weights), (prompt, message, weight, at_sampling) in zip(
        found, wanted, strict=True
    ):
        assert before == prompt
        assert set(weights) == {weight}
        parsed = at_sampling.parse(prompt, sampled, tools)
        assert (parsed.state, parsed.reasoning) == ("ok", message.get("reasoning_content") or None)
        assert parsed.content == message["content"]
        assert len(parsed.tool_calls) == len(message.get("tool_calls", ()))
    if mode is PRESERVED or not any(m.get("reasoning_content") for m in messages):
        assert len(sequences) <= 1


def test_the_prompts_of_a_tool_cycle_are_what_a_bridge_makes():
    first = sampled_turn(GLM, TWO_QUESTIONS[:2], [], INTERLEAVED)
    second = sampled_turn(GLM, TWO_QUESTIONS[:4], [], INTERLEAVED)
    delta = GLM.bridge(first.prompt, first.completion, TWO_QUESTIONS[2:3], [])
    assert second.prompt == [*first.prompt, *first.completion, *(delta or [])]
    keeping = sampling_renderer(GLM, PRESERVED, thinking=True)
    third = sampled_turn(GLM, TWO_QUESTIONS, [], PRESERVED)
    delta = keeping.bridge(second.prompt, second.completion, TWO_QUESTIONS[4:5], [])
    assert third.prompt == [*second.prompt, *second.completion, *(delta or [])]


def test_parsing_follows_the_prompt_whatever_the_options():
    for fixed in (GLM, LibraryRenderer("glm-5", TOKENIZER, {"enable_thinking": False})):
        for thought in (None, "I count."):
            turn = sampled_turn(fixed, [user("a"), says("12", thought)], [], TURN)
            parsed = fixed.parse(turn.prompt, turn.completion, [])
            assert (parsed.state, parsed.reasoning, parsed.content) == ("ok", thought, "12")


def test_thinking_that_never_ends_is_malformed():
    prompt = GLM.render([user("a")], [])
    parsed = GLM.parse(prompt, TOKENIZER.encode("I count<|user|>"), [])
    assert (parsed.state, parsed.content, parsed.reasoning) == ("malformed", "", "I count")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("message", "mode", "renderer", "said"),
    [
        (says("b"), INTERLEAVED, GLM, "no reasoning_content, which thinking 'interleaved' asks"),
        (says("b"), PRESERVED, GLM, "'preserved' asks"),
        (says("b", "c"), TURN, COMPACT, "renderer 'compact' has no thinking"),
        (says("b", train="yes"), TURN, GLM, r"messages\[1\].train is 'yes'"),
        (says("b", train=-1), TURN, GLM, r"messages\[1\].train is -1"),
        (says("b", train=float("nan")), TURN, GLM, r"messages\[1\].train is nan"),
        (says("b", error=1), TURN, GLM, r"messages\[1\].error is 1; use true or false"),
        (says("b", mask=3), TURN, GLM, r"messages\[1\].mask is 3; use a list"),
        (says("b", mask=[[0, 2]]), TURN, GLM, r"mask\[0\] is \[0, 2\]; .* end <= 1"),
        (says("b", mask=[[0, 1], [True, 1]]), TURN, GLM, r"mask\[1\] is \[True, 1\]"),
        (says("b", mask=[5]), TURN, GLM, r"mask\[0\] is 5"),
        (says("b", "c", reasoning_mask=[[1, 1]]), TURN, GLM, r"reasoning_mask\[0\]"),
    ],
)
def test_what_cannot_be_trained_is_refused(message, mode, renderer, said):
    with pytest.raises(ValueError, match=said):
        render_conversation(renderer, [user("a"), message], [], mode)


def test_a_first_message_has_no_prompt_and_lengths_must_agree():
    with pytest.raises(ValueError, match=r"messages\[0\] has nothing before it"):
        render_conversation(GLM, [says("a")], [])
    with pytest.raises(ValueError, match="1 ids but 0 weights"):
        TrainingSequence([1], [])
