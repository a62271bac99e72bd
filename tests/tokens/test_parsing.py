"""Parsers are total (law L13): any ids have a reading, streamed as at once, in time linear in them.

A mutation fuzzer takes right completions of every format apart; hypothesis draws tags and bytes.
"""

import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsing_formats import FORMATS, GLM, TOOLS, Format, check_reading, put_together

from headrace.tokens.library import LibraryRenderer
from headrace.tokens.parsed import CallStatus, DeltaKind, ParsedMessage

T = TypeVar("T")
MUTANTS = 120


def read(name: str, text: str, prompt: int = 0) -> ParsedMessage:
    form = FORMATS[name]
    ids = form.encode(text)
    return check_reading(form.renderer, form.prompts[prompt], ids, range(1, len(ids)))


# ---------------------------------------------------------------- what right completions say


@pytest.mark.parametrize("name", FORMATS)
def test_right_completions_read_well_token_by_token(name: str):
    form = FORMATS[name]
    for text in form.completions:
        parsed = read(name, text)
        assert (parsed.state, parsed.error, parsed.unreadable) == ("ok", None, ())
        assert all(call.status is CallStatus.OK for call in parsed.tool_calls)
    parsed = read(name, form.completions[0])
    if name != "deepseek-r1":
        (call, *_) = parsed.tool_calls
        assert call.name == "bash"
        assert '"command":"ls' in call.arguments


def test_text_streams_before_it_is_complete():
    form = FORMATS["glm-5"]
    reader = form.renderer.reader(form.prompts[0], TOOLS)
    first = reader.feed(form.encode("I count"))
    assert [(d.kind, d.text) for d in first] == [(DeltaKind.REASONING, "I count")]
    then = reader.feed(form.encode(" 12.</think>It is <"))
    assert put_together(then)[:2] == (" 12.", "It is <")
    assert reader.feed(form.encode("<tool_call>bash<arg_key>command</arg_key><arg_value>l")) == []
    done = reader.feed(form.encode("s</arg_value></tool_call>"))
    assert put_together(done)[2] == [("bash", '{"command":"ls"}')]


def test_a_possible_tag_is_held_back_until_it_is_none():
    form = FORMATS["chatml"]
    reader = form.renderer.reader(form.prompts[0], TOOLS)
    assert put_together(reader.feed(form.encode("a <tool")))[1] == "a"
    assert put_together(reader.feed(form.encode("box")))[1] == " <toolbox"


def test_half_a_character_is_held_back():
    form = FORMATS["glm-5"]
    reader = form.renderer.reader(form.prompts[1], TOOLS)
    texts = [
        put_together(reader.feed([token]))[1]
        for token in GLM.encode_text("\N{OGHAM SPACE MARK}x\N{SNOWMAN}")
    ]
    assert "\ufffd" not in "".join(texts)
    parsed = check_reading(form.renderer, form.prompts[1], GLM.encode_text("\N{SNOWMAN}")[:2])
    assert parsed.content == "\ufffd"


# ---------------------------------------------------------------- thinking in every state


@pytest.mark.parametrize(
    ("text", "state", "reasoning", "content"),
    [
        ("so", "truncated", "so", ""),
        ("so</think>12", "truncated", "so", "12"),
        ("so</think>12<tool_call>bash", "truncated", "so", "12<tool_call>bash"),
        ("so</think>12<tool_call>bash<|observation|>", "malformed", "so", "12<tool_call>bash"),
        ("so<|user|>", "malformed", "so", ""),
        ("so</think>12</tool_call><|user|>", "malformed", "so", "12</tool_call>"),
        ("so</think></think>12<|user|>", "ok", "so", "12"),
        ("<think>so</think>12<|user|>", "ok", "so", "12"),
        ("so</think>1<think>no</think>2<|user|>", "ok", "so\n\nno", "12"),
        (
            "a <tool_call>now</tool_call> b</think>12<|user|>",
            "ok",
            "a <tool_call>now</tool_call> b",
            "12",
        ),
        ("a <tool_call>now</tool_call><|observation|>", "ok", "a", ""),
        ("a <tool_call>now</tool_call>", "truncated", "a <tool_call>now</tool_call>", ""),
    ],
)
def test_thinking_is_told_apart_in_every_state(text, state, reasoning, content):
    parsed = read("glm-5", text)
    assert (parsed.state, parsed.reasoning, parsed.content) == (state, reasoning, content)


def test_each_call_keeps_the_thought_it_was_made_from():
    parsed = read(
        "glm-5",
        "plan<tool_call>now</tool_call><think>a\n</think><tool_call>now</tool_call><tool_call>now"
        "</tool_call><think> b</think><tool_call>now</tool_call><think>c<|observation|>",
    )
    assert [call.reasoning for call in parsed.tool_calls] == ["plan", "a", None, "b"]
    assert parsed.reasoning == "plan\n\na\n\nb\n\nc"
    assert [c.reasoning for c in read("glm-5", FORMATS["glm-5"].completions[0]).tool_calls] == [
        None
    ]


