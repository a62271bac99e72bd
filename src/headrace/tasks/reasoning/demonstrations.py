"""Scripted conversations for a warm start, built from known answers.

The form is always right: a demonstrator says an answer between tags, or, where a line of Python
does the work, runs it and reports what it printed. A worse demonstrator says another problem's
answer, or runs another problem's program. Programs are really executed, many per sandbox command.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.sandbox.types import EndReason, FileEntry, SandboxError, SandboxProvider
from headrace.tasks.reasoning.agent import TOOLS, command_of, opening_messages, tool_text
from headrace.tasks.reasoning.problems import Problem
from headrace.tasks.types import Demonstration

_BATCH = 40
_LARGEST_OUTPUT = 200

_DRIVER = """\
import contextlib, io, json
for code in json.load(open("programs.json")):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    print(json.dumps(out.getvalue()))
"""

_Facts = Mapping[str, Any]


def _numbers(facts: _Facts) -> str:
    return ", ".join(map(str, facts["numbers"]))


PROGRAMS: dict[str, Callable[[_Facts], str]] = {
    "chain_sum": lambda facts: f"print({facts['expression']})",
    "products": lambda facts: f"print({facts['expression']})",
    "basic_arithmetic": lambda facts: f"print({facts['expression'].replace('/', '//')})",
    "gcd": lambda facts: f"import math\nprint(math.gcd({_numbers(facts)}))",
    "lcm": lambda facts: f"import math\nprint(math.lcm({_numbers(facts)}))",
    "count_bits": lambda facts: f"print(bin({facts['number']}).count('1'))",
    "spell_backward": lambda facts: f"print({facts['word']!r}[::-1])",
}
"""Families that a line of Python solves, and that line."""


class Script(msgspec.Struct, frozen=True):
    """What a demonstrator is going to do about a problem.

    Attributes:
        problem: what is asked.
        model: whose answer or program it uses: the problem itself, or another of its family.
    """

    problem: Problem
    model: Problem

    @property
    def right(self) -> bool:
        """Whether it uses its own."""
        return self.model is self.problem


def program_of(problem: Problem) -> str | None:
    """The line of Python that solves a problem, where the task knows one."""
    write = PROGRAMS.get(problem.family)
    return None if write is None else write(problem.facts)


async def run_programs(programs: Sequence[str], provider: SandboxProvider) -> list[str]:
    """What each of these trusted programs prints, in order.

    Raises:
        SandboxError: the sandbox failed, or a program did.
    """
    outputs: list[str] = []
    for start in range(0, len(programs), _BATCH):
        batch = list(programs[start : start + _BATCH])
        data = json.dumps(batch).encode()
        sandbox = await provider.open({"programs.json": FileEntry("file", 0o644, data)})
        try:
            result = await sandbox.run(command_of(_DRIVER))
        finally:
            await sandbox.close()
        text = result.output.decode("utf-8", "replace")
        if result.exit_code != 0 or result.truncated or result.ended is not EndReason.EXITED:
            raise SandboxError(f"programs of demonstrations failed: {text[-_LARGEST_OUTPUT:]}")
        outputs += [json.loads(line) for line in text.splitlines()]
    return outputs


def write_down(
    script: Script,
    system: str,
    typed: tuple[str, str] | None,
    *,
    output_chars: int,
    tools: bool,
    score: Callable[[Problem, str], float],
) -> Demonstration:
    """The conversation of a script.

    Args:
        script: what is done.
        system: the system prompt.
        typed: program and output, where it uses the tool.
        output_chars: characters of output shown.
        tools: whether the conversation offers the tool.
        score: gives the reward of an answer.
    """
    problem = script.problem
    messages = opening_messages(system, problem.question)
    train = [False] * len(messages)
    answer = script.model.answer or ""
    if typed is not None:
        code, output = typed
        function = {"name": "python", "arguments": json.dumps({"code": code})}
        shown = tool_text(output, output_chars)
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": shown},
        ]
        train += [True, False]
        answer = shown
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    train.append(True)
    return Demonstration(
        messages=tuple(messages),
        train=tuple(train),
        tools=TOOLS if tools else [],
        family=problem.family,
        level=1,
        right=script.right,
        reward=score(problem, answer),
        content_id=problem.content_id,
    )
