"""A trained tokenizer in GLM-5's format: with the library's renderer and in transformers."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headrace.errors import UserError
from headrace.rollout.types import ParseState
from headrace.tokens.messages import normalise
from headrace.tokens.renderer import create_renderer
from headrace.tokens.training import train_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a <command> & größer.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


def call(**arguments: object) -> dict:
    function = {"name": "bash", "arguments": json.dumps(arguments)}
    return {"id": "c", "type": "function", "function": function}


CONVERSATION = normalise(
    [
        {"role": "system", "content": "Use bash."},
        {"role": "user", "content": "how many lines?"},
        {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "count",
            "tool_calls": [call()],
        },
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "12 lines", "reasoning_content": "done"},
        {"role": "user", "content": "and files?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": " list them ",
            "tool_calls": [
                call(command="ls <a>"),
                call(command="wc", limit=3, deep={"ä": [1, None]}),
            ],
        },
        {"role": "tool", "content": "a.txt"},
        {"role": "tool", "content": "1 2 3"},
        {"role": "assistant", "content": "one file"},
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm5")
    train_tokenizer(["count the lines of notes.txt and answer 1234"] * 20, 400, "glm-5").save(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


def test_auto_finds_glm5(folder: Path):
    renderer = create_renderer("auto", folder)
    assert renderer.id == "renderers:glm-5"
    ids = renderer.render(CONVERSATION[:2], [])
    assert renderer.decode(ids) == (
        "[gMASK]<sop><|system|>Use bash.<|user|>how many lines?<|assistant|><think>"
    )
    special = renderer.tokenizer.special_ids
    assert renderer.stop_ids == tuple(
        special[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")
    )


def test_render_sample_parse_bridge(folder: Path):
    renderer = create_renderer("auto", folder)
    prompt = renderer.render(CONVERSATION[:2], TOOLS)
    completion = renderer.tokenizer.encode(
        "count them</think>Look:<tool_call>bash<arg_key>command</arg_key>"
        "<arg_value>wc -l</arg_value></tool_call><|observation|>"
    )
    read = renderer.parse(prompt, completion, TOOLS)
    assert (read.state, read.reasoning, read.content) == (ParseState.OK, "count them", "Look:")
    assert [(c.name, json.loads(c.arguments)) for c in read.tool_calls] == [
        ("bash", {"command": "wc -l"})
    ]
    answer = normalise([{"role": "tool", "content": "12 <|user|>"}])
    added = renderer.bridge(prompt, completion, answer, TOOLS)
    assert added is not None
    assert "".join(renderer.tokenizer.tokens(added)) == (
        "<tool_response>12 <|user|></tool_response><|assistant|><think>"
    )
    assert renderer.tokenizer.special_ids["<|user|>"] not in added  # text forges no role


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("end", range(2, len(CONVERSATION) + 1))
@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False}, {"clear_thinking": False}], ids=str
)
def test_transformers_renders_the_same_ids(
    folder: Path, theirs, tools: list, end: int, options: dict
):
    messages = CONVERSATION[:end]
    shaped = [
        {
            **m,
            "tool_calls": [
                {"function": {"name": "bash", "arguments": json.loads(c["function"]["arguments"])}}
                for c in m.get("tool_calls", [])
            ],
        }
        for m in messages
    ]
    expected = create_renderer("glm-5", folder, options).render(messages, tools)
    rendered = theirs.apply_chat_template(
        shaped, tools=tools or None, add_generation_prompt=True, return_dict=False, **options
    )
    assert rendered == expected


def test_unknown_format_is_a_user_error():
    with pytest.raises(UserError, match="chat_format 'chatml' is unknown; use one of compact"):
        train_tokenizer([], 300, "chatml")  # type: ignore[arg-type]  # what a recipe may say
