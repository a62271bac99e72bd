"""The agent over real HTTP: whatever the model or the server does has a defined end."""

import asyncio
import json

import pytest
from msgspec.structs import replace

from headrace.errors import UserError
from headrace.rollout.failures.diagnosis import exception_reason
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.types import Outcome
from headrace.sandbox.types import CommandResult, EndReason, SandboxError
from headrace.tasks.conversation import ClientPool
from headrace.tasks.terminal import (
    FAMILIES,
    Latency,
    TerminalOptions,
    TerminalTasks,
    evaluation_seed,
)
from headrace.tasks.terminal.agent import tool_text
from headrace.tasks.terminal.problem import AnswerGoal, StateGoal
from headrace.tasks.types import Endpoint, EndpointError


def endpoint_of(server, **changes) -> Endpoint:
    endpoint = Endpoint(base_url=server.base_url, api_key="session-1", model="m", timeout_s=20.0)
    return replace(endpoint, **changes)


def scripted(server, *replies):
    """Make the server give these replies in order, the last one for ever."""
    left = list(replies)

    async def handler(_request):
        return left.pop(0) if len(left) > 1 else left[0]

    server.handler = handler


@pytest.fixture
async def make_tasks():
    made = []

    def make(provider, **options):
        made.append(TerminalTasks(provider, TerminalOptions(**options)))
        return made[-1]

    yield make
    for tasks in made:
        await tasks.close()


def answer_instance(tasks):
    instance = next(i for s in range(200) if (i := tasks.instance(s)).family == "count_lines")
    goal = tasks.problem(instance).goal
    assert isinstance(goal, AnswerGoal)
    return instance, goal.expected


async def test_the_reference_solves_every_family_through_the_whole_loop(
    provider, server, says, make_tasks
):
    tasks = make_tasks(provider)
    problems = {}

    async def reference(request):
        """A model that knows the solution and reads tool results like any other."""
        problem = problems[request.headers["authorization"].removeprefix("Bearer ")]
        results = [m["content"] for m in request.body["messages"] if m["role"] == "tool"]
        if len(results) < len(problem.steps):
            command = problem.steps[len(results)].right
            return says.command(command.replace("{out}", results[-1] if results else ""))
        if isinstance(problem.goal, StateGoal):
            return says.text("done")
        return says.text(problem.family.answer_from(results[-1]))

    server.handler = reference
    instances = [tasks.instance(evaluation_seed(i)) for i in range(2 * len(FAMILIES))]
    for n, instance in enumerate(instances):
        problems[f"key{n}"] = tasks.problem(instance)
    results = await asyncio.gather(
        *(
            tasks.rollout(instance, endpoint_of(server, api_key=f"key{n}"))
            for n, instance in enumerate(instances)
        )
    )
    for instance, result in zip(instances, results, strict=True):
        assert result.outcome is Outcome.OK
        assert result.rewards["reward"] == 1.0, (instance, result)
        assert result.detail["turns"] == instance.min_turns
        assert result.reason == ""


async def test_reaching_for_the_verifier_is_reported_whatever_the_answer(
    inert_provider, server, says, make_tasks
):
    tasks = make_tasks(inert_provider())
    instance, expected = answer_instance(tasks)
    scripted(server, says.command("cat /proc/1/environ"), says.text(expected))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.failure is FailureReason.TAMPERING
    assert result.reason.startswith("tampering: looks into a process")
    assert len(result.detail["tampering"]) == 1


async def test_requests_are_ordinary_chat_completions(inert_provider, server, says, make_tasks):
    provider = inert_provider()
    tasks = make_tasks(provider)
    instance, expected = answer_instance(tasks)
    scripted(server, says.command("wc -l < f"), says.text(f" {expected}\n"))
    result = await tasks.rollout(instance, endpoint_of(server, temperature=0.7, max_tokens=33))
    assert result.outcome is Outcome.OK
    assert result.rewards == {"reward": 1.0, "answer": 1.0}
    assert result.failure is None
    assert provider.opened[0].commands == result.detail["commands"] == ["wc -l < f"]
    assert provider.opened[0].closed
    first, second = server.requests
    assert first.headers["authorization"] == "Bearer session-1"
    assert first.body["temperature"] == 0.7
    assert first.body["max_tokens"] == 33
    assert first.body["tools"][0]["function"]["name"] == "bash"
    # History only grows, and what the model said goes back as it came.
    assert second.body["messages"][:2] == first.body["messages"]
    said = json.loads('{"command": "wc -l < f"}')
    call = second.body["messages"][2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == said
    assert second.body["messages"][3] == {"role": "tool", "tool_call_id": "id0", "content": "ok"}
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("{", "bash"),
        ("", "bash"),
        ("[]", "bash"),
        ('{"cmd": "ls"}', "bash"),
        ('{"command": 3}', "bash"),
        (r'{"command": "a\u0000b"}', "bash"),
        (r'{"command": "\ud800"}', "bash"),
        ("[" * 100_000, "bash"),
        ('{"command": "ls"}', "python"),
    ],
)
async def test_unreadable_tool_calls_are_answered_and_the_loop_goes_on(
    inert_provider, server, says, make_tasks, arguments, name
):
    provider = inert_provider()
    tasks = make_tasks(provider)
    instance, expected = answer_instance(tasks)
    scripted(server, says.call(arguments, name), says.text(expected))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.rewards["reward"] == 1.0
    assert result.detail["tool_errors"] == 1
    assert provider.opened[0].commands == []
    assert server.requests[1].body["messages"][-1]["content"].startswith("error: ")


