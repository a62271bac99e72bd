"""Responses through their official client, unmodified: whole and streaming."""

import json
from typing import Any

import openai
import pytest
from api_rig import CALL, RENDERER, SAID, THOUGHT, Running
from openai import AsyncOpenAI
from scripted import BASH, answers

RESPONSES_TOOL = {"type": "function", **BASH["function"], "strict": False}


async def test_responses_hold_a_conversation_by_items(
    running: Running, client: AsyncOpenAI
) -> None:
    first = await client.responses.create(
        model="tiny",
        instructions="Use bash.",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"command": "ls"}
    history: list[Any] = [{"role": "user", "content": "how many lines?"}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "12"})
    second = await client.responses.create(
        model="tiny",
        instructions="Use bash.",
        input=history,
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    assert second.output_text == "there are 12"
    assert second.status == "completed"
    assert running.calls[1].parent_id == "s/0"


async def test_responses_continue_by_id(running: Running, client: AsyncOpenAI) -> None:
    first = await client.responses.create(
        model="tiny",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    call = first.output[1]
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    second = await client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[output],  # type: ignore[list-item]
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    assert second.output_text == "there are 12"
    assert running.calls[1].parent_id == "s/0"
    with pytest.raises(openai.NotFoundError, match="'gone' is no response"):
        await client.responses.create(model="tiny", previous_response_id="resp_gone", input="x")


@pytest.mark.parametrize("output", [CALL, SAID, SAID[:-1]])
async def test_responses_stream_in_the_events_their_client_knows(
    running: Running, client: AsyncOpenAI, output: list[int]
) -> None:
    running.engine.script = answers(THOUGHT + output)
    async with client.responses.stream(
        model="tiny",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response() if output[-1] in RENDERER.stop_ids else None
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == ("response.incomplete" if final is None else "response.completed")
    whole = await client.responses.create(
        model="tiny",
        input="how many lines?",
        tools=[RESPONSES_TOOL],  # type: ignore[list-item]
    )
    streamed = events[-1].response  # type: ignore[union-attr]

    def without_ids(response: Any) -> list[dict[str, Any]]:
        return [
            {
                k: v
                for k, v in item.model_dump().items()
                if k not in ("id", "call_id", "parsed_arguments")
            }
            for item in response.output
        ]

    assert [i["type"] for i in without_ids(streamed)] == [i["type"] for i in without_ids(whole)]
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage


async def test_responses_refuse_what_they_lack(client: AsyncOpenAI) -> None:
    for fields, word in (
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": [{"type": "compaction", "id": "x"}]}, "compaction"),
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            await client.responses.create(**{"model": "tiny", "input": "x", **fields})
