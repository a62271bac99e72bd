"""The terminal agent: an ordinary tool-calling loop over the OpenAI chat API.

It knows an HTTP endpoint, one tool and a sandbox, and nothing of tokens or training.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.rollout.failures.reasons import FailureReason
from headrace.sandbox.types import CommandResult, EndReason, Sandbox
from headrace.tasks.conversation import AgentFailure, ModelClient, ToolCall
from headrace.tasks.types import Endpoint

SYSTEM_PROMPT = "Use bash, then answer."

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]

NO_OUTPUT = "(no output)"

_MAX_CALLS_PER_TURN = 4


@dataclass
class Transcript:
    """What an agent did, filled while it runs so that a cut rollout still tells its story.

    Attributes:
        commands: every command it ran, in order.
        answer: its final message; None while it has not answered.
        turns: assistant messages so far.
        tool_errors: tool calls that could not be read.
    """

    commands: list[str] = field(default_factory=list)
    answer: str | None = None
    turns: int = 0
    tool_errors: int = 0


def tool_text(exit_code: int, output: str, limit: int) -> str:
    """What the model reads after a command.

    Args:
        exit_code: mentioned only when it is not zero.
        output: stdout and stderr.
        limit: characters of output kept.
    """
    text = output.strip()
    if len(text) > limit:
        text = text[:limit].rstrip() + "..."
    if exit_code == 0:
        return text or NO_OUTPUT
    return f"exit {exit_code}: {text}" if text else f"exit {exit_code}"


def result_text(result: CommandResult, limit: int) -> str:
    """`tool_text` of a sandbox result, with the limit that ended it, if one did."""
    text = tool_text(result.exit_code, result.output.decode("utf-8", "replace"), limit)
    return (
        text if result.ended is EndReason.EXITED else f"{text} [{result.ended.replace('_', ' ')}]"
    )


def opening_messages(instruction: str) -> list[dict[str, Any]]:
    """System prompt and instruction."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": instruction},
    ]


async def run_agent(
    client: ModelClient,
    endpoint: Endpoint,
    sandbox: Sandbox,
    instruction: str,
    transcript: Transcript,
    *,
    output_limit: int,
    next_latency: Callable[[], float] | None = None,
) -> str:
    """Talk to the model until it answers without calling a tool; returns that answer.

    Args:
        client: shared client of `endpoint.base_url`.
        endpoint: session key, sampling and turn limit. The caller enforces its deadline.
        sandbox: where commands run.
        instruction: the task.
        transcript: filled as the agent goes.
        output_limit: characters of command output shown to the model.
        next_latency: seconds to wait before each command, for workloads with slow tools.

    Raises:
        AgentFailure: out of turns, or the conversation no longer fits the model.
        EndpointError: the endpoint failed and retrying did not help.
        SandboxError: the sandbox failed.
    """
    messages = opening_messages(instruction)
    for _ in range(endpoint.max_turns):
        message = await client.complete(endpoint, messages, TOOLS)
        transcript.turns += 1
        calls = message.tool_calls or []
        if not calls:
            answer = message.content or ""
            transcript.answer = answer
            return answer
        messages.append(message.said())
        for number, call in enumerate(calls):
            if number >= _MAX_CALLS_PER_TURN:
                text = f"error: at most {_MAX_CALLS_PER_TURN} calls at once"
            else:
                text = await _run_call(call, sandbox, transcript, output_limit, next_latency)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    raise AgentFailure(FailureReason.TURN_LIMIT, f"no answer within {endpoint.max_turns} turns")


async def _run_call(
    call: ToolCall,
    sandbox: Sandbox,
    transcript: Transcript,
    output_limit: int,
    next_latency: Callable[[], float] | None,
) -> str:
    """Run one tool call; whatever is wrong with the call becomes text for the model."""
    command = _read_command(call)
    if command is None:
        transcript.tool_errors += 1
        return 'error: call bash with {"command": "..."}'
    transcript.commands.append(command)
    if next_latency is not None:
        await asyncio.sleep(next_latency())
    return result_text(await sandbox.run(command), output_limit)


def _read_command(call: ToolCall) -> str | None:
    """The command of a bash call, or None if the call is anything else."""
    if call.function.name != "bash":
        return None
    try:
        arguments = json.loads(call.function.arguments or "")
    except (ValueError, RecursionError):
        return None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str) or "\0" in command:
        # A NUL byte cannot be part of a command line.
        return None
    try:
        command.encode()
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair; no command line can hold it.
        return None
    return command
