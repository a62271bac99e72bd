"""Services that register, as a recipe and the command see them: waited for, asked for, refused."""

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest
from registering import TOKEN, Toy, Words

from headrace.cli import main
from headrace.errors import UserError
from headrace.recipe import parse_recipe
from headrace.rollout.types import Outcome
from headrace.task_services import check_tasks, open_tasks
from headrace.tasks.serving import TaskServer
from headrace.tasks.serving.announcing import Announcer
from headrace.tasks.serving.wire import Announcement
from headrace.tasks.types import Endpoint

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "k", "m", timeout_s=20.0)


WAITS = ("waiting", "still waiting")


def recipe_of(more: tuple[str, ...] = (), **table: Any):
    toy = {"service": "registers", "token_env": "TOY_TOKEN", "level": 2, **table}
    return parse_recipe(
        {
            "name": "r",
            "model": {"path": "x"},
            "gateway": {"register_port": 0},
            "tasks": {"toy": {**toy, "register_s": 300.0}} | dict.fromkeys(more, toy)
            if more
            else {"toy": toy},
            "evaluation": {"tasks": ["toy"], "instances": 3},
            "stages": [
                {
                    "kind": "agentic_rl",
                    "name": "rl",
                    "tasks": {"toy": 1.0},
                    "updates": 1,
                }
            ],
        },
        "test",
    )


async def test_a_run_waits_for_its_services_and_says_how_to_start_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_TOKEN", TOKEN)
    words, toy = Words(), Toy()
    toy.go_on.set()

    async def come() -> None:
        told = await words.until("waiting up to 300 s for the service of task toy")
        assert "headrace tasks serve package.module:Class --set level=2 " in told
        found = re.search(r"--token-env TOY_TOKEN --register (http://\S+)", told)
        assert found
        server = await TaskServer.start(toy, token=TOKEN, options={"level": 2})
        stack.push_async_callback(server.stop)
        said = Announcement("toy", server.url, {"level": 2}, "test 1")
        announcer = Announcer(found.group(1), TOKEN, said, report=lambda words: None)
        announcer.start()
        stack.push_async_callback(announcer.stop)

    async with contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(come())
        opened = open_tasks(recipe_of(), {"toy"}, no_isolation=True, log_dir=tmp_path, report=words)
        _, services = await stack.enter_async_context(opened)
        await coming
        assert services["toy"].evaluation_seed(2) == 5  # known already
        assert (await services["toy"].rollout(toy.instance(5), ENDPOINT)).outcome is Outcome.OK
    (line,) = (tmp_path / "task-toy.jsonl").read_text().splitlines()
    assert json.loads(line)["options"] == {"level": 2}


async def test_while_some_services_have_come_the_others_are_asked_for_again(monkeypatch):
    monkeypatch.setenv("TOY_TOKEN", TOKEN)
    words = Words()

    async def open_both() -> None:
        recipe = recipe_of(more=("zoo",), register_s=0.05)
        async with open_tasks(recipe, {"toy", "zoo"}, no_isolation=True, report=words):
            pass

    server = await TaskServer.start(Toy(), token=TOKEN, options={"level": 2})
    opening = asyncio.create_task(open_both())
    url = (await words.until("^waiting up to 0.05 s for the service of task zoo")).split()[-1]
    said = Announcement("toy", server.url, {"level": 2})
    announcer = Announcer(url, TOKEN, said, report=lambda words: None)
    announcer.start()
    try:
        with pytest.raises(UserError, match=r"task zoo: waited 0\.05 s"):
            await opening
    finally:
        await announcer.stop()
        await server.stop()
    told = [w.partition(" to register;")[0] for w in words.said]
    first, again = (f"{how} up to 0.05 s for the service of task zoo" for how in WAITS)
    assert told[:2] == ["waiting up to 300 s for the service of task toy", first]
    assert told[2:] == [f"task toy at {server.url} registered", again]


async def test_a_service_that_never_comes_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("TOY_TOKEN", TOKEN)
    words = Words()

    async def open_it(register_s: float) -> None:
        recipe = recipe_of(register_s=register_s)
        async with open_tasks(recipe, {"toy"}, no_isolation=True, report=words):
            pass

    with pytest.raises(UserError) as none:
        await open_it(0.05)
    assert re.fullmatch(
        r"task toy: waited 0.05 s \(tasks.toy.register_s\) for its service, none registered; start "
        r"it with: headrace tasks serve package.module:Class --set level=2 --token-env TOY_TOKEN "
        r"--register http://127.0.0.1:\d+",
        str(none.value),
    )
    # Somebody came, and was refused.
    words.said.clear()
    opening = asyncio.create_task(open_it(1.0))
    told = await words.until("waiting")
    url = told.rpartition(" ")[2]
    told_there = Words()
    announcer = Announcer(
        url, TOKEN, Announcement("toy", "http://a:1", {"level": 1}), report=told_there
    )
    announcer.start()
    try:
        await told_there.until("refuses it: tasks.toy.level is 2")
        with pytest.raises(UserError, match=r"announcement was refused: tasks\.toy\.level is 2"):
            await opening
    finally:
        await announcer.stop()


def test_mistakes_in_the_table_are_one_line(monkeypatch):
    monkeypatch.delenv("TOY_TOKEN", raising=False)
    with pytest.raises(UserError, match="TOY_TOKEN is not set"):
        check_tasks(recipe_of(), {"toy"})
    for changes, says in [
        ({"token_env": None}, "has to show a token"),
        ({"where": "process"}, "leave out where"),
        ({"register_s": 0}, "register_s"),
    ]:
        with pytest.raises(UserError, match=says):
            recipe_of(**changes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--register", "http://127.0.0.1:1"], "asks for the token"),
        (["--register", "there", "--token-env", "TOY_TOKEN"], "register 'there': .*give one like"),
        (["--url", "http://127.0.0.1:1"], "give register"),
    ],
)
def test_mistakes_of_the_command_that_registers_are_one_line(arguments, says, capsys, monkeypatch):
    monkeypatch.setenv("TOY_TOKEN", TOKEN)
    assert main(["tasks", "serve", "terminal", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert error.count("\n") == 1
