"""Scripted conversations for a warm start, with commands that were really executed.

A demonstrator of a given quality picks the right command or a plausible wrong one, and reports
faithfully whatever its command printed: format and copying are always right, choices are not. To
be fast, the trees of many demonstrations share one sandbox and one shell per round.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from headrace.sandbox.types import (
    CommandResult,
    EndReason,
    FileEntry,
    Sandbox,
    SandboxError,
    SandboxProvider,
)
from headrace.tasks.terminal.agent import TOOLS, opening_messages, tool_text
from headrace.tasks.terminal.problem import DONE, NOTHING, STOP, Problem, StateGoal, first_line
from headrace.tasks.terminal.seeds import content_hash
from headrace.tasks.terminal.verifier import score
from headrace.tasks.types import Demonstration

_BATCH = 24
_CONCURRENT_BATCHES = 3
_MARK = "\x1e"
"""ASCII record separator: stands around each exit code between the outputs of a batch."""


@dataclass
class Script:
    """A problem and the commands a demonstrator is going to type.

    Attributes:
        problem: what is asked.
        commands: one per step, `{out}` standing for what the step before printed.
    """

    problem: Problem
    commands: tuple[str, ...]
    right: bool = True


@dataclass
class _Run:
    """A script being executed: typed commands with their exit codes and outputs."""

    script: Script
    typed: list[tuple[str, int, str]] = field(default_factory=list)

    def next_command(self) -> str | None:
        """The next command, or None when it is time to answer."""
        step = len(self.typed)
        if step == len(self.script.commands):
            return None
        template = self.script.commands[step]
        if template == STOP:
            return None
        if step == 0:
            return template
        _, exit_code, output = self.typed[-1]
        out = first_line(output)
        return None if exit_code != 0 or not out else template.replace("{out}", out)

    def answer(self) -> str:
        """What the demonstrator says at the end."""
        problem = self.script.problem
        if isinstance(problem.goal, StateGoal):
            return DONE
        _, exit_code, output = self.typed[-1]
        return (problem.family.answer_from(output) if exit_code == 0 else "") or NOTHING


def plan(problem: Problem, quality: float, rng: Random) -> Script:
    """What a demonstrator of this quality types: the reference, or one step of it mistaken."""
    commands = [step.right for step in problem.steps]
    if rng.random() < quality:
        return Script(problem, tuple(commands))
    fallible = [i for i, step in enumerate(problem.steps) if step.mistakes]
    step = rng.choice(fallible)
    mistakes = problem.steps[step].mistakes
    commands[step] = rng.choices(mistakes, [m.weight for m in mistakes])[0].command
    return Script(problem, tuple(commands), right=False)


async def perform(
    scripts: Sequence[Script], provider: SandboxProvider, *, output_limit: int
) -> list[Demonstration]:
    """Execute scripts and write down the conversations, in order.

    Args:
        scripts: what to type.
        provider: where; its output limit need not hold a whole batch.
        output_limit: characters of output shown after each command.

    Raises:
        SandboxError: the sandbox failed, or a single command exceeds its limits.
    """
    batches = [list(scripts[i : i + _BATCH]) for i in range(0, len(scripts), _BATCH)]
    slots = asyncio.Semaphore(_CONCURRENT_BATCHES)

    async def one(batch: list[Script]) -> list[Demonstration]:
        async with slots:
            return await _perform_batch(batch, provider, output_limit)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(batch)) for batch in batches]
    except ExceptionGroup as failures:
        # The first failure ended the others; callers know it by its own type.
        raise failures.exceptions[0] from None
    return [demonstration for task in tasks for demonstration in task.result()]


async def _perform_batch(
    scripts: list[Script], provider: SandboxProvider, output_limit: int
) -> list[Demonstration]:
    runs = [_Run(script) for script in scripts]
    files: dict[str, FileEntry] = {}
    for i, script in enumerate(scripts):
        files[f"d{i}"] = FileEntry("dir", 0o755)
        files |= {f"d{i}/{path}": entry for path, entry in script.problem.files.items()}
    sandbox = await provider.open(files)
    try:
        complete = True
        while complete and any(run.next_command() is not None for run in runs):
            complete = await _run_round(runs, sandbox)
        tree = await sandbox.tree() if complete else {}
    finally:
        await sandbox.close()
    if not complete:
        if len(scripts) == 1:
            raise SandboxError(f"demonstration exceeds the sandbox's limits: {scripts[0].commands}")
        # Together they exceed a limit of one command; apart they may not.
        half = len(scripts) // 2
        return [
            *await _perform_batch(scripts[:half], provider, output_limit),
            *await _perform_batch(scripts[half:], provider, output_limit),
        ]
    ends: list[dict[str, FileEntry]] = [{} for _ in runs]
    for path, entry in tree.items():
        folder, _, inner = path.partition("/")
        if inner:
            ends[int(folder[1:])][inner] = entry
    return [_write_down(run, end, output_limit) for run, end in zip(runs, ends, strict=True)]


async def _run_round(runs: list[_Run], sandbox: Sandbox) -> bool:
    """One command of every unfinished run, all in one shell. False if a limit cut it short."""
    pending = [(i, run, c) for i, run in enumerate(runs) if (c := run.next_command()) is not None]
    # One line, so that bash counts lines in its messages as it does for a command of its own.
    shell = "w=$PWD; " + " ".join(
        f"cd $w/d{i} && {{ {command}; }} 2>&1; printf '\\036%d\\036' $?;"
        for i, _, command in pending
    )
    result: CommandResult = await sandbox.run(shell)
    parts = result.output.decode("utf-8", "replace").split(_MARK)
    if result.truncated or result.ended is not EndReason.EXITED:
        return False
    if len(parts) != 2 * len(pending) + 1:
        raise SandboxError("demonstrations: a command printed the record separator")
    for n, (_, run, command) in enumerate(pending):
        run.typed.append((command, int(parts[2 * n + 1]), parts[2 * n]))
    return True


def _write_down(run: _Run, end: dict[str, FileEntry], output_limit: int) -> Demonstration:
    """The conversation of an executed script."""
    problem = run.script.problem
    messages = opening_messages(problem.instruction)
    train = [False] * len(messages)
    for n, (command, exit_code, output) in enumerate(run.typed):
        call_id = f"call_{n}"
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            }
        )
        text = tool_text(exit_code, output, output_limit)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        train += [True, False]
    answer = run.answer()
    messages.append({"role": "assistant", "content": answer})
    train.append(True)
    return Demonstration(
        messages=tuple(messages),
        train=tuple(train),
        tools=TOOLS,
        family=problem.family.name,
        level=problem.level,
        right=run.script.right,
        reward=score(problem.goal, answer, end)["reward"],
        content_id=content_hash(problem),
    )
