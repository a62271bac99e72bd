"""Requests as real agents send them, without the agents: what their packages add, lose and change
on the way. tests/agents runs the agents themselves."""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from recorded import check_laws
from scripted import BASH, ScriptedEngine, answers, merged_tokenizer

from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.rollout.types import Call
from headrace.tokens.library import LibraryRenderer

TOKENIZER = merged_tokenizer()
CALL = TOKENIZER.encode(
    "list them</think>look<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value>"
    "</tool_call><|observation|>"
)
SAID = TOKENIZER.encode("so</think>12<|user|>")
USER = {"role": "user", "content": "how many lines?"}


class Served(NamedTuple):
    """A gateway that answers with a call, then with a text for ever."""

    http: httpx.AsyncClient
    gateway: Gateway
    engine: ScriptedEngine

    async def post(self, path: str, **body: Any) -> httpx.Response:
        response = await self.http.post(path, json={"model": "tiny", **body})
        response.raise_for_status()
        return response

    async def chat(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The answer's message."""
        told = await self.post("chat/completions", messages=messages, tools=[BASH], **more)
        return told.json()["choices"][0]["message"]

    def calls(self) -> tuple[Call, ...]:
        """After the token laws have been checked of them."""
        calls = self.gateway.calls("s")
        check_laws(calls, self.engine)
        return calls


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    engine = ScriptedEngine(answers(CALL, SAID), max_context=10_000)
    gateway = Gateway(engine, LibraryRenderer("glm-5", TOKENIZER), model="tiny")
    server = await GatewayServer.start(gateway)
    headers = {"Authorization": f"Bearer {gateway.open_session('s')}"}
    async with httpx.AsyncClient(base_url=server.base_url, headers=headers) as http:
        yield Served(http, gateway, engine)
    await server.stop()


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


RESULT = {"role": "tool", "tool_call_id": "call_0_0", "content": "12"}


async def test_litellm_sends_back_fields_of_its_own(served: Served) -> None:
    """As mini-swe-agent does: `Message.model_dump()` of LiteLLM, keys in another order."""
    answer = await served.chat(USER)
    sent = {
        "content": answer["content"],
        "role": "assistant",
        "tool_calls": [
            {"function": call["function"], "id": call["id"], "type": "function"}
            for call in answer["tool_calls"]
        ],
        "function_call": None,
        "reasoning_content": answer["reasoning_content"],
        "provider_specific_fields": {"refusal": None, "reasoning_content": "list them"},
    }
    await served.chat(USER, sent, RESULT)
    assert [call.parent_id for call in served.calls()] == [None, "s/0"]


async def test_an_index_of_a_streamed_call_and_a_tools_name_do_not_count(served: Served) -> None:
    """As the shell agent of `verifiers` does, which assembles its streams itself."""
    answer = await served.chat(USER, stream=False)
    sent = {**answer, "tool_calls": [call | {"index": 0} for call in answer["tool_calls"]]}
    await served.chat(USER, sent, {**RESULT, "name": "bash"})
    assert [call.parent_id for call in served.calls()] == [None, "s/0"]


async def test_only_the_last_piece_of_the_reasoning_comes_back(served: Served) -> None:
    """As from OpenAI's package for Node.js, whose helper for streams keeps of fields that it does
    not know the piece that came last."""
    response = await served.post("chat/completions", messages=[USER], tools=[BASH], stream=True)
    deltas = [c["delta"] for event in _events(response) for c in event["choices"]]
    pieces = [d["reasoning_content"] for d in deltas if "reasoning_content" in d]
    assert len(pieces) > 1, "nothing would be lost"
    (call,) = (c for d in deltas for c in d.get("tool_calls", ()) if c.get("id"))
    arguments = "".join(c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ()))
    sent = {
        "role": "assistant",
        "content": "look",
        "reasoning_content": pieces[-1],
        "tool_calls": [{**call, "function": {"name": "bash", "arguments": arguments}}],
    }
    await served.chat(USER, sent, RESULT)
    assert [call.parent_id for call in served.calls()] == [None, "s/0"]


async def test_other_reasoning_is_a_rewritten_history(served: Served) -> None:
    """And not taken for an answer that somebody else put in."""
    answer = await served.chat(USER)
    second = await served.chat(USER, answer, RESULT)
    other = {**second, "reasoning_content": "I thought of something else"}
    await served.chat(USER, answer, RESULT, other, {"role": "user", "content": "and now?"})
    assert [call.fork_reason for call in served.calls()] == [None, None, "history_rewritten"]


async def test_an_answer_that_the_agent_left_out_is_a_rewritten_history(served: Served) -> None:
    """mini-swe-agent says what was wrong with an answer instead of sending it back."""
    await served.chat(USER)
    again = {"role": "user", "content": "No tool calls found in the response."}
    answer = await served.chat(USER, again)
    await served.chat(USER, again, answer, {"role": "user", "content": "and now?"})
    reasons = [call.fork_reason for call in served.calls()]
    assert reasons == [None, "history_rewritten", "bridge_refused"]


async def test_a_streamed_response_opens_every_part_before_its_pieces(served: Served) -> None:
    """OpenAI's package for Node.js fails over a piece of reasoning whose part was not added."""
    response = await served.post("responses", input="how many lines?", stream=True)
    opened: dict[tuple[int, int], str] = {}
    kinds = []
    for event in _events(response):
        place = (event.get("output_index", -1), event.get("content_index", -1))
        if event["type"] == "response.content_part.added":
            opened[place] = event["part"]["type"]
        elif event["type"] == "response.content_part.done":
            kinds.append(event["part"]["type"])
            assert opened[place] == event["part"]["type"]
            assert event["part"]["text"] in ("list them", "look")
        elif event["type"].endswith("_text.delta"):
            kind = event["type"].removeprefix("response.").removesuffix(".delta")
            assert opened[place] == kind
    assert kinds == ["reasoning_text", "output_text"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_items_of_a_response_may_be_named_by_their_ids(
    served: Served, streamed: bool
) -> None:
    """As Vercel's AI SDK does unless it is told `store: false`."""
    tool = {"type": "function", "name": "bash", **BASH["function"]}
    body = {"input": [USER], "tools": [tool], "stream": streamed}
    told = await served.post("responses", **body)
    output = (_events(told)[-1]["response"] if streamed else told.json())["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    named = [{"type": "item_reference", "id": item["id"]} for item in output]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "12"}
    for items in (named, [*named[:2], output[2]]):
        await served.post("responses", input=[USER, *items, result], tools=[tool])
    calls = served.calls()
    assert [call.parent_id for call in calls] == [None, "s/0", "s/0"]
    assert calls[1].messages[1]["reasoning_content"] == "list them"


@pytest.mark.parametrize("name", ["rs_s-7_0", "msg_other-0_0", "fc_s-0_3", "nonsense", None, 7])
async def test_items_that_nobody_kept_are_refused(served: Served, name: Any) -> None:
    tool = {"type": "function", "name": "bash", **BASH["function"]}
    await served.post("responses", input="how many lines?", tools=[tool])
    # Its one call, which is there, and another item, which is not.
    items = [{"type": "item_reference", "id": i} for i in ("fc_s-0_2", name)]
    body = {"model": "tiny", "input": [USER, *items], "tools": [tool]}
    response = await served.http.post("responses", json=body)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "item_not_found"
    assert error["message"].startswith(f"input[2].id={name!r}")
    assert "store=false" in error["message"]
