"""Reasoning rollouts over real HTTP: one turn, or Python in between, and always an end."""

import asyncio
import json

import pytest
from msgspec.structs import replace

from headrace.errors import UserError
from headrace.rollout.types import Outcome
from headrace.sandbox.types import CommandResult, EndReason, SandboxError
from headrace.tasks.reasoning import ReasoningOptions, ReasoningTasks
from headrace.tasks.reasoning.agent import NO_OUTPUT, command_of, tool_text
from headrace.tasks.reasoning.families import select_families
from headrace.tasks.reasoning.problems import Problems
from headrace.tasks.reasoning.process import WorkerProcess
from headrace.tasks.reasoning.verifier import Verifier
from headrace.tasks.types import Endpoint, EndpointError

FAMILIES = {"chain_sum": {}, "gcd": {}}


def endpoint_of(server, **changes) -> Endpoint:
    endpoint = Endpoint(base_url=server.base_url, api_key="session-1", model="m", timeout_s=20.0)
    return replace(endpoint, **changes)


def scripted(server, *replies):
    """Make the server give these replies in order, the last one for ever."""
    left = list(replies)

    async def handler(_request):
        return left.pop(0) if len(left) > 1 else left[0]

    server.handler = handler


@pytest.fixture(scope="module")
def workers():
    """Problems and verifier of the families here; processes that take a second to start."""
    families = select_families(FAMILIES)
    problems = Problems(families)
    verifier = Verifier(WorkerProcess([(f.name, {}) for f in families]), 10.0)
    yield problems, verifier
    problems.close()
    verifier.close()


@pytest.fixture
async def make_tasks(workers):
    made = []

    def make(provider=None, **options):
        made.append(ReasoningTasks(provider, ReasoningOptions(families=FAMILIES, **options)))
        made[-1]._problems, made[-1]._verifier = workers
        return made[-1]

    yield make
    for tasks in made:
        await tasks._clients.close()


def python(says, code):
    return says.call(json.dumps({"code": code}), "python")


async def test_right_wrong_and_untagged_answers_in_one_turn(server, says, make_tasks):
    tasks = make_tasks()
    instance = tasks.instance(tasks.train_seed(0))
    right = tasks.problem(instance).answer
    told = {}
    for message, reward, form in (
        (f"so <answer> {right} </answer>", 1.0, 1.0),
        ("<answer>zzz</answer>", 0.0, 1.0),
        (right, 0.0, 0.0),
        (None, 0.0, 0.0),
    ):
        scripted(server, says.text(message))
        result = await tasks.rollout(instance, endpoint_of(server, temperature=0.7, max_tokens=33))
        assert result.outcome is Outcome.OK
        assert (result.rewards["reward"], result.rewards["format"]) == (reward, form)
        assert result.detail["turns"] == 1
        told[message] = result.reason
    assert told["<answer>zzz</answer>"] == "answered 'zzz'"
    assert told[None] == told[right] == "no answer between answer tags"
    assert len(server.requests) == 4
    body = server.requests[0].body
    assert "tools" not in body
    assert (body["temperature"], body["max_tokens"]) == (0.7, 33)
    system, user = body["messages"]
    assert "<answer>" in system["content"]
    assert user == {"role": "user", "content": tasks.problem(instance).question}
    assert server.requests[0].headers["authorization"] == "Bearer session-1"


async def test_threshold_partial_and_system_prompt(server, says, make_tasks):
    partial = make_tasks(partial=True, system_prompt="")
    half = make_tasks(threshold=0.4, system_prompt="Think.")
    instance = partial.instance(partial.train_seed(0))
    right = partial.problem(instance).answer
    scripted(server, says.text(f"<answer>{right} {'x' * (len(right) - 1)}</answer>"))
    result = await partial.rollout(instance, endpoint_of(server))
    assert result.rewards["reward"] == result.rewards["score"] == pytest.approx(0.5)
    assert [m["role"] for m in server.requests[0].body["messages"]] == ["user"]
    result = await half.rollout(instance, endpoint_of(server))
    assert (result.rewards["reward"], result.rewards["score"]) == (1.0, pytest.approx(0.5))
    assert server.requests[1].body["messages"][0]["content"] == "Think."


