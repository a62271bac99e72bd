"""What is measured never trains: over resumes with another recipe, and as demonstrations."""

from types import SimpleNamespace
from typing import cast

import pytest

from headrace.errors import UserError
from headrace.recipe import Recipe, parse_recipe
from headrace.rollout.choosing.mixing import HeldOut
from headrace.rollout.record.ledger import Ledger
from headrace.stages.held_out import demonstrations_of, hold_out, measured
from headrace.tasks.types import Demonstration, TaskInstance


class Numbers:
    """Instance n asks number n; training and evaluation seeds are the same, to be unkind."""

    name = "numbers"

    def __init__(self, **changes) -> None:
        self.without_id = False
        self.__dict__.update(changes)

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, "f", 1, 1)

    def train_seed(self, index: int) -> int:
        return index

    def evaluation_seed(self, index: int) -> int:
        return index

    def content_id(self, instance: TaskInstance) -> str:
        return f"number {instance.seed}"

    async def rollout(self, instance, endpoint):
        raise NotImplementedError

    async def demonstrations(self, count: int, seed: int, quality: float) -> list[Demonstration]:
        return [
            Demonstration((), (), [], "f", 1, True, 1.0, "" if self.without_id else f"number {n}")
            for n in range(count)
        ]


TASKS = {"numbers": Numbers()}


def recipe(instances: int | None) -> Recipe:
    data = {
        "name": "x",
        "model": {"path": "smollm2-135m-instruct"},
        "stages": [{"kind": "agentic_rl", "name": "rl", "updates": 3, "task": "numbers"}],
        "evaluation": {"task": "numbers", "instances": instances or 1},
    }
    found = parse_recipe(data, "t")
    return found if instances is not None else found.model_copy(update={"evaluation": None})


def held(held_out: HeldOut, count: int = 12) -> list[int]:
    return [n for n in range(count) if TASKS["numbers"].instance(n) in held_out]


async def test_what_is_measured_is_held_out(tmp_path):
    assert held(measured(recipe(4), TASKS)) == [0, 1, 2, 3]
    assert held(measured(recipe(None), TASKS)) == []
    with Ledger.create(tmp_path) as ledger:
        assert held(await hold_out(recipe(4), TASKS, ledger)) == [0, 1, 2, 3]


async def test_a_resumed_run_cannot_measure_what_may_have_trained(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        await hold_out(recipe(4), TASKS, ledger)
        # Nothing has trained: more may still be measured.
        assert held(await hold_out(recipe(6), TASKS, ledger)) == list(range(6))
        ledger.stage_started("rl")
    with Ledger.resume(tmp_path) as ledger:
        with pytest.raises(UserError, match=r"evaluation: 2 of its problems .* stage rl began"):
            await hold_out(recipe(8), TASKS, ledger)
        # Less may be measured, and what is not measured now stays held out for later.
        assert held(await hold_out(recipe(2), TASKS, ledger)) == list(range(6))
        assert held(await hold_out(recipe(None), TASKS, ledger)) == list(range(6))
    with Ledger.resume(tmp_path) as ledger:
        assert held(await hold_out(recipe(6), TASKS, ledger)) == list(range(6))


async def test_demonstrations_of_measured_problems_are_left_out():
    held_out = measured(recipe(4), TASKS)
    found = await demonstrations_of(TASKS["numbers"], 10, 0, 1.0, held_out)
    assert [d.content_id for d in found] == [f"number {n}" for n in range(4, 10)]
    with pytest.raises(UserError, match="all of its 3 demonstrations show problems that are held"):
        await demonstrations_of(TASKS["numbers"], 3, 0, 1.0, held_out)


async def test_demonstrations_that_do_not_say_what_they_show_cannot_train_beside_measuring():
    silent = Numbers(without_id=True)
    with pytest.raises(UserError, match="do not say which problems they show"):
        await demonstrations_of(silent, 3, 0, 1.0, measured(recipe(4), TASKS))
    nothing = measured(recipe(None), TASKS)
    assert len(await demonstrations_of(silent, 3, 0, 1.0, nothing)) == 3
    none = cast(Numbers, SimpleNamespace(name="mute"))
    with pytest.raises(UserError, match="task mute has no demonstrations"):
        await demonstrations_of(none, 3, 0, 1.0, nothing)