async def test_too_many_calls_at_once_are_cut(inert_provider, server, says, make_tasks):
    provider = inert_provider()
    tasks = make_tasks(provider)
    instance, expected = answer_instance(tasks)
    scripted(server, says.call('{"command": "ls"}', copies=7), says.text(expected))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.rewards["reward"] == 1.0
    assert len(provider.opened[0].commands) == 4
    assert len(server.requests[1].body["messages"]) == 2 + 1 + 7


@pytest.mark.parametrize("own_limit", [None, 2])
async def test_a_model_that_never_answers_fails(
    inert_provider, server, says, make_tasks, own_limit
):
    provider = inert_provider()
    tasks = make_tasks(provider, max_turns=own_limit)
    scripted(server, says.command("ls"))
    result = await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server, max_turns=3))
    assert result.outcome is Outcome.AGENT_FAILED
    assert result.failure is FailureReason.TURN_LIMIT
    assert result.rewards == {"reward": 0.0}
    assert len(server.requests) == (own_limit or 3)
    assert provider.opened[0].closed


async def test_an_empty_message_is_a_wrong_answer(inert_provider, server, says, make_tasks):
    tasks = make_tasks(inert_provider())
    scripted(server, says.text(None))
    result = await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server))
    assert result.outcome is Outcome.OK
    assert result.rewards == {"reward": 0.0, "answer": 0.0}


async def test_saying_done_without_doing_scores_nothing(inert_provider, server, says, make_tasks):
    tasks = make_tasks(inert_provider(), families=("rename_file",))
    scripted(server, says.text("done"))
    result = await tasks.rollout(tasks.instance(0), endpoint_of(server))
    assert result.outcome is Outcome.OK
    assert result.rewards == {"reward": 0.0, "state": 0.0}
    assert result.reason


async def test_results_can_be_stored_whatever_the_agent_names_a_file(
    provider, server, says, make_tasks
):
    tasks = make_tasks(provider, families=("rename_file",))
    scripted(server, says.command(r"touch $'a\xff'"), says.text("x\ud800"))
    result = await tasks.rollout(tasks.instance(0), endpoint_of(server))
    assert result.rewards == {"reward": 0.0, "state": 0.0}
    assert result.reason == "a? should not exist"
    assert result.detail["answer"] == "x?"


async def test_context_overflow_is_the_agents_failure(inert_provider, server, make_tasks):
    tasks = make_tasks(inert_provider())
    error = {"message": "too long", "code": "context_length_exceeded"}
    scripted(server, (400, {"error": error}))
    result = await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server))
    assert result.outcome is Outcome.AGENT_FAILED
    assert len(server.requests) == 1


async def test_passing_server_errors_are_retried_under_one_key(
    inert_provider, server, says, make_tasks
):
    tasks = make_tasks(inert_provider())
    instance, expected = answer_instance(tasks)
    broken = (503, {"error": {"message": "busy"}})
    scripted(server, broken, broken, says.text(expected))
    result = await tasks.rollout(instance, endpoint_of(server))
    assert result.rewards["reward"] == 1.0
    assert len({r.headers["idempotency-key"] for r in server.requests}) == 1
    assert len(server.requests) == 3


async def test_lasting_server_errors_are_the_environments(inert_provider, server, make_tasks):
    provider = inert_provider()
    tasks = make_tasks(provider, request_retries=2)
    scripted(server, (500, {"error": {"message": "down"}}))
    with pytest.raises(EndpointError, match="500: down"):
        await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server))
    assert len(server.requests) == 3
    assert provider.opened[0].closed


async def test_other_refusals_are_not_the_agents(inert_provider, server, make_tasks):
    tasks = make_tasks(inert_provider())
    scripted(server, (401, {"error": {"message": "no such session"}}))
    with pytest.raises(EndpointError, match="401: no such session"):
        await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server))


