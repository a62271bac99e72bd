"""Messages through their official client, unmodified: whole and streaming."""

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from api_rig import CALL, SAID, THOUGHT, TOKENIZER, USER, Running
from scripted import BASH, answers, spans

from headrace.engine.types import GenerationRequest, GenerationResult
from headrace.rollout.types import FinishReason

ANTHROPIC_TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": BASH["function"]["parameters"],
}


async def test_thinking_is_switched_per_request(running: Running, claude: AsyncAnthropic) -> None:
    running.engine.script = answers(SAID)
    message = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        thinking={"type": "disabled"},
        messages=[USER],  # type: ignore[list-item]
    )
    assert [block.type for block in message.content] == ["text"]
    assert running.engine.requests[0].prompt_ids[-1] == TOKENIZER.special_ids["</think>"]


async def test_messages_hold_a_conversation_by_blocks(
    running: Running, claude: AsyncAnthropic
) -> None:
    system = [{"type": "text", "text": "Use bash.", "cache_control": {"type": "ephemeral"}}]
    first = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        system=system,  # type: ignore[arg-type]
        messages=[USER],  # type: ignore[list-item]
        tools=[ANTHROPIC_TOOL],  # type: ignore[list-item]
    )
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert first.stop_reason == "tool_use"
    use = first.content[1]
    assert use.type == "tool_use"
    assert use.input == {"command": "ls"}
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "12"}],
    }
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        system=system,  # type: ignore[arg-type]
        messages=messages,
        tools=[ANTHROPIC_TOOL],  # type: ignore[list-item]
    )
    assert second.content[-1].text == "there are 12"  # type: ignore[union-attr]
    assert second.stop_reason == "end_turn"
    assert running.calls[1].parent_id == "s/0"
    counted = await claude.messages.count_tokens(
        model="tiny",
        system=system,  # type: ignore[arg-type]
        messages=[USER],  # type: ignore[list-item]
        tools=[ANTHROPIC_TOOL],  # type: ignore[list-item]
    )
    assert counted.input_tokens == len(running.calls[0].prompt_delta)


@pytest.mark.parametrize("output", [CALL, SAID, SAID[:-1]])
async def test_messages_stream_in_the_events_their_client_knows(
    running: Running, claude: AsyncAnthropic, output: list[int]
) -> None:
    running.engine.script = answers(THOUGHT + output)
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 64,
        "messages": [USER],
        "tools": [ANTHROPIC_TOOL],
    }
    async with claude.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    whole = await claude.messages.create(**asked)

    def without_ids(message: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in b.model_dump().items() if k != "id"} for b in message.content]

    assert without_ids(streamed) == without_ids(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_messages_stop_at_a_sequence(running: Running, claude: AsyncAnthropic) -> None:
    sampled = TOKENIZER.encode("</think>") + TOKENIZER.encode_text("one STOP")

    def script(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.id, spans(sampled), FinishReason.STOP, stop="STOP")

    running.engine.script = script
    message = await claude.messages.create(
        model="tiny",
        max_tokens=64,
        messages=[USER],  # type: ignore[list-item]
        stop_sequences=["STOP"],
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[-1].text == "one "  # type: ignore[union-attr]


async def test_anthropic_errors_are_its_clients_own(
    running: Running, claude: AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="no open session"):
        await claude.with_options(api_key="wrong").messages.create(
            model="m",
            max_tokens=5,
            messages=[USER],  # type: ignore[list-item]
        )
    for fields, word in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=word) as caught:
            await claude.messages.create(
                **{"model": "m", "max_tokens": 5, "messages": [USER], **fields}
            )
        body = caught.value.body
        assert isinstance(body, dict)
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
    assert [model.id async for model in claude.models.list()] == ["tiny"]
    with pytest.raises(anthropic.NotFoundError):
        await claude.models.retrieve("other")
