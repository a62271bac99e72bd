"""The reasoning agent: one question, one answer; with the tool, some Python in between.

It knows an HTTP endpoint, at most one tool and a sandbox, and nothing of tokens or training.
"""

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.rollout.failures.reasons import FailureReason
from headrace.sandbox.types import EndReason, Sandbox, SandboxError
from headrace.tasks.conversation import AgentFailure, ModelClient, ToolCall
from headrace.tasks.types import Endpoint

TOOL_PROMPT = "You can run Python with the tool python; print what you need."

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program and read what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}},
                "required": ["code"],
            },
        },
    }
]

NO_OUTPUT = "(no output)"
_MOST_CODE_BYTES = 16_384
_NOT_FOUND = 127


class ToolLimits(msgspec.Struct, frozen=True):
    """Bounds of the Python tool in one rollout.

    Attributes:
        calls: programs run; further calls are answered with an error.
        seconds: wall clock per program.
        output_chars: characters of output the model reads.
    """

    calls: int
    seconds: float
    output_chars: int


@dataclass
class Transcript:
    """What an agent did, filled while it runs so that a cut rollout still tells its story.

    Attributes:
        programs: every program it ran, in order.
        message: its final message; None while it has not answered.
        turns: assistant messages so far.
        tool_errors: tool calls that could not be read or were too many.
    """

    programs: list[str] = field(default_factory=list)
    message: str | None = None
    turns: int = 0
    tool_errors: int = 0


def opening_messages(system: str, question: str) -> list[dict[str, Any]]:
    """System prompt, where there is one, and question."""
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": question}]


def command_of(code: str) -> str:
    """The shell command that runs a program, out of reach of the work folder's modules."""
    return f"python3 -I -c {shlex.quote(code)}"


def tool_text(output: str, limit: int) -> str:
    """What the model reads of an output: its end, where errors and results stand."""
    text = output.strip()
    if len(text) > limit:
        text = "..." + text[-limit:].lstrip()
    return text or NO_OUTPUT


async def run_agent(
    client: ModelClient,
    endpoint: Endpoint,
    sandbox: Sandbox | None,
    messages: list[dict[str, Any]],
    transcript: Transcript,
    limits: ToolLimits,
) -> str:
    """Talk to the model until it answers without calling a tool; returns that message.

    Args:
        client: shared client of `endpoint.base_url`.
        endpoint: session key, sampling and turn limit. The caller enforces its deadline.
        sandbox: where programs run; None offers no tool.
        messages: the opening; grows.
        transcript: filled as the agent goes.
        limits: of the tool.

    Raises:
        AgentFailure: out of turns, or the conversation no longer fits the model.
        EndpointError: the endpoint failed and retrying did not help.
        SandboxError: the sandbox failed, or has no Python.
    """
    for _ in range(endpoint.max_turns):
        message = await client.complete(endpoint, messages, TOOLS if sandbox else ())
        transcript.turns += 1
        calls = message.tool_calls or []
        if not calls or sandbox is None:
            text = transcript.message = message.content or ""
            return text
        messages.append(message.said())
        for call in calls:
            text = await _run_call(call, sandbox, transcript, limits)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    raise AgentFailure(FailureReason.TURN_LIMIT, f"no answer within {endpoint.max_turns} turns")


async def _run_call(
    call: ToolCall, sandbox: Sandbox, transcript: Transcript, limits: ToolLimits
) -> str:
    """Run one tool call; whatever is wrong with the call becomes text for the model."""
    code = _read_code(call)
    if code is None:
        transcript.tool_errors += 1
        return 'error: call python with {"code": "..."}'
    if len(transcript.programs) >= limits.calls:
        transcript.tool_errors += 1
        return f"error: at most {limits.calls} calls; answer now"
    if len(code.encode()) > _MOST_CODE_BYTES:
        transcript.tool_errors += 1
        return f"error: the program is longer than {_MOST_CODE_BYTES} bytes"
    transcript.programs.append(code)
    result = await sandbox.run(command_of(code), timeout_s=limits.seconds)
    output = result.output.decode("utf-8", "replace")
    if result.exit_code == _NOT_FOUND and "python3: command not found" in output:
        raise SandboxError("the sandbox has no python3; install it, or set python_tool = false")
    text = tool_text(output, limits.output_chars)
    if result.ended is not EndReason.EXITED:
        return f"{text} [{result.ended.replace('_', ' ')}]"
    return text if result.exit_code == 0 else f"exit {result.exit_code}: {text}"


def _read_code(call: ToolCall) -> str | None:
    """The program of a python call, or None if the call is anything else."""
    if call.function.name != "python":
        return None
    try:
        arguments = json.loads(call.function.arguments or "")
        code = arguments.get("code") if isinstance(arguments, dict) else None
        # A NUL byte cannot be part of a command line, half a surrogate pair of no text.
        return code if isinstance(code, str) and code.encode() and "\0" not in code else None
    except (ValueError, RecursionError):
        return None
