"""Demonstrations of the reasoning task: right in form always, right in content as asked."""

import pytest

from headrace.errors import UserError
from headrace.tasks.reasoning import ReasoningOptions, ReasoningTasks
from headrace.tasks.reasoning.demonstrations import PROGRAMS, run_programs
from headrace.tasks.reasoning.problems import belongs_to_evaluation
from headrace.tasks.reasoning.service import _DEMONSTRATION_BASE
from headrace.tasks.reasoning.verifier import find_answer


@pytest.fixture
async def make_tasks():
    made = []

    def make(provider, families, **options):
        made.append(ReasoningTasks(provider, ReasoningOptions(families=families, **options)))
        return made[-1]

    yield make
    for tasks in made:
        await tasks.close()


async def test_without_the_tool_an_answer_follows_the_question(make_tasks):
    tasks = make_tasks(None, ["chain_sum", "gcd", "knights_knaves"])
    perfect = await tasks.demonstrations(20, seed=1, quality=1.0)
    assert all(d.right and d.reward == 1.0 and d.tools == [] for d in perfect)
    assert len({d.family for d in perfect}) == 3
    for d in perfect:
        assert [m["role"] for m in d.messages] == ["system", "user", "assistant"]
        assert d.train == (False, False, True)
    mixed = await tasks.demonstrations(80, seed=1, quality=0.4)
    assert sum(d.right for d in mixed) == pytest.approx(32, abs=12)
    for d in mixed:
        assert find_answer(d.messages[-1]["content"]) is not None
        assert d.reward == float(d.right)
    assert await tasks.demonstrations(20, seed=1, quality=0.4) == mixed[:20]
    other = await tasks.demonstrations(20, seed=2, quality=0.4)
    assert {d.messages[1]["content"] for d in other}.isdisjoint(
        d.messages[1]["content"] for d in mixed
    )


async def test_with_the_tool_a_program_is_really_run_where_one_line_does_it(provider, make_tasks):
    tasks = make_tasks(provider, [*PROGRAMS, "knights_knaves"], python_tool=True)
    perfect = await tasks.demonstrations(100, seed=0, quality=1.0)
    shown = {d.family: d for d in perfect}
    assert shown.keys() == {*PROGRAMS, "knights_knaves"}
    for d in perfect:
        assert d.right
        assert d.reward == 1.0, d
        assert d.tools
        turns = 3 if d.family == "knights_knaves" else 5
        assert len(d.messages) == len(d.train) == turns
        assert [m["role"] == "assistant" for m in d.messages] == list(d.train)
    for d in await tasks.demonstrations(60, seed=0, quality=0.0):
        assert d.reward == 0.0
        # What the demonstrator says is what its program printed.
        if len(d.messages) == 5:
            assert find_answer(d.messages[-1]["content"]) == d.messages[-2]["content"]


async def test_demonstrations_are_no_problems_of_rl_or_evaluation(make_tasks):
    tasks = make_tasks(None, {"chain_sum": {"min_terms": 4, "max_terms": 5}})
    shown = {d.messages[1]["content"] for d in await tasks.demonstrations(50, 0, 1.0)}
    for seed_of in (tasks.train_seed, tasks.evaluation_seed):
        met = {tasks.problem(tasks.instance(seed_of(i))).question for i in range(50)}
        assert shown.isdisjoint(met)


async def test_demonstrations_name_the_problems_they_show(make_tasks):
    tasks = make_tasks(None, ["gcd", "chain_sum"])
    found = await tasks.demonstrations(20, 0, 0.5)
    ids = {}
    for index in range(_DEMONSTRATION_BASE, _DEMONSTRATION_BASE + 20):
        instance = tasks.instance(tasks.train_seed(index))
        ids[tasks.problem(instance).question] = tasks.content_id(instance)
    assert [ids[d.messages[-2]["content"]] for d in found] == [d.content_id for d in found]
    assert not any(belongs_to_evaluation(d.content_id) for d in found)


async def test_bad_input_is_refused(provider, make_tasks):
    with pytest.raises(UserError, match="quality is 2"):
        await make_tasks(None, ["gcd"]).demonstrations(1, 0, 2)
    with pytest.raises(UserError, match="none of the families propositional_logic tells"):
        await make_tasks(None, ["propositional_logic"]).demonstrations(1, 0, 1.0)
    with pytest.raises(UserError, match="needs a sandbox provider"):
        await make_tasks(None, ["gcd"], python_tool=True).demonstrations(1, 0, 1.0)
    assert await run_programs(["print('a\\nb')", "pass"], provider) == ["a\nb\n", ""]