# ---------------------------------------------------------------- what is wrong is said


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("glm-5", "<tool_call></tool_call>", "the tool's name is missing"),
        ("glm-5", "<tool_call>now<tool_call>now</tool_call>", "unexpected <tool_call>"),
        (
            "glm-5",
            "<tool_call>bash<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key>"
            "<arg_value>1</arg_value></tool_call>",
            "parameter 'a' is given twice",
        ),
        (
            "glm-5",
            "<tool_call>bash<arg_key>command</arg_key>so<arg_value>1</arg_value></tool_call>",
            "unexpected text 'so' after the key 'command'",
        ),
        ("glm-5", "<tool_call>bash<arg_key>a</arg_key></tool_call>", "<arg_value> is missing"),
        ("glm-5", "</tool_call>", "</tool_call> stands where it does not belong"),
        ("glm-5", "12<|assistant|>13", "<|assistant|> stands where it does not belong"),
        ("glm-5", "<tool_call>now", "</tool_call> is missing"),
        ("qwen3", "<tool_call>{'name': 1}</tool_call>", "not valid JSON: Expecting property name"),
        ("qwen3", '<tool_call>{"name": "now"} x</tool_call>', "text after its end"),
        ("qwen3", '<tool_call>{"name": "now", "name": "bash"}</tool_call>', "'name' stands twice"),
        ("qwen3", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "must be an object"),
        ("qwen3", '<tool_call>{"name": "now", "x": 1}</tool_call>', "unexpected key 'x'"),
        (
            "qwen3",
            '<tool_call>{"name": "bash", "arguments": {"limit": NaN}}</tool_call>',
            "to 'bash' could not be read: NaN is no JSON number",
        ),
        ("qwen3", '<tool_call>{"arguments": {"a": 1e999}}</tool_call>', "is too large"),
        ("qwen3", '<tool_call>{"a": ' + "9" * 5000 + "}</tool_call>", "more than 4000 digits"),
        ("qwen3", "<tool_call>" + "[" * 9999 + "</tool_call>", "nests deeper"),
        (
            "qwen3",
            '<tool_call>{"name": "now", "arguments": {"a": '
            + "[" * 150
            + "]" * 150
            + "}}</tool_call>",
            "nest deeper than 100 levels",
        ),
        (
            "qwen3",
            '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>',
            "surrogate",
        ),
        ("chatml-xml", "<function_calls></function_calls>", '<invoke name="TOOL"> is expected'),
        (
            "chatml-xml",
            '<function_calls><invoke name="now"><parameter name="a">1</invoke></function_calls>',
            "</parameter> is missing after 'a'",
        ),
        ("chatml-xml", '<invoke name="now"></invoke>', "<invoke name= stands where it does not"),
        ("llama-3", '{"name": "bash", "parameters": {"command": "ls"}', "not valid JSON"),
        ("llama-3", '{"name": "bash", "parameters": [1]}', "must be an object of parameters"),
        ("llama-3", "<|python_tag|>now.call()", "not valid JSON: Expecting value"),
        ("compact", "<tool_call>now<arg_value>1</arg_value></tool_call>", "unexpected <arg_value>"),
    ],
)
def test_malformed_calls_are_explained_to_the_model(name: str, body: str, said: str):
    form = FORMATS[name]
    stop = form.renderer.decode([form.renderer.stop_ids[0]])
    parsed = read(name, body + stop, prompt=-1)
    assert parsed.state == "malformed"
    assert parsed.tool_calls == ()
    assert said in (parsed.error or "")
    assert parsed.content == body.removeprefix("<|python_tag|>")
    if parsed.unreadable:
        assert "Write a tool call as: " in (parsed.error or "")


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        ("bsh", "unknown_tool", "there is no tool 'bsh'; did you mean 'bash'?"),
        ("bash", "invalid_arguments", "parameter 'command' is missing"),
        ("bash command=ls limit=three", "invalid_arguments", "'limit' must be integer, not string"),
        ("bash command=ls limit=NaN", "invalid_arguments", "'limit' must be integer, not string"),
        ("bash command=ls how=up", "invalid_arguments", 'must be one of ["fast","slow"]'),
        ("bash command=ls cmd=ls", "invalid_arguments", "no parameter 'cmd'"),
        ('bash command=ls env={"a":1,"a":2}', "invalid_arguments", "must be object, not string"),
        ("bash command=true", "ok", None),
        ("now", "ok", None),
    ],
)
def test_calls_that_a_tool_does_not_accept_are_marked(call: str, status: str, said: str | None):
    name, *pairs = call.split()
    written = "".join(
        "<arg_key>{}</arg_key><arg_value>{}</arg_value>".format(*pair.split("=", 1))
        for pair in pairs
    )
    parsed = read("glm-5", f"so</think><tool_call>{name}{written}</tool_call><|observation|>")
    (made,) = parsed.tool_calls
    assert (parsed.state, made.status) == ("ok", status)
    if said is None:
        assert (made.error, parsed.error) == (None, None)
    else:
        assert said in (made.error or "")
        assert said in (parsed.error or "")