async def test_python_really_runs_and_errors_go_back(provider, server, says, make_tasks):
    tasks = make_tasks(provider, python_tool=True, tool_calls=4, output_chars=60, tool_seconds=1)
    instance = tasks.instance(tasks.train_seed(0))
    right = tasks.problem(instance).answer
    scripted(
        server,
        python(says, "x = 6 * 7\nprint('it is', x, \"'$HOME'\")"),
        python(says, "import math\nprint(1 / 0)"),
        python(says, "while True: pass"),
        python(says, "x = 1"),
        says.text(f"<answer>{right}</answer>"),
    )
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.outcome is Outcome.OK
    assert result.rewards["reward"] == 1.0
    assert len(result.detail["programs"]) == 4
    outputs = [m["content"] for m in server.requests[-1].body["messages"] if m["role"] == "tool"]
    assert outputs[0] == "it is 42 '$HOME'"
    assert outputs[1].startswith("exit 1: ...")
    assert outputs[1].endswith("ZeroDivisionError: division by zero")
    assert outputs[2] == f"{NO_OUTPUT} [time limit]"
    assert outputs[3] == NO_OUTPUT
    assert server.requests[0].body["tools"][0]["function"]["name"] == "python"
    assert server.requests[1].body["messages"][:2] == server.requests[0].body["messages"]


async def test_calls_are_bounded_and_a_rollout_without_an_answer_fails(
    inert_provider, server, says, make_tasks
):
    provider = inert_provider()
    tasks = make_tasks(provider, python_tool=True, tool_calls=2)
    instance = tasks.instance(tasks.train_seed(0))
    scripted(server, says.call(json.dumps({"code": "print(1)"}), "python", copies=3))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.outcome is Outcome.AGENT_FAILED
    assert result.reason == "no answer within 3 turns"
    assert result.rewards == {"reward": 0.0}
    (sandbox,) = provider.opened
    assert sandbox.commands == [command_of("print(1)")] * 2
    assert sandbox.closed
    assert result.detail["tool_errors"] == 7
    last = server.requests[-1].body["messages"][-1]
    assert last["content"] == "error: at most 2 calls; answer now"
    # The endpoint's own limit holds, too.
    result = await tasks.rollout(instance, endpoint_of(server, max_turns=1))
    assert result.reason == "no answer within 1 turns"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("{", "python"),
        ("", "python"),
        ("[]", "python"),
        ('{"code": 3}', "python"),
        ('{"code": ""}', "python"),
        (r'{"code": "a\u0000b"}', "python"),
        (r'{"code": "\ud800"}', "python"),
        ("[" * 100_000, "python"),
        (json.dumps({"code": "#" * 20_000}), "python"),
        ('{"code": "1"}', "bash"),
    ],
)
async def test_unreadable_calls_are_answered_and_the_loop_goes_on(
    inert_provider, server, says, make_tasks, arguments, name
):
    provider = inert_provider()
    tasks = make_tasks(provider, python_tool=True)
    instance = tasks.instance(tasks.train_seed(0))
    scripted(server, says.call(arguments, name), says.text("no idea"))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.outcome is Outcome.OK
    assert result.detail["tool_errors"] == 1
    assert provider.opened[0].commands == []
    assert server.requests[1].body["messages"][-1]["content"].startswith("error: ")


async def test_whose_fault_it_was(inert_provider, server, says, make_tasks):
    missing = CommandResult(
        127, b"/bin/bash: line 1: python3: command not found\n", False, EndReason.EXITED, 0.0
    )
    provider = inert_provider({command_of("1"): missing})
    tasks = make_tasks(provider, python_tool=True, request_retries=0)
    instance = tasks.instance(tasks.train_seed(0))
    scripted(server, python(says, "1"))
    with pytest.raises(SandboxError, match="no python3; install it, or set python_tool = false"):
        await tasks.rollout(instance, endpoint_of(server))
    scripted(server, (500, {"error": {"message": "broken"}}))
    with pytest.raises(EndpointError, match="500: broken"):
        await tasks.rollout(instance, endpoint_of(server))
    long = {"error": {"message": "over the context length", "code": "context_length_exceeded"}}
    scripted(server, (400, long))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.outcome is Outcome.AGENT_FAILED

    over = asyncio.Event()

    async def late(_request):
        await over.wait()
        return says.text("too late")

    server.handler = late
    result = await tasks.rollout(instance, endpoint_of(server, timeout_s=0.2))
    over.set()
    assert result.outcome is Outcome.TIMEOUT
    assert all(sandbox.closed for sandbox in provider.opened)
    with pytest.raises(UserError, match="needs a sandbox provider"):
        await make_tasks(None, python_tool=True).rollout(instance, endpoint_of(server))


def test_the_end_of_an_output_is_shown():
    assert tool_text(" a\n", 5) == "a"
    assert tool_text("abcdefgh", 5) == "...defgh"
    assert tool_text("\n", 5) == NO_OUTPUT
