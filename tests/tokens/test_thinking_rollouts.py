"""Thinking modes while sampling: bridges and renders agree, thoughts stay or go as modes say."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsing_formats import FORMATS, GLM, TOOLS

from headrace.rollout.types import ParseState
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import identity, message_parts, normalise, same_reasoning
from headrace.tokens.parsed import ParsedMessage
from headrace.tokens.thinking import (
    Thinking,
    ThinkingMode,
    next_leg,
    render_conversation,
    request_renderer,
    sampled_turn,
    supported_modes,
    thinking_stop_ids,
)

INTERLEAVED, PRESERVED, TURN = ThinkingMode


def library(name: str) -> LibraryRenderer:
    renderer = FORMATS[name].renderer
    assert isinstance(renderer, LibraryRenderer)
    return renderer


GLM5 = library("glm-5")
SWITCHED = {name: library(name) for name in ("glm-5", "qwen3", "qwen3.5")}
BRIDGED = SWITCHED | {"glm-4.5": library("glm-4.5")}


def under(renderer: LibraryRenderer, mode: ThinkingMode, enabled: bool = True) -> LibraryRenderer:
    made = request_renderer(renderer, Thinking(mode, enabled))
    assert isinstance(made, LibraryRenderer)
    return made


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def call(command, thought=None):
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    made = {"id": command, "type": "function", "function": function}
    return made if thought is None else {**made, "reasoning_content": thought}


def says(content, thought=None, calls=()):
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return message if thought is None else {**message, "reasoning_content": thought}


BATCH = says("Both.", None, [call("ls", "plan a"), call("wc", "plan b"), call("du")])
TALK = normalise(
    [
        {"role": "system", "content": "s"},
        user("lines?"),
        says("", "I count.", [call("wc")]),
        tool("12"),
        BATCH,
        tool("1"),
        tool("2"),
        tool("3"),
        says("12 lines", "So 12."),
        user("sure?"),
        says("yes", "I am."),
        user("and?"),
    ]
)
THOUGHTS = ["I count.", "plan a", "plan b", "So 12.", "I am."]


def rollout(renderer: LibraryRenderer, messages, mode, thinking=lambda message: True):
    """Sample the assistant's messages one after the other, as a gateway does.

    Returns:
        The renderer and the prompt of each turn, and the turns at which nothing was continued.
    """
    held, completion, prompts, forks = [], [], [], []
    since = 0
    for i, message in enumerate([*messages, {"role": "assistant"}]):
        if message["role"] != "assistant":
            continue
        now = under(renderer, mode, thinking(message))
        delta = now.bridge(held, completion, messages[since:i], TOOLS) if held else None
        if delta is None:
            forks += [i] if held else []
            held = now.render(messages[:i], TOOLS)
        else:
            held = [*held, *completion, *delta]
        prompts.append((now, held))
        if i < len(messages):
            made = now.completion(
                messages[max(0, i - 1) : i + 1] if i < 2 else messages[: i + 1], ()
            )
            assert made is not None
            completion, since = made, i + 1
    return prompts, forks


# ---------------------------------------------------------------- bridges and renders


@pytest.mark.parametrize("name", sorted(BRIDGED))
@pytest.mark.parametrize("mode", [INTERLEAVED, PRESERVED])
def test_a_bridged_prompt_is_the_rendered_one(name: str, mode: ThinkingMode):
    prompts, forks = rollout(BRIDGED[name], TALK, mode)
    turns = [i for i, m in enumerate(TALK) if m["role"] == "assistant"] + [len(TALK)]
    for i, (renderer, prompt) in zip(turns, prompts, strict=True):
        assert renderer.decode(prompt) == renderer.decode(renderer.render(TALK[:i], TOOLS))
    assert forks == ([] if mode is PRESERVED else [10, 12])
    text = prompts[-1][0].decode(prompts[-1][1])
    found = [thought for thought in THOUGHTS if thought in text]
    assert found == (THOUGHTS if mode is PRESERVED else [])
    if mode is PRESERVED:
        assert [text.index(thought) for thought in THOUGHTS] == sorted(map(text.index, THOUGHTS))
    in_cycle = prompts[2][0].decode(prompts[2][1])
    assert all(thought in in_cycle for thought in THOUGHTS[:3])


@pytest.mark.parametrize("name", sorted(SWITCHED))
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_thinking_may_be_switched_from_turn_to_turn_without_a_fork(name, before, after):
    renderer = SWITCHED[name]
    first = under(renderer, TURN, before)
    then = under(renderer, TURN, after)
    talk = normalise([user("a"), says("", "so" if before else None, [call("ls")]), tool("b")])
    held = first.render(talk[:1], TOOLS)
    completion = first.completion(talk[:2], TOOLS)
    assert completion is not None
    delta = then.bridge(held, completion, talk[2:], TOOLS)
    assert delta is not None
    opener = {"glm-5": ["</think>", "<think>"], "qwen3.5": ["</think>\n\n", "<think>\n"]}.get(
        name, ["</think>\n\n", "assistant\n"]
    )[after]
    assert then.decode(delta).endswith(opener)
    if name == "glm-5":
        assert [*held, *completion, *delta] == then.render(talk, TOOLS)


def test_a_user_turn_forks_only_when_there_is_thinking_to_drop():
    silent = under(GLM5, TURN, False)
    thinks = under(GLM5, TURN, True)
    user_stop = GLM.special_ids["<|user|>"]
    held = silent.render([user("a")], [])
    assert thinks.bridge(held, [5, user_stop], [user("b")], []) is not None
    cycle = silent.render([user("a"), says("", "so", [call("ls")]), tool("b")], [])
    assert silent.bridge(cycle, [5, user_stop], [user("b")], []) is None
    held = thinks.render([user("a")], [])
    closed = [GLM.special_ids["</think>"], 5, user_stop]
    assert silent.bridge(held, closed, [user("b")], []) is not None
    assert silent.bridge(held, [*GLM.encode_text("so"), *closed], [user("b")], []) is None
    assert silent.bridge(held, [*GLM.encode_text("so"), *closed[:-1]], [tool("b")], []) is not None


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_bridges_never_change_what_is_held(data: st.DataObject):
    """Law L1, for any completion: cut anywhere, thinking or not, under every mode."""
    renderer = data.draw(st.sampled_from(list(SWITCHED.values())))
    before = under(renderer, data.draw(st.sampled_from([*ThinkingMode])))
    after = under(renderer, data.draw(st.sampled_from([*ThinkingMode])), data.draw(st.booleans()))
    form = next(f for f in FORMATS.values() if f.renderer is renderer)
    whole = form.encode(data.draw(st.sampled_from(form.completions)))
    completion = whole[: data.draw(st.integers(0, len(whole)))]
    new = data.draw(st.sampled_from([[user("x")], [tool("x")], [tool("x"), tool("y"), user("z")]]))
    prompt = before.render([user("a")], TOOLS)
    delta = after.bridge(prompt, completion, new, TOOLS)
    if delta is not None:
        joined = after.reader([*prompt, *completion, *delta], TOOLS).finish()[1]
        assert joined.state is ParseState.TRUNCATED
        ending = after.render([user("a")], TOOLS)[-2:]
        assert delta[-2:] == ending or len(ending) > len(delta)
        inside = before.close_thinking(prompt, completion)
        assert delta[: len(inside)] == inside
    elif after.keeps_thinking:
        assert completion[-1] in renderer.stop_ids
        assert before.close_thinking(prompt, completion)


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("name", "sampled", "inserted"),
    [
        ("glm-5", "I count", "</think>"),
        ("glm-5", "", "</think>"),
        ("glm-5", "I count</think>", ""),
        ("glm-5", "I count</think>12", ""),
        ("glm-5", "a</think>b<tool_call>now</tool_call><think>c", "</think>"),
        ("glm-5", "I <tool_call>now</tool_call>", "</think>"),
        ("glm-5", "12<|user|>", None),
        ("qwen3", "<think>\nI count", "\n</think>\n\n"),
        ("qwen3", "12", ""),
        ("qwen3.5", "I count", "\n</think>\n\n"),
        ("chatml", "<think>\nI count", "\n</think>\n\n"),
        ("compact", "12", ""),
    ],
)
def test_a_budget_ends_thinking_as_the_format_does(name, sampled, inserted):
    form = FORMATS[name]
    prompt, ids = form.prompts[0], form.encode(sampled)
    leg = next_leg(form.renderer, prompt, ids)
    assert (None if leg is None else form.renderer.decode(leg)) == inserted
    if leg:
        rest = form.encode("12")
        whole: ParsedMessage = form.renderer.parse(prompt, [*ids, *leg, *rest], TOOLS)
        assert whole.content.endswith("12")
        assert "12" not in (whole.reasoning or "")
        second = form.renderer.parse([*prompt, *ids, *leg], rest, TOOLS)
        assert (second.reasoning, second.content) == (None, "12")


def test_the_first_leg_also_stops_where_thinking_ends():
    assert thinking_stop_ids(GLM5) == (*GLM5.stop_ids, GLM.special_ids["</think>"])
    assert thinking_stop_ids(FORMATS["compact"].renderer) == FORMATS["compact"].renderer.stop_ids


# ---------------------------------------------------------------- several thoughts in a turn


@pytest.mark.parametrize("name", ["glm-5", "glm-4.5", "qwen3", "qwen3.5"])
def test_a_batch_is_read_back_as_it_is_rendered(name: str):
    renderer = FORMATS[name].renderer
    assert isinstance(renderer, LibraryRenderer)
    (batch,) = normalise([BATCH | {"reasoning_content": "plan a\n\nplan b\n\nNow I wait."}])
    ids = renderer.completion([user("a"), batch], [])
    assert ids is not None
    parsed = renderer.parse(renderer.render([user("a")], []), ids, TOOLS)
    assert [c.reasoning for c in parsed.tool_calls] == ["plan a", "plan b", None]
    assert (parsed.reasoning, parsed.content) == (batch["reasoning_content"], "Both.")
    assert parsed.state == "ok"
    prompt = renderer.with_thinking(keep=True).render([user("a"), batch, user("b")], [])
    assert renderer.decode(prompt).count("plan b") == 1
    assert renderer.decode(prompt).count("Now I wait.") == 1


def test_golden_batch():
    renderer = under(GLM5, PRESERVED)
    (batch,) = normalise([BATCH])
    read = "<tool_call>bash<arg_key>command</arg_key><arg_value>{}</arg_value></tool_call>".format
    assert renderer.decode(renderer.render([user("a"), batch, tool("1"), user("b")], [])) == (
        f"[gMASK]<sop><|user|>a<|assistant|><think>plan a</think>Both.{read('ls')}<think>plan b"
        f"</think>{read('wc')}{read('du')}<|observation|><tool_response>1</tool_response><|user|>b"
        "<|assistant|><think>"
    )


def test_a_batch_trains_where_it_is_sampled():
    (sequence,) = render_conversation(GLM5, TALK[:9], TOOLS, PRESERVED)
    text = GLM5.decode([i for i, w in zip(sequence.ids, sequence.weights, strict=True) if w])
    assert "plan a</think>Both.<tool_call>" in text
    assert "</tool_call><think>plan b</think><tool_call>" in text
    for name in ("qwen3", "qwen3.5"):
        turn = sampled_turn(SWITCHED[name], TALK[:11], TOOLS, PRESERVED)
        assert "I count." in SWITCHED[name].decode(turn.prompt)
        assert SWITCHED[name].decode(turn.completion).endswith("yes<|im_end|>")


def test_what_clients_send_back_of_several_thoughts():
    (full,) = normalise([BATCH])
    assert full["reasoning_content"] == "plan a\n\nplan b"
    bare = [
        {k: v for k, v in made.items() if k != "reasoning_content"} for made in full["tool_calls"]
    ]
    plain = full | {"tool_calls": bare}
    for sent in (full, plain, plain | {"reasoning_content": "plan a"}):
        assert identity(sent) == identity(full)
        assert same_reasoning(sent, full)
    silent = {k: v for k, v in plain.items() if k != "reasoning_content"}
    assert same_reasoning(silent, full)
    assert not same_reasoning(plain | {"reasoning_content": "other"}, full)
    other = [full["tool_calls"][0], full["tool_calls"][1] | {"reasoning_content": "x"}]
    assert not same_reasoning(full | {"tool_calls": other}, full)
    assert message_parts(plain) == [plain]
    first, second = message_parts(full)
    assert (first["reasoning_content"], len(first["tool_calls"])) == ("plan a", 1)
    assert (second["reasoning_content"], len(second["tool_calls"])) == ("plan b", 2)
    (renamed,) = normalise([{"role": "assistant", "content": "a", "reasoning": "b"}])
    assert renamed["reasoning_content"] == "b"


# ---------------------------------------------------------------- what a format cannot do


def test_modes_of_formats():
    modes = {
        name: sorted(map(str, supported_modes(form.renderer))) for name, form in FORMATS.items()
    }
    everything = ["interleaved", "preserved", "turn"]
    assert modes["glm-5"] == modes["qwen3"] == modes["glm-4.5"] == everything
    assert modes["chatml"] == modes["compact"] == modes["llama-3"] == []
    assert modes["chatml with tokens"] == ["preserved"]
    assert modes["deepseek-r1"] == ["interleaved"]


@pytest.mark.parametrize(
    ("name", "thinking", "said"),
    [
        (
            "compact",
            Thinking(),
            "'interleaved' is not possible with renderer 'compact'; this format",
        ),
        ("deepseek-r1", Thinking(PRESERVED), "'preserved' is not possible .* use 'interleaved'"),
        ("deepseek-r1", Thinking(enabled=False), "cannot switch thinking off; leave it on"),
        ("chatml with tokens", Thinking(PRESERVED, False), "send a budget of 0 instead"),
        ("deepseek-r1", Thinking(budget=5), "a thinking budget is not possible"),
        ("glm-5", Thinking(budget=-1), "budget -1 is negative"),
    ],
)
def test_what_a_format_cannot_do_is_said(name: str, thinking: Thinking, said: str):
    with pytest.raises(ValueError, match=said):
        request_renderer(FORMATS[name].renderer, thinking)