def test_the_error_shows_how_the_tool_is_called():
    error = read("glm-5", "</think><tool_call>bash<|observation|>").error or ""
    assert error.splitlines()[-1] == (
        "Write a tool call as: <tool_call>bash<arg_key>command</arg_key>"
        "<arg_value>STRING</arg_value><arg_key>limit</arg_key><arg_value>INTEGER</arg_value><arg_key>how</arg_key>"
        '<arg_value>ONE OF ["FAST","SLOW"]</arg_value><arg_key>env</arg_key><arg_value>OBJECT'
        "</arg_value></tool_call>"
    )


def test_one_wrong_call_does_not_take_the_others_with_it():
    good, bad = "<tool_call>now</tool_call>", "<tool_call>bash<arg_key></tool_call>"
    parsed = read("glm-5", f"so</think>{good}{bad}{good}<|observation|>")
    assert (len(parsed.tool_calls), len(parsed.unreadable)) == (2, 1)
    assert (parsed.content, parsed.state) == (bad, "malformed")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "Ann", "age": 3}', 0),
        ('{"answer": 12}', 0),
        ("{x} is a set", 0),
        ('{"name": "now"}', 1),
        ('{"name": "other", "arguments": {}}', 1),
    ],
)
def test_llama_json_that_is_an_answer_stays_one(text: str, calls: int):
    parsed = read("llama-3", text + "<|eot_id|>")
    assert (parsed.state, len(parsed.tool_calls)) == ("ok", calls)
    assert parsed.content == ("" if calls else text)


# ---------------------------------------------------------------- fuzzing


def mutate(ids: list[int], other: list[int], form: Format, rng: random.Random) -> list[int]:
    """One to four edits of ids or of their text: what noise, cuts and confusion look like."""
    special = sorted(form.renderer.tokenizer.special_ids.values())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(ids) + 1)
        end = min(len(ids), at + rng.randint(1, 6))
        match rng.randrange(8):
            case 0:
                del ids[at:end]
            case 1:
                ids[at:at] = ids[at:end]
            case 2:
                ids[at:at] = [rng.choice(special)]
            case 3:
                ids[at:at] = [rng.randrange(-2, form.renderer.vocab_size + 3)]
            case 4:
                start = rng.randrange(len(other))
                ids[at:end] = other[start : start + rng.randint(1, 20)]
            case 5:
                del ids[at:]
            case 6:
                text = form.renderer.decode(ids)
                cut = rng.randrange(len(text) + 1)
                noise = rng.choice(NOISE)
                ids[:] = form.encode(text[:cut] + noise + text[cut + rng.randint(0, 3) :])
            case 7:
                ids.append(rng.choice(form.renderer.stop_ids))
    return ids


NOISE = [
    "\ufeff",
    "\u202e",
    "\u2028",
    "\x00",
    '"',
    "{",
    "}",
    "\\",
    "\\ud800",
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "[" * 200,
    "<",
    "</",
    "<tool_call>",
    "</think>",
    "<think>",
    "\n\n",
    ",",
    "<function_calls>",
    '<invoke name="',
    "</parameter>",
    "null",
    '"name":',
    "🏴󠁧󠁢󠁷󠁬󠁳󠁿",
]


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_of_right_completions_are_read(name: str):
    form = FORMATS[name]
    rng = random.Random(name)
    whole = [form.encode(text) for text in form.completions]
    states = set()
    for _ in range(MUTANTS):
        ids = mutate(list(rng.choice(whole)), rng.choice(whole), form, rng)
        cuts = [rng.randrange(len(ids) + 1) for _ in range(rng.randrange(6))]
        states.add(check_reading(form.renderer, rng.choice(form.prompts), ids, cuts).state)
    assert len(states) >= 2 + (name != "deepseek-r1")


@pytest.mark.parametrize("name", FORMATS)
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_ids_are_read_alike_in_any_pieces(name: str, data: st.DataObject):
    form = FORMATS[name]
    tags = st.sampled_from(sorted(form.renderer.tokenizer.special_ids.values()))
    token = tags | st.integers(-1, form.renderer.vocab_size + 5)
    text = st.text(max_size=8).map(form.encode) | st.sampled_from(NOISE).map(form.encode)
    ids = [
        i for run in data.draw(st.lists(text | token.map(lambda i: [i]), max_size=15)) for i in run
    ]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    check_reading(form.renderer, data.draw(st.sampled_from(form.prompts)), ids, cuts)


