"""Task services of one's own: found by path, made from options, and refused in one clear line."""

import sys

import pytest
from pydantic import ValidationError

from headrace.errors import UserError
from headrace.recipe import parse_recipe
from headrace.recipe.tables import GatewayTable
from headrace.task_services import check_tasks, open_tasks
from headrace.tasks.importing import import_task
from headrace.tasks.registry import make_task, resolved_options

MODULE = """
from headrace.tasks.types import TaskInstance

class Sums:
    name = "sums"
    def __init__(self, provider, digits: int, level=1):
        if digits < 1:
            raise ValueError("digits must be positive")
        self.provider, self.digits, self.level = provider, digits, level
    def instance(self, seed):
        return TaskInstance("sums", seed, "sum", self.level, 1)
    def train_seed(self, index):
        return 2 * index
    def evaluation_seed(self, index):
        return 2 * index + 1
    def content_id(self, instance):
        return str(instance.seed)
    async def rollout(self, instance, endpoint):
        raise NotImplementedError
    async def close(self):
        self.closed = True

class Half:
    def instance(self, seed): ...

number = 3
raise_on = {}
"""


@pytest.fixture(autouse=True)
def own_tasks(tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(MODULE)
    (tmp_path / "broken_tasks.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    sys.modules.pop("own_tasks", None)


def test_options_are_keyword_arguments_and_the_sandboxes_come_besides():
    task = import_task("own_tasks:Sums", {"digits": 2, "level": 3}, "boxes")  # type: ignore[arg-type] # any
    assert (task.provider, task.digits, task.instance(4).level) == ("boxes", 2, 3)  # type: ignore[attr-defined] # its own


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("own_tasks", {}, "write package.module:Class"),
        ("no_tasks:Sums", {}, "cannot be imported: ModuleNotFoundError"),
        ("broken_tasks:Sums", {}, "cannot be imported: ZeroDivisionError"),
        ("own_tasks:Sum", {}, "module own_tasks has no class Sum"),
        ("own_tasks:number", {}, "has no class number"),
        ("own_tasks:Half", {}, "has no name, train_seed, evaluation_seed, content_id, rollout"),
        ("own_tasks:Sums", {"digit": 1}, "'digit' .* did you mean 'digits'"),
        ("own_tasks:Sums", {"provider": 1}, "'provider' .* is unknown"),
        ("own_tasks:Sums", {}, "'digits' .* is missing"),
        ("own_tasks:Sums", {"digits": 0}, "ValueError: digits must be positive"),
    ],
)
def test_mistakes_are_one_clear_line(target, options, says):
    with pytest.raises(UserError, match=says) as caught:
        import_task(target, options, None)
    assert "\n" not in str(caught.value)


def test_a_table_bears_the_name_of_its_task():
    with pytest.raises(UserError, match=r"is task 'sums'; name its table \[tasks.sums\]"):
        make_task("summation", {"digits": 1}, None, "own_tasks:Sums")


def test_options_are_compared_as_the_service_reads_them():
    assert resolved_options("terminal", {"level_weights": [1, 0, 0]}) == {
        "level_weights": [1.0, 0.0, 0.0]
    }
    assert resolved_options("unknown", {"a": 1}) == {"a": 1}


def recipe_of(**tasks):
    return parse_recipe(
        {
            "name": "r",
            "model": {"path": "smollm2-135m-instruct"},
            "tasks": tasks,
            "stages": [{"kind": "agentic_rl", "name": "rl", "task": "sums", "updates": 1}],
        },
        "r.toml",
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"where": "moon"}, r"tasks.sums.where: .*'run' or 'process'"),
        ({"service": "http://x", "where": "process"}, "leave out where"),
        ({"token_env": "X"}, "give service, too"),
        ({"implementation": "own_tasks"}, "package.module:Class"),
        ({"answer_s": 0}, r"tasks.sums.answer_s"),
    ],
)
def test_mistakes_in_a_table_name_their_place(table, says):
    with pytest.raises(UserError, match=says):
        recipe_of(sums=table)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"service": "10.0.0.7:8700"}, "tasks.sums.service .*give one like"),
        ({"service": "http://x", "token_env": "NOT_SET_HERE"}, "NOT_SET_HERE is not set"),
        ({"implementation": "own_tasks:Sums", "digit": 1}, "did you mean 'digits'"),
        ({}, "task 'sums' is unknown"),
    ],
)
def test_a_plan_finds_what_a_table_alone_does_not_show(table, says):
    with pytest.raises(UserError, match=says):
        check_tasks(recipe_of(sums=table), {"sums"})


@pytest.mark.parametrize(
    ("service", "host", "told"),
    [
        ("http://10.0.0.7:8700", "127.0.0.1", ['set gateway.host = "0.0.0.0"']),
        ("http://127.0.0.1:8700", "127.0.0.1", []),
        ("http://10.0.0.7:8700", "0.0.0.0", []),
    ],
)
async def test_a_service_elsewhere_needs_a_way_back(service, host, told, monkeypatch):
    class Opened(Exception):
        pass

    async def opened(*_, **__):
        raise Opened

    monkeypatch.setattr("headrace.task_services.RemoteTasks.open", opened)
    recipe = recipe_of(sums={"service": service})
    recipe = recipe.model_copy(update={"gateway": GatewayTable(host=host)})
    words: list[str] = []
    with pytest.raises(Opened):
        async with open_tasks(recipe, {"sums"}, no_isolation=True, report=words.append):
            pass
    assert [w[-len(t) :] for w, t in zip(words, told, strict=True)] == told


@pytest.mark.parametrize("address", ["http://10.0.0.5", "10.0.0.5:80", "a b", ""])
def test_an_address_of_the_gateway_is_a_name_alone(address):
    with pytest.raises(ValidationError, match="no scheme, port or path"):
        GatewayTable(address=address)


async def test_a_task_of_ones_own_runs_in_the_runs_process():
    recipe = recipe_of(sums={"implementation": "own_tasks:Sums", "digits": 2})
    async with open_tasks(recipe, {"sums"}, no_isolation=True) as (provider, services):
        service = services["sums"]
        assert provider is not None
        assert service.provider is provider  # type: ignore[attr-defined] # its own
    assert service.closed  # type: ignore[attr-defined] # its own
