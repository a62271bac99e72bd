"""The documentation's links lead somewhere and its Python runs."""

import re
from pathlib import Path

import pytest

from headrace.rollout.types import Outcome
from headrace.tasks.types import Endpoint

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def python_blocks(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_named_paths_exist():
    for page in PAGES:
        for path in re.findall(r"`((?:src|docs|recipes|tests)/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", ["sandbox.md", "model.md", "engine.md", "serving.md"])
def test_the_example_prints_what_it_says(page, capsys):
    (code,) = python_blocks(page)
    exec(compile(code, page, "exec"), {"__name__": "example"})
    said = re.findall(r"# (.+)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == [line.replace("\\n", "\\n") for line in said]


class Saying:
    """Answers like a gateway, without an engine: these messages, one after the other."""

    model = "m"
    weight_version = 0

    def __init__(self, *answers):
        self._answers = list(answers)
        self.turns = []

    def shown(self, name):
        return self.model

    def transcript(self, credentials):
        from headrace.gateway.transcript import Transcript

        return Transcript()

    async def ask(self, credentials, turn, *, idempotency_key=None, listener=None):
        from headrace.gateway.turn import Answer, ToolCall, Usage

        self.turns.append(turn)
        said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        calls = () if isinstance(said, str) else (ToolCall("call_0", *said),)
        return [
            Answer(
                response_id="1",
                index=0,
                content=said if isinstance(said, str) else "",
                reasoning=None,
                tool_calls=calls,
                finish="tool_calls" if calls else "stop",
                stop=None,
                scores=None,
                usage=Usage(1, 1),
                record={},
                created=0,
            )
        ]

    async def close(self):
        pass


async def test_the_task_example_scores_an_answer():
    from headrace.gateway.server import GatewayServer

    (code,) = python_blocks("gateway.md")
    names = {}
    exec(compile(code, "gateway.md", "exec"), names)
    task = names["AdditionTasks"]()
    server = await GatewayServer.start(Saying(" 14 "))  # type: ignore[arg-type] # a stand-in
    try:
        endpoint = Endpoint(server.base_url, "k", "m")
        right = await task.rollout(task.instance(7), endpoint)
        wrong = await task.rollout(task.instance(8), endpoint)
    finally:
        await server.stop()
    assert (right.outcome, right.rewards) == (Outcome.OK, {"reward": 1.0})
    assert wrong.rewards == {"reward": 0.0}


async def test_the_task_service_example_is_served_over_http():
    import asyncio

    from headrace.tasks.remote import FixedPlace, RemoteTasks
    from headrace.tasks.serving import TaskServer

    (code,) = python_blocks("task-services.md")
    asked = []

    async def ask_the_model(endpoint, question):
        asked.append((endpoint, question))
        return "4"

    names = {"__name__": "example", "ask_the_model": ask_the_model}
    exec(compile(code, "task-services.md", "exec"), names)
    server = await TaskServer.start(names["Echo"]())  # type: ignore[operator] # the page's class
    task = await RemoteTasks.open("echo", FixedPlace(server.url, None))
    try:
        instance = await asyncio.to_thread(
            task.instance, await asyncio.to_thread(task.train_seed, 2)
        )
        endpoint = Endpoint("http://x/v1", "k", "m", max_turns=3)
        assert (await task.rollout(instance, endpoint)).rewards == {"reward": 1.0}
    finally:
        await task.close()
        await server.stop()
    assert asked == [(endpoint, "Say 4.")]


async def test_the_agent_example_calls_its_tool_and_ends():
    import asyncio

    from headrace.gateway.server import GatewayServer

    gateway = Saying(("count_files", '{"folder": "."}'), "There are 3.")
    server = await GatewayServer.start(gateway)  # type: ignore[arg-type] # a stand-in
    (code,) = python_blocks("agents.md")
    ran = []

    def run_tool(name, arguments):
        ran.append((name, arguments))
        return "3"

    names = {
        "BASE_URL": server.base_url,
        "KEY": "k",
        "MODEL": "m",
        "TOOLS": [{"type": "function", "function": {"name": "count_files"}}],
        "run_tool": run_tool,
    }
    try:
        await asyncio.to_thread(exec, compile(code, "agents.md", "exec"), names)
    finally:
        await server.stop()
    assert ran == [("count_files", '{"folder": "."}')]
    assert names["message"].content == "There are 3."
    assert [m["role"] for m in gateway.turns[1].messages] == ["user", "assistant", "tool"]