# ---------------------------------------------------------------- cost

JUNK = {
    "calls": "<tool_call>bash</tool_call>",
    "open calls": "<tool_call>",
    "thoughts": "<think>a</think>",
    "thinking": "<think>",
    "drafts": "<tool_call></tool_call>x<think>",
    "keys": "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "spaces": " \n",
    "angles": "<",
    "brackets": "[{",
    "digits": "9",
    "json": '{"name": "now", "parameters": {"a": 1}} ',
    "xml": '<function_calls><invoke name="now"></invoke></function_calls>',
    "parameters": '<invoke name="a"><parameter name="b">',
    "surrogates": "\\ud800",
    "stops": "<|user|><|im_end|><|eot_id|>",
}


def costs_less(seconds: float, work: Callable[[], T], what: object) -> T:
    """What `work` returns, once one of three tries took less processor time than `seconds`.

    What costs too much does so each time; collecting the garbage of a long test session, or a
    neighbour's load, hits one.
    """
    took = []
    for _ in range(3):
        started = time.thread_time()
        result = work()
        took.append(time.thread_time() - started)
        if took[-1] < seconds:
            return result
    raise AssertionError(f"{what} took {took} s, each over {seconds} s")


def check_cost(name: str, characters: int, seconds: float) -> None:
    form = FORMATS[name]
    for junk in JUNK.values():
        for before in ("", '{"name": "', "<tool_call>bash<arg_key>a</arg_key><arg_value>"):
            ids = form.encode(before) + form.encode(junk) * (characters // len(junk))
            work = partial(form.renderer.parse, form.prompts[0], ids, TOOLS)
            parsed = costs_less(seconds, work, (before, junk))
            assert parsed.state == "truncated" or junk == JUNK["stops"]


@pytest.mark.parametrize("name", ["glm-5", "qwen3.5", "chatml-xml", "llama-3"])
def test_junk_is_read_in_no_time(name: str):
    """What costs the square of its length takes seconds here."""
    check_cost(name, 15_000, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"deepseek-r1"}))
def test_megabytes_of_junk_are_read_in_seconds(name: str):
    check_cost(name, 2_000_000, 15.0)


def test_streaming_costs_what_reading_at_once_costs():
    form = FORMATS["glm-5"]
    ids = form.encode("so</think><tool_call>bash<arg_key>command</arg_key><arg_value>")
    ids += form.encode("ls -l ") * 6_000

    def stream() -> None:
        reader = form.renderer.reader(form.prompts[0], TOOLS)
        for token in ids:
            reader.feed([token])
        reader.finish()

    costs_less(3.0, stream, "streaming")


# ---------------------------------------------------------------- the library as reference


def stripped(value):
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, dict):
        return {key: stripped(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("name", ["glm-5", "glm-4.5", "qwen3", "llama-3"])
def test_what_reads_well_is_what_the_library_reads(name: str):
    """Its parsers strip values and repair more; what is right here is the same there."""
    form = FORMATS[name]
    renderer = form.renderer
    assert isinstance(renderer, LibraryRenderer)
    rng = random.Random(f"reference {name}")
    whole = [form.encode(text) for text in form.completions]
    compared = 0
    for _ in range(2 * MUTANTS):
        ids = mutate(list(rng.choice(whole)), rng.choice(whole), form, rng)
        prompt = rng.choice(form.prompts)
        parsed = renderer.parse(prompt, ids, TOOLS)
        unlike = (  # readings that differ by design
            "<tool_call>" in (parsed.reasoning or "")
            or parsed.raw_text.startswith("<|python_tag|>")
            or (name == "glm-4.5" and (prompt == form.prompts[0] or "<think>" in parsed.raw_text))
            or not set(ids[:-1]).isdisjoint(renderer.stop_ids)
        )
        if parsed.state != "ok" or unlike:
            continue
        variant = renderer.with_thinking(enabled=prompt == form.prompts[0])
        library: Any = variant._renderer
        reference = library.parse_response(ids, prompt_ids=prompt, tools=TOOLS)
        compared += 1
        made = [(c.name, stripped(json.loads(c.arguments))) for c in parsed.tool_calls]
        assert made == [(c.name, stripped(c.arguments)) for c in reference.tool_calls]
        assert parsed.content.split() == reference.content.split()
        if parsed.raw_text.count("<think>") <= parsed.raw_text.startswith("<think>"):
            reasoning = reference.reasoning_content or ""
            assert (parsed.reasoning or "").split() == reasoning.split()
    assert compared > 5
