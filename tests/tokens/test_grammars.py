"""Grammars of answers: what each format itself writes, and nothing that it does not read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import chatml_tokenizer, merged_tokenizer

from headrace.engine.sampling import constrained
from headrace.engine.sampling.constrained import Grammars, GrammarState
from headrace.engine.types import SamplingParams
from headrace.tokens.chatml import TemplateRenderer
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.grammars import answer_grammar, writes_known_calls
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import normalise
from headrace.tokens.pieces import tag_ids, token_pieces
from headrace.tokens.renderer import ChatRenderer

needs_llguidance = pytest.mark.skipif(
    not constrained.installed(), reason="llguidance is not installed (the extra 'constrained')"
)
RENDERERS: dict[str, Callable[[], ChatRenderer]] = {
    "compact": lambda: CompactRenderer(merged_tokenizer()),
    "glm-5": lambda: LibraryRenderer("glm-5", merged_tokenizer(), {"enable_thinking": False}),
    "chatml": lambda: TemplateRenderer(chatml_tokenizer()),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "file": {"type": "string"},
                "mode": {"type": "string", "enum": ["add", "cut"]},
                "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            },
            "required": ["file", "lines"],
            "$defs": {"line": {"type": "integer"}},
        },
    },
}
OTHER = {"type": "function", "function": {"name": "look", "parameters": {}}}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def written(renderer: ChatRenderer, content: str, *calls: dict[str, Any]) -> list[int]:
    """Ids of an answer as the format lays it out, stop token included."""
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        answer["tool_calls"] = list(calls)
    messages = normalise([{"role": "user", "content": "u"}, answer])
    ids, mask = renderer.render_training(messages, [TOOL, OTHER])
    return [token for token, sampled in zip(ids, mask, strict=True) if sampled]


def state(renderer: ChatRenderer, grammar: str, folder: Path) -> GrammarState:
    renderer.tokenizer.save(folder)
    vocab = renderer.vocab_size
    sampling = SamplingParams(max_tokens=1, stop_ids=renderer.stop_ids, grammar=grammar)
    made = Grammars(token_pieces(folder), tag_ids(folder), vocab).state(sampling)
    assert made is not None
    return made


def accepted(renderer: ChatRenderer, grammar: str, ids: list[int], folder: Path) -> int:
    """How many leading ids the grammar allows."""
    followed = state(renderer, grammar, folder)
    for count, token in enumerate(ids):
        (mask,) = followed.masks(())
        if not mask[token]:
            return count
        followed.feed(token)
    return len(ids)


EDIT = call("edit", {"file": "a b.txt", "mode": "cut", "lines": [1, 22]})
SHORT = call("edit", {"file": "", "lines": []})
LOOK = call("look", {})


@needs_llguidance
@pytest.mark.parametrize("name", RENDERERS)
def test_calls_as_the_format_writes_them_are_allowed(name: str, tmp_path: Path) -> None:
    renderer = RENDERERS[name]()
    both = [TOOL, OTHER]
    for calls, tools, several in (
        ([EDIT], both, True),
        ([EDIT, SHORT, LOOK], both, True),
        ([SHORT], [TOOL], False),
        ([LOOK], [OTHER], False),
    ):
        ids = written(renderer, "", *calls)
        grammar = answer_grammar(renderer, tools=tools, several=several)
        assert accepted(renderer, grammar, ids, tmp_path) == len(ids)
        read = renderer.parse((), ids, both)
        assert [made.name for made in read.tool_calls] == [c["function"]["name"] for c in calls]


@needs_llguidance
@pytest.mark.parametrize("name", RENDERERS)
def test_other_calls_and_other_arguments_are_not(name: str, tmp_path: Path) -> None:
    renderer = RENDERERS[name]()
    one = answer_grammar(renderer, tools=[TOOL], several=False)
    for calls in (
        [LOOK],
        [EDIT, EDIT],
        [call("edit", {"file": "a", "mode": "other", "lines": []})],
        [call("edit", {"file": "a"})],
        [call("edit", {"file": "a", "lines": [1.5]})],
    ):
        ids = written(renderer, "", *calls)
        assert accepted(renderer, one, ids, tmp_path) < len(ids), calls
    ids = written(renderer, "I edit.", EDIT)
    assert accepted(renderer, one, ids, tmp_path) == 0, "a forced call is the whole answer"


@needs_llguidance
@pytest.mark.parametrize("name", RENDERERS)
def test_text_of_a_schema_alone_or_beside_calls(name: str, tmp_path: Path) -> None:
    renderer = RENDERERS[name]()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    alone = answer_grammar(renderer, schema=schema)
    beside = answer_grammar(renderer, schema=schema, tools=[TOOL])
    after = answer_grammar(renderer, schema=schema, after_thinking=True)
    good, blank, bad = '{"a": 12}', '\n\n{"a":12}', '{"a": "12"}'
    called = written(renderer, "", EDIT)
    for grammar, text, whole in (
        (alone, good, True),
        (alone, blank, False),
        (alone, bad, False),
        (beside, good, True),
        (after, good, True),
        (after, blank, True),
    ):
        ids = [*renderer.tokenizer.encode_text(text), renderer.stop_ids[0]]
        assert (accepted(renderer, grammar, ids, tmp_path) == len(ids)) is whole, (grammar, text)
    assert accepted(renderer, alone, called, tmp_path) == 0
    assert accepted(renderer, beside, called, tmp_path) == len(called)


def test_formats_whose_calls_are_not_known_say_so() -> None:
    renderer = TemplateRenderer(chatml_tokenizer(), "xml")
    assert not writes_known_calls(renderer)
    assert all(writes_known_calls(make()) for make in RENDERERS.values())
    with pytest.raises(ValueError, match="chatml-xml"):
        answer_grammar(renderer, tools=[TOOL])
    with pytest.raises(ValueError, match="a schema or tools"):
        answer_grammar(renderer)
