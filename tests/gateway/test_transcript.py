"""What is remembered of bodies changes nothing of what they say: any history of bodies is read as
each of them alone is."""

import copy
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, answers, merged_tokenizer

from headrace.gateway.app import create_app
from headrace.gateway.gateway import Gateway
from headrace.gateway.history import History
from headrace.gateway.transcript import Transcript
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


@st.composite
def bodies(draw: st.DrawFn) -> list[str]:
    """Arrays that mostly continue an earlier one, in the same spelling or another."""
    known: list[list[str]] = [[]]
    texts = []
    for _ in range(draw(st.integers(1, 8))):
        parts = list(draw(st.sampled_from(known)))
        parts = parts[: draw(st.integers(max(0, len(parts) - 1), len(parts)))]
        for message in draw(st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=3)):
            parts.append(json.dumps(message, indent=draw(st.sampled_from([None, 1]))))
        known.append(parts)
        space = draw(SPACES)
        texts.append(f"[{space}{f'{space},{space}'.join(parts)}{space}]")
    return texts


@settings(max_examples=150, deadline=None)
@given(bodies())
def test_every_body_is_read_as_it_would_be_alone(texts: list[str]) -> None:
    transcript, history = Transcript(), History()
    for text in texts:
        found = transcript.read(text.encode())
        alone = json.loads(text)
        assert json.dumps(found.sent) == json.dumps(alone)
        assert found.messages == normalise(alone)
        remembered = history._digested_to(found.messages).digests
        assert remembered == History()._digested_to(normalise(alone)).digests


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