async def test_a_server_that_hangs_ends_in_a_timeout(inert_provider, server, make_tasks):
    provider = inert_provider()
    tasks = make_tasks(provider)
    forever = asyncio.Event()

    async def hang(_request):
        await forever.wait()
        return 500, {}

    server.handler = hang
    result = await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server, timeout_s=0.2))
    assert result.outcome is Outcome.TIMEOUT
    assert result.rewards == {"reward": 0.0}
    assert provider.opened[0].closed
    forever.set()


async def test_a_command_that_hangs_ends_in_a_timeout(inert_provider, server, says, make_tasks):
    provider = inert_provider(hang=True)
    tasks = make_tasks(provider)
    scripted(server, says.command("sleep"))
    # Long enough for the command to begin on a busy machine.
    result = await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server, timeout_s=2.0))
    assert result.outcome is Outcome.TIMEOUT
    assert result.detail["commands"] == ["sleep"]
    assert provider.opened[0].closed


async def test_a_broken_sandbox_is_the_environments(inert_provider, server, says, make_tasks):
    provider = inert_provider()
    tasks = make_tasks(provider)
    scripted(server, says.command("break"))
    with pytest.raises(SandboxError):
        await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server))
    assert provider.opened[0].closed


async def test_limits_and_exit_codes_are_told(inert_provider, server, says, make_tasks):
    killed = CommandResult(137, b"part", False, EndReason.TIME, 5.0)
    tasks = make_tasks(inert_provider({"spin": killed}))
    instance, expected = answer_instance(tasks)
    scripted(server, says.command("spin"), says.text(expected))
    await tasks.rollout(instance, endpoint_of(server))
    assert server.requests[1].body["messages"][-1]["content"] == "exit 137: part [time limit]"


def test_tool_text():
    assert tool_text(0, " 3\n", 80) == "3"
    assert tool_text(0, "\n", 80) == "(no output)"
    assert tool_text(1, "", 80) == "exit 1"
    assert tool_text(2, "no such file\n", 80) == "exit 2: no such file"
    assert tool_text(0, "abcdefgh", 5) == "abcde..."


async def test_latency_streams_repeat_between_services(inert_provider):
    def draws():
        tasks = TerminalTasks(
            inert_provider(), TerminalOptions(latency=Latency(median_s=0.01, sigma=1.0))
        )
        instance = tasks.instance(0)
        streams = [tasks._latency_of(instance) for _ in range(3)]
        return [[s() for _ in range(4)] for s in streams if s is not None]

    first, second = draws(), draws()
    assert first == second
    assert len({tuple(stream) for stream in first}) == 3
    assert all(delay > 0 for stream in first for delay in stream)


async def test_latency_delays_commands(inert_provider, server, says, make_tasks):
    # A median far beyond the deadline: the rollout can only end by its deadline.
    tasks = make_tasks(inert_provider(), latency={"median_s": 500, "sigma": 0.0})
    scripted(server, says.command("ls"))
    result = await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server, timeout_s=0.3))
    assert result.outcome is Outcome.TIMEOUT


async def test_a_service_without_sandboxes_says_so(server):
    tasks = TerminalTasks(None)
    with pytest.raises(UserError, match="no sandbox provider"):
        await tasks.rollout(tasks.instance(0), endpoint_of(server))


async def test_sessions_share_connections():
    pool = ClientPool(retries=0)
    assert pool.get("http://a/v1") is pool.get("http://a/v1")
    assert pool.get("http://a/v1") is not pool.get("http://b/v1")
    await pool.close()
    await pool.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, {"choices": []}), "without choices"),
        ((200, {"choices": [{"message": {"content": 7}}]}), r"no chat completion.*content"),
        ((404, ["no error"]), r'404: \["no error"\]'),
    ],
)
async def test_answers_that_are_none_are_the_endpoints_failure(
    inert_provider, server, make_tasks, answer, says
):
    tasks = make_tasks(inert_provider())
    scripted(server, answer)
    with pytest.raises(EndpointError, match=says):
        await tasks.rollout(answer_instance(tasks)[0], endpoint_of(server))
    assert len(server.requests) == 1


async def test_nobody_there_and_silence_are_told_apart(server):
    over = asyncio.Event()

    async def late(_request):
        await over.wait()
        return 500, {}

    server.handler = late
    pool = ClientPool(retries=0)
    hasty = endpoint_of(server, timeout_s=0.2)
    with pytest.raises(EndpointError) as silent:
        await pool.get(hasty.base_url).complete(hasty, [{"role": "user", "content": "x"}])
    over.set()
    with pytest.raises(EndpointError) as absent:
        await pool.get("http://127.0.0.1:1/v1").complete(hasty, [])
    assert (silent.value.timed_out, absent.value.timed_out) == (True, False)
    assert exception_reason(silent.value) is FailureReason.ENGINE_DEADLINE
    assert exception_reason(absent.value) is FailureReason.TASK_RAISED
    assert exception_reason(EndpointError("", status=429)) is FailureReason.ENGINE_OVERLOADED
    await pool.close()
