"""Demonstrations: the reference always passes, mistakes do not, and nothing shown is invented."""

import json
from collections import Counter, defaultdict
from random import Random

import pytest

from headrace.errors import UserError
from headrace.sandbox.types import CommandResult, EndReason, Limits, SandboxError
from headrace.tasks.terminal import FAMILIES, TerminalTasks, train_seed
from headrace.tasks.terminal.agent import result_text
from headrace.tasks.terminal.demonstrations import Script, perform, plan
from headrace.tasks.terminal.seeds import make_problem


def commands_of(demonstration) -> list[str]:
    calls = [m["tool_calls"][0] for m in demonstration.messages if "tool_calls" in m]
    return [json.loads(call["function"]["arguments"])["command"] for call in calls]


async def test_references_pass_and_mistakes_fail_in_every_family(provider):
    scripts, kinds = [], []
    for family in FAMILIES.values():
        for level in (1, 2, 3):
            for i in range(2):
                problem = make_problem(train_seed(i), family, level)
                right = tuple(step.right for step in problem.steps)
                scripts.append(Script(problem, right))
                kinds.append((family.name, "right"))
                for n, step in enumerate(problem.steps):
                    for mistake in step.mistakes:
                        wrong = (*right[:n], mistake.command, *right[n + 1 :])
                        scripts.append(Script(problem, wrong, right=False))
                        kinds.append((family.name, "wrong"))
    demonstrations = await perform(scripts, provider, output_limit=80)
    rewards = defaultdict(list)
    for kind, demonstration in zip(kinds, demonstrations, strict=True):
        rewards[kind].append(demonstration.reward)
    for family in FAMILIES:
        assert set(rewards[family, "right"]) == {1.0}, family
        wrong = rewards[family, "wrong"]
        assert len(wrong) >= 12
        assert sum(wrong) / len(wrong) < 0.25, family
    for demonstration in demonstrations:
        text = "".join(str(m.get("content") or "") for m in demonstration.messages)
        assert len(text) + sum(map(len, commands_of(demonstration))) <= 330


async def test_quality_sets_the_share_of_right_commands(provider):
    tasks = TerminalTasks(provider)
    perfect = await tasks.demonstrations(2 * len(FAMILIES), seed=1, quality=1.0)
    assert all(d.right and d.reward == 1.0 for d in perfect)
    assert len({d.family for d in perfect}) == len(FAMILIES)
    mixed = await tasks.demonstrations(150, seed=1, quality=0.4)
    assert 0.25 < sum(d.right for d in mixed) / 150 < 0.55
    assert all(d.reward == d.right for d in mixed)
    shown = [tasks.instance(tasks.train_seed((1 << 33) + i)) for i in range(150)]
    assert [d.content_id for d in mixed] == [tasks.content_id(i) for i in shown]
    assert await tasks.demonstrations(20, seed=1, quality=0.4) == mixed[:20]


async def test_conversations_have_the_form_the_agent_produces(provider):
    for demonstration in await TerminalTasks(provider).demonstrations(60, seed=3, quality=0.5):
        roles = [m["role"] for m in demonstration.messages]
        turns = (len(roles) - 3) // 2
        assert turns >= 1
        assert roles == ["system", "user", *["assistant", "tool"] * turns, "assistant"]
        assert list(demonstration.train) == [role == "assistant" for role in roles]
        assert demonstration.tools[0]["function"]["name"] == "bash"
        exchange = demonstration.messages[2:-1]
        for call, result in zip(exchange[::2], exchange[1::2], strict=True):
            assert call["tool_calls"][0]["id"] == result["tool_call_id"]
        last = demonstration.messages[-1]["content"]
        shown = demonstration.messages[-2]["content"]
        assert last == "done" or last == "none" or last in shown


async def test_a_batch_shows_what_each_command_shows_alone(provider):
    problems = [make_problem(train_seed(5), f, 2) for f in FAMILIES.values()]
    rng = Random(0)
    scripts = [plan(problem, 0.0, rng) for problem in problems]
    for script, demonstration in zip(
        scripts, await perform(scripts, provider, output_limit=80), strict=True
    ):
        sandbox = await provider.open(script.problem.files)
        shown = [m["content"] for m in demonstration.messages if m["role"] == "tool"]
        alone = [result_text(await sandbox.run(c), 80) for c in commands_of(demonstration)]
        await sandbox.close()
        assert shown == alone


def test_one_mistake_of_a_step_is_the_usual_one():
    problem = make_problem(train_seed(0), FAMILIES["count_lines"], 1)
    rng = Random(0)
    typed = Counter(plan(problem, 0.0, rng).commands[0] for _ in range(300))
    (usual, first), (_, second), _ = typed.most_common()
    assert usual == problem.steps[0].mistakes[0].command
    assert first > 2 * second


class _ShortOutput:
    """A provider whose commands' output is cut below what a batch prints."""

    def __init__(self, inner, limit: int):
        self.inner, self.limit, self.opened = inner, limit, 0

    async def open(self, files):
        self.opened += 1
        sandbox = await self.inner.open(files)
        run = sandbox.run

        async def cut(command, *, timeout_s=None):
            result = await run(command, timeout_s=timeout_s)
            over = len(result.output) > self.limit
            return CommandResult(
                result.exit_code,
                result.output[: self.limit],
                over,
                EndReason.OUTPUT if over else result.ended,
                result.wall_s,
            )

        sandbox.run = cut
        return sandbox

    async def close(self):
        pass


async def test_a_batch_over_a_limit_is_split(provider):
    problems = [make_problem(train_seed(i), FAMILIES["first_line"], 1) for i in range(12)]
    scripts = [Script(p, (p.steps[0].right,)) for p in problems]
    small = _ShortOutput(provider, 90)
    whole = await perform(scripts, provider, output_limit=80)
    assert await perform(scripts, small, output_limit=80) == whole
    assert small.opened > 2
    with pytest.raises(SandboxError, match="limits"):
        await perform(scripts[:1], _ShortOutput(provider, 3), output_limit=80)


async def test_bad_arguments_are_refused(provider):
    with pytest.raises(UserError, match=r"quality is 1\.5"):
        await TerminalTasks(provider).demonstrations(1, seed=0, quality=1.5)
    with pytest.raises(UserError, match="no sandbox provider"):
        await TerminalTasks(None).demonstrations(1, seed=0, quality=1.0)


def test_the_default_limits_hold_a_batch():
    problems = [make_problem(train_seed(i), f, 3) for i, f in enumerate(FAMILIES.values())]
    largest = max(len(p.files) for p in problems)
    assert 24 * (largest + 1) < Limits().files
