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


async def test_the_task_example_scores_an_answer():
    from headrace.gateway.server import GatewayServer

    class Seven:
        """Answers like a gateway, without an engine."""

        model = "m"
        weight_version = 0

        async def chat(self, key, body, idempotency_key=None):
            message = {"role": "assistant", "content": " 14 "}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
            }

        async def close(self):
            pass

    (code,) = python_blocks("gateway.md")
    names = {}
    exec(compile(code, "gateway.md", "exec"), names)
    task = names["AdditionTasks"]()
    server = await GatewayServer.start(Seven())  # type: ignore[arg-type] # a stand-in
    try:
        endpoint = Endpoint(server.base_url, "k", "m")
        right = await task.rollout(task.instance(7), endpoint)
        wrong = await task.rollout(task.instance(8), endpoint)
    finally:
        await server.stop()
    assert (right.outcome, right.rewards) == (Outcome.OK, {"reward": 1.0})
    assert wrong.rewards == {"reward": 0.0}
