"""What is remembered of bodies changes nothing of what they say: any history of bodies is read as
each of them alone is."""

import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, answers, merged_tokenizer

from headrace.gateway.apis import anthropic_messages, openai_items
from headrace.gateway.app import create_app
from headrace.gateway.gateway import Gateway
from headrace.gateway.history import History
from headrace.gateway.transcript import CHAT, Dialect, Transcript
from headrace.gateway.turn import ApiError
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.messages import normalise

MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": 'a"},{"role":"user","content":"b'},
    {"role": "user", "content": "a", "extra": 1},
    {"role": "user", "content": "a", "extra": 1.0},
    {"role": "user", "content": "a", "extra": True},
    {"role": "assistant", "content": "]", "tool_calls": []},
]
SPACES = st.sampled_from(["", " ", "\n\t"])


BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "x"},
            {"type": "tool_result", "tool_use_id": "2", "content": "y"},
            {"type": "text", "text": "go on"},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "2", "name": "bash", "input": {}},
        ],
    },
    {"role": "assistant", "content": "done"},
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "x", "text": "t"}]},
    {"type": "function_call", "call_id": "1", "name": "bash", "arguments": "{}"},
    {"type": "function_call", "call_id": "2", "name": "bash", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]


class Api(NamedTuple):
    """A dialect, elements of it, and how a body of them is read without any memory."""

    dialect: Dialect
    elements: list[dict[str, Any]]
    alone: Callable[[list[Any]], list[dict[str, Any]]]


def blocks_alone(elements: list[Any]) -> list[dict[str, Any]]:
    body = anthropic_messages.MessagesRequest(messages=elements, max_tokens=1)
    return anthropic_messages.read(body).sent


APIS = {
    "chat": Api(CHAT, MESSAGES, list),
    "messages": Api(anthropic_messages.DIALECT, BLOCKS, blocks_alone),
    "responses": Api(openai_items.DIALECT, ITEMS, openai_items.read_items),
}


@st.composite
def bodies(draw: st.DrawFn, elements: list[dict[str, Any]]) -> list[str]:
    """Arrays that mostly continue an earlier one, in the same spelling or another."""
    known: list[list[str]] = [[]]
    texts = []
    for _ in range(draw(st.integers(1, 8))):
        parts = list(draw(st.sampled_from(known)))
        parts = parts[: draw(st.integers(max(0, len(parts) - 1), len(parts)))]
        for message in draw(st.lists(st.sampled_from(elements), min_size=1, max_size=3)):
            parts.append(json.dumps(message, indent=draw(st.sampled_from([None, 1]))))
        known.append(parts)
        space = draw(SPACES)
        texts.append(f"[{space}{f'{space},{space}'.join(parts)}{space}]")
    return texts


@pytest.mark.parametrize("name", APIS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_body_is_read_as_it_would_be_alone(name: str, data: st.DataObject) -> None:
    api = APIS[name]
    transcript, history = Transcript(), History()
    lead = {"role": "system", "content": "be brief"}
    for text in data.draw(bodies(api.elements)):
        for before in (None, lead):
            found = transcript.read(text.encode(), api.dialect, before)
            alone = [*([before] if before else []), *api.alone(json.loads(text))]
            assert json.dumps(found.sent) == json.dumps(alone)
            assert found.messages == normalise(alone)
            remembered = history._digested_to(found.messages).digests
            assert remembered == History()._digested_to(normalise(alone)).digests


@pytest.mark.parametrize("name", APIS)
def test_apis_share_no_memory_and_what_is_new_alone_is_read(name: str) -> None:
    api = APIS[name]
    read: list[int] = []

    def reading(element: Any, number: int) -> list[dict[str, Any]]:
        read.append(number)
        return api.dialect.read(element, number)

    elsewhere = Dialect(lambda *_: [{"role": "user", "content": "elsewhere"}])
    dialect, transcript = Dialect(reading, api.dialect.join), Transcript()
    ends = [api.elements[0], api.elements[-1]]
    turns = [*ends, ends[0]] if api.elements[-1].get("role") == "assistant" else ends
    for count in (1, 3, 5):
        text = json.dumps(turns * count).encode()
        lead = {"role": "system", "content": "s"}
        found = transcript.read(text, dialect, lead)
        again = transcript.read(text, dialect, dict(lead))
        assert all(a is b for a, b in zip(found.messages, again.messages, strict=True))
        other = transcript.read(text, elsewhere)
        assert {message["content"] for message in other.sent} == {"elsewhere"}
    assert read == list(range(5 * len(turns))), "each once"


def test_a_mark_on_the_last_message_costs_that_message_alone() -> None:
    """Clients that mark what to cache move the mark to the last message of each request."""
    transcript, dialect = Transcript(), anthropic_messages.DIALECT
    plain, marked, answer = BLOCKS[0], BLOCKS[1], BLOCKS[4]
    first = transcript.read(json.dumps([plain, answer, marked]).encode(), dialect)
    second = transcript.read(json.dumps([plain, answer, plain, answer, marked]).encode(), dialect)
    same = [a is b for a, b in zip(first.messages, second.messages, strict=False)]
    assert same == [True, True, False]
    assert first.messages == second.messages[:3]


def test_what_is_known_comes_back_as_the_same_objects() -> None:
    transcript = Transcript()
    first = transcript.read(json.dumps(MESSAGES[:3]).encode())
    second = transcript.read(json.dumps(MESSAGES).encode())
    assert all(a is b for a, b in zip(first.sent, second.sent, strict=False))
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
    assert len(first.sent) == 3, "an earlier body must not grow"


def test_an_error_names_the_place_in_the_whole_conversation() -> None:
    transcript = Transcript()
    transcript.read(json.dumps(MESSAGES[:2]).encode())
    with pytest.raises(ApiError, match=r"messages\[3\]\.role"):
        transcript.read(json.dumps([*MESSAGES[:2], MESSAGES[0], {"role": "king"}]).encode())
    with pytest.raises(ApiError, match="messages is empty"):
        transcript.read(b"[]")


async def test_requests_over_http_continue_their_session_and_nothing_is_changed() -> None:
    tokenizer = merged_tokenizer()
    engine = ScriptedEngine(answers(tokenizer.encode("12<|user|>")))
    recorded = []
    gateway = Gateway(engine, CompactRenderer(tokenizer), on_call=recorded.append)
    keys = [gateway.open_session(name) for name in ("one", "two")]
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        kept = []
        said: list[dict] = [{"role": "user", "content": "how many?"}]
        for turn in range(4):
            for key in keys:
                response = await client.post(
                    "/v1/chat/completions",
                    json={"messages": said},
                    headers={"Authorization": f"Bearer {key}"},
                )
                assert response.status_code == 200
            kept.append(copy.deepcopy([call.messages for call in recorded]))
            said = [*said, {"role": "assistant", "content": "12"}]
            said.append({"role": "user", "content": f"and {turn}?"})
        wrong = await client.post(
            "/v1/chat/completions", json={"messages": 5}, headers={"x-api-key": keys[0]}
        )
        assert wrong.status_code == 400
        assert "$.messages" in wrong.json()["error"]["message"]
    assert [call.parent_id for call in recorded if call.session_id == "two"] == [
        None,
        "two/0",
        "two/1",
        "two/2",
    ]
    assert kept[-1] == [call.messages for call in recorded]
    assert kept[1] == [call.messages for call in recorded[:4]]
