"""Forced tool calls and JSON schemas: refused where they cannot be kept, kept where they can."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from scripted import BASH, ScriptedEngine, answers, chatml_tokenizer, merged_tokenizer

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.local import LocalEngine
from headrace.engine.sampling import constrained
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.gateway.turn import ApiError
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.types import Call, ParseState
from headrace.tokens.chatml import TemplateRenderer
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.pieces import tag_ids, token_pieces
from headrace.tokens.renderer import ChatRenderer

needs_llguidance = pytest.mark.skipif(
    not constrained.installed(), reason="llguidance is not installed (the extra 'constrained')"
)

TOKENIZER = merged_tokenizer()
USER: Any = {"role": "user", "content": "how many lines?"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "sure": {"type": "boolean"},
            },
            "required": ["unit", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["sure", "lines"],
    "additionalProperties": False,
}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


# -- what is refused ----------------------------------------------------------------------------


async def refusal(followed: bool, renderer: ChatRenderer, **fields: Any) -> ApiError:
    engine = ScriptedEngine(answers(TOKENIZER.encode("12<|user|>")))
    gateway = Gateway(engine, renderer, constrained=followed)
    with pytest.raises(ApiError) as caught:
        await gateway.chat(gateway.open_session("s"), {"messages": [USER], **fields})
    assert not engine.requests
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": JSON_SCHEMA}, "response_format", "='json_schema' is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'json_object'"),
        ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice", "'required' is not"),
        ({"tool_choice": NAMED, "tools": [WEATHER]}, "tool_choice", "'weather' is not supported"),
    ],
)
async def test_without_grammars_they_are_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(False, CompactRenderer(TOKENIZER), **fields)
    assert (error.code, error.param) == ("unsupported", param)
    assert words in error.message
    assert "does not constrain sampling" in error.message


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"response_format": {"type": "grammar"}}, "unsupported", "send 'text', 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "invalid_request", "needs a schema"),
        ({"tool_choice": "required"}, "invalid_request", "there are no tools"),
        ({"tool_choice": NAMED, "tools": [BASH]}, "invalid_request", "none of the tools: bash"),
        ({"tool_choice": {"type": "function"}}, "invalid_request", "without a name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "unsupported", "send 'auto'"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_them_too(
    fields: dict[str, Any], code: str, words: str
) -> None:
    error = await refusal(True, CompactRenderer(TOKENIZER), **fields)
    assert error.code == code
    assert words in error.message


async def test_calls_in_a_format_without_a_grammar_are_refused() -> None:
    renderer = TemplateRenderer(chatml_tokenizer(), "xml")
    error = await refusal(True, renderer, tools=[BASH], tool_choice="required")
    assert (error.code, error.param) == ("unsupported", "tool_choice")
    assert "the calls of renderer chatml-xml have no grammar" in error.message


async def test_a_grammar_begins_behind_thinking_and_a_budget_ends_that_first() -> None:
    renderer = LibraryRenderer("glm-5", TOKENIZER)
    thought = TOKENIZER.encode("so</think>")
    engine = ScriptedEngine(answers(thought, TOKENIZER.encode('{"a":1}<|user|>')))
    gateway = Gateway(engine, renderer, constrained=True)
    body = {"messages": [USER], "response_format": {"type": "json_object"}}
    key = gateway.open_session("s")
    await gateway.chat(key, body)
    budget = {"chat_template_kwargs": {"thinking_budget": 4}}
    engine.script = answers(thought, TOKENIZER.encode('{"a":1}<|user|>'))
    answer = await gateway.chat(key, body | budget)
    assert answer["choices"][0]["message"]["content"] == '{"a":1}'
    end = renderer.think_end_id
    asked = [request.sampling for request in engine.requests]
    assert [sampling.grammar_after for sampling in asked] == [end, end, None]
    assert {sampling.grammar for sampling in asked} == {asked[0].grammar}
    assert end in asked[1].stop_ids


# -- what is kept -------------------------------------------------------------------------------


class Rig:
    """A gateway over a real engine, whose random model would say anything."""

    def __init__(self, server: GatewayServer, key: str, renderer: ChatRenderer) -> None:
        self.server, self.key, self.renderer = server, key, renderer
        self.openai = AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0)
        root = server.base_url.removesuffix("/v1")
        self.anthropic = AsyncAnthropic(base_url=root, api_key=key, max_retries=0)

    async def calls(self) -> tuple[Call, ...]:
        return await self.server.gateway.close_session("s")


RENDERERS: dict[str, Callable[[], ChatRenderer]] = {
    "compact": lambda: CompactRenderer(TOKENIZER),
    "glm-5": lambda: LibraryRenderer("glm-5", TOKENIZER, {"enable_thinking": False}),
    "chatml": lambda: TemplateRenderer(chatml_tokenizer()),
}


@pytest.fixture(params=RENDERERS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    renderer = RENDERERS[request.param]()
    renderer.tokenizer.save(tmp_path)
    config = ModelConfig(
        vocab_size=renderer.vocab_size + 3,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=4096,
        tie_embeddings=True,
    )
    model = Decoder(config)
    model.init_weights(0)
    core = EngineCore(
        model,
        EngineConfig(max_running=4, max_context=4096, seed=3),
        pieces=token_pieces(tmp_path),
        tags=tag_ids(tmp_path),
    )
    engine = LocalEngine(core)
    gateway = Gateway(engine, renderer, model="tiny", constrained=True)
    server = await GatewayServer.start(gateway)
    made = Rig(server, gateway.open_session("s", seed=7), renderer)
    yield made
    await made.openai.close()
    await made.anthropic.close()
    await server.stop()
    await engine.close()


class Answer(BaseModel):
    """What a client wants to be told."""

    sure: bool
    colour: Literal["red", "green"]
    lines: int = Field(ge=0, le=99)


def check_weather(arguments: str) -> None:
    given = json.loads(arguments)
    assert given["unit"] in ("C", "F")
    assert 1 <= given["days"] <= 7
    assert set(given) <= {"unit", "days", "sure"}


@needs_llguidance
async def test_openai_clients_get_the_form_they_ask_for(rig: Rig) -> None:
    ask: Any = {"model": "tiny", "messages": [USER], "max_tokens": 400}
    parsed = await rig.openai.chat.completions.parse(**ask, response_format=Answer)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    short: Any = {**ask, "max_tokens": 30, "response_format": {"type": "json_object"}}
    free = await rig.openai.chat.completions.create(**short)
    content = free.choices[0].message.content or ""
    assert content.startswith("{")  # a random model hardly ever ends a text
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    choices: list[Any] = ["required", NAMED]
    for choice in choices:
        called = await rig.openai.chat.completions.create(
            **ask, tools=[WEATHER], tool_choice=choice
        )
        assert called.choices[0].finish_reason == "tool_calls"
        calls = called.choices[0].message.tool_calls or []
        assert len(calls) == 1 or choice == "required"
        for call in calls:
            assert call.type == "function"
            assert call.function.name == "weather"
            check_weather(call.function.arguments)
    streamed = ""
    stream = await rig.openai.chat.completions.create(
        **ask, response_format=JSON_SCHEMA, stream=True
    )
    async for chunk in stream:
        streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert set(json.loads(streamed)) == {"sure", "lines"}
    response = await rig.openai.responses.parse(
        model="tiny", input="how many?", text_format=Answer, max_output_tokens=400
    )
    assert isinstance(response.output_parsed, Answer)
    calls_made = await rig.calls()
    assert len(calls_made) == 6
    assert {call.parse_state for call in calls_made} <= {ParseState.OK, ParseState.TRUNCATED}
    for call in calls_made:
        assert all(span.logprobs for span in call.spans)


@needs_llguidance
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_anthropics_clients_get_the_call_they_ask_for(rig: Rig, choice: Any) -> None:
    function: Any = WEATHER["function"]
    tool: Any = {"name": "weather", "input_schema": function["parameters"]}
    answer = await rig.anthropic.messages.create(
        model="tiny", messages=[USER], max_tokens=400, tools=[tool], tool_choice=choice
    )
    assert answer.stop_reason == "tool_use"
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert {use.name for use in uses} == {"weather"}
    for use in uses:
        check_weather(json.dumps(use.input))


@needs_llguidance
async def test_a_schema_that_cannot_be_followed_is_the_clients_error(rig: Rig) -> None:
    import openai

    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}
    with pytest.raises(openai.BadRequestError, match="grammar cannot be read"):
        await rig.openai.chat.completions.create(
            model="tiny", messages=[USER], response_format=form
        )
