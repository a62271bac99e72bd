"""OpenAI's and Anthropic's packages for Node.js, and Vercel's AI SDK, unmodified.

Runs where HEADRACE_NODE_AGENTS names a folder that has them in node_modules (`-m slow`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from agent_rig import Rig, chain, installed, run_program, says, serving

from headrace.tokens.thinking import ThinkingMode

NODE = installed("HEADRACE_NODE_AGENTS")
HERE = Path(__file__).parent
LS, WC = ("bash", {"command": "ls"}), ("bash", {"command": "wc -l notes.txt"})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="HEADRACE_NODE_AGENTS names no installation"),
]


async def run(script: str, part: str, rig: Rig, folder: Path, *more: str) -> dict[str, Any]:
    settings = {
        "HEADRACE_NODE_AGENTS": str(NODE),
        "OPENAI_BASE_URL": rig.url,
        "OPENAI_API_KEY": rig.key,
        "ANTHROPIC_BASE_URL": rig.root,
        "ANTHROPIC_API_KEY": rig.key,
    }
    command = ("node", HERE / script, part, *more)
    told = await run_program(command, folder=folder, environment=settings)
    return json.loads(told.splitlines()[-1])


FRESH = "bridge_refused"
"""What GLM-5's template does by default at a new user turn: earlier thinking is dropped."""


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [(None, ["first", FRESH, FRESH, None]), (ThinkingMode.PRESERVED, ["first", None, None, None])],
)
async def test_chat_completions_are_one_conversation(
    tmp_path: Path, thinking: ThinkingMode | None, expected: list[str | None]
) -> None:
    outputs = [says("12 lines"), says("still 12"), says("look", LS, WC), says("12 in all")]
    async with serving(*outputs, thinking=thinking) as rig:
        told = await run("openai_agent.mjs", "chat", rig, tmp_path)
        calls = await rig.calls()
    assert (told["whole"], told["text"], told["finish"]) == ("12 lines", "still 12", "stop")
    assert told["usage"]["completion_tokens"] == len(outputs[1])
    assert told["ran"] == ["ls", "wc -l notes.txt"]
    assert told["last"] == "12 in all"
    assert chain(calls) == expected
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0


async def test_the_packages_own_tool_loop_is_one_conversation(tmp_path: Path) -> None:
    async with serving(says("look", LS, WC), says("12 in all")) as rig:
        told = await run("openai_agent.mjs", "runner", rig, tmp_path)
        calls = await rig.calls()
    assert told["said"] == "12 in all"
    assert told["ran"] == ["ls", "wc -l notes.txt"]
    assert told["usage"]["completion_tokens"] == sum(len(call.output_ids) for call in calls)
    assert chain(calls) == ["first", None]
    assert rig.refused == 0


async def test_responses_are_one_conversation(tmp_path: Path) -> None:
    async with serving(says("look", LS, WC), says("12 in all"), says("still 12")) as rig:
        told = await run("openai_agent.mjs", "responses", rig, tmp_path)
        calls = await rig.calls()
    assert (told["calls"], told["ran"]) == (2, ["ls", "wc -l notes.txt"])
    assert (told["second"], told["third"], told["status"]) == ("12 in all", "still 12", "completed")
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(
        told["types"]
    )
    assert chain(calls) == ["first", None, FRESH]
    assert rig.refused == 0


async def test_completions_are_answered(tmp_path: Path) -> None:
    output = says("12 lines")[:-1]
    async with serving(output) as rig:
        told = await run("openai_agent.mjs", "completions", rig, tmp_path)
        calls = await rig.calls()
    assert told["whole"] == told["text"] == "so</think>12 lines"
    assert (told["finish"], told["tokens"]) == ("length", len(output))
    assert len(calls) == 2
    assert rig.refused == 0


async def test_errors_are_the_packages_own(tmp_path: Path) -> None:
    async with serving(says("never")) as rig:
        told = await run("openai_agent.mjs", "errors", rig, tmp_path)
        assert await rig.calls() == ()
    assert told["key"] == {
        "name": "AuthenticationError",
        "status": 401,
        "code": "invalid_api_key",
        "param": None,
    }
    bad = {"name": "BadRequestError", "status": 400}
    assert told["schema"] == bad | {"code": "unsupported", "param": "response_format"}
    assert told["role"] == bad | {"code": "invalid_request", "param": "messages"}
    assert told["streamed"] == bad | {"code": "invalid_request", "param": "temperature"}
    assert told["response"] == bad | {"code": "unsupported", "param": "background"}
    assert told["models"] == ["tiny"]


async def test_messages_are_one_conversation(tmp_path: Path) -> None:
    outputs = [says("look", LS, WC), says("again", LS), says("12 in all")]
    async with serving(*outputs) as rig:
        told = await run("anthropic_agent.mjs", "loop", rig, tmp_path)
        calls = await rig.calls()
    uses = ["thinking", "text", "tool_use"]
    assert told["kinds"] == [[*uses, "tool_use"], uses, ["thinking", "text"]]
    assert (told["said"], told["stop"]) == ("12 in all", "end_turn")
    assert told["ran"] == ["ls", "wc -l notes.txt", "ls"]
    assert told["counted"]
    assert {"message_start", "content_block_delta", "message_stop"} <= set(told["types"])
    assert chain(calls) == ["first", None, None]
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0


async def test_errors_of_messages_are_the_packages_own(tmp_path: Path) -> None:
    async with serving(says("never")) as rig:
        told = await run("anthropic_agent.mjs", "errors", rig, tmp_path)
        assert await rig.calls() == ()
    assert told["key"] == {
        "name": "AuthenticationError",
        "status": 401,
        "type": "authentication_error",
    }
    assert told["budget"] == {
        "name": "BadRequestError",
        "status": 400,
        "type": "invalid_request_error",
    }


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_the_loop_of_the_ai_sdk_is_one_conversation(
    tmp_path: Path, api: str, how: str
) -> None:
    outputs = [says("look", LS, WC), says("again", LS), says("12 in all")]
    async with serving(*outputs) as rig:
        told = await run("ai_sdk_agent.mjs", api, rig, tmp_path, how)
        calls = await rig.calls()
    assert (told["text"], told["errors"]) == ("12 in all", [])
    assert told["ran"] == ["ls", "wc -l notes.txt", "ls"]
    assert chain(calls) == ["first", None, None]
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0
