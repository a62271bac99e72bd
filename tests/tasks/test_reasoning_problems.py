"""Problems of the reasoning task: a function of their seeds, the two sides apart, clear errors."""

import sys

import pytest

from headrace.errors import UserError
from headrace.tasks import create_task
from headrace.tasks.reasoning.families import select_families
from headrace.tasks.reasoning.problems import (
    Problem,
    Problems,
    evaluation_seed,
    family_of,
    train_seed,
)
from headrace.tasks.reasoning.process import WorkerLost, WorkerProcess
from headrace.tasks.types import TaskInstance

# Three of these walk over sets of strings, whose order differs between ordinary processes.
WANTED = {
    "chain_sum": {},
    "polynomial_multiplication": {},
    "isomorphic_strings": {},
    "ransom_note": {},
    "number_sorting": {"min_numbers": 3, "max_numbers": 3},
}
FAMILIES = select_families(WANTED)


@pytest.fixture
def problems():
    made = []

    def make(families):
        made.append(Problems(families))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_seed_gives_the_same_problem_in_every_process(problems):
    first, second = problems(FAMILIES), problems(FAMILIES)
    for seed in range(12):
        for family in WANTED:
            problem = first.get(seed, family)
            assert problem.question
            assert second.get(seed, family) == problem
    # Nor does it matter in which order problems are asked for.
    assert problems(FAMILIES).get(11, "ransom_note") == first.get(11, "ransom_note")


def test_the_sides_share_no_content_even_where_seeds_repeat_questions(problems):
    # One-digit sums: 200 questions at most, so that hundreds of seeds must repeat them.
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    made = problems(select_families({"chain_sum": tiny}))
    sides = []
    for seed_of in (train_seed, evaluation_seed):
        contents = [made.get(seed_of(i), "chain_sum").content_id for i in range(250)]
        assert len(set(contents)) < len(contents)
        sides.append(set(contents))
    assert not sides[0] & sides[1]
    assert len(sides[1]) >= 5


def test_a_content_is_what_is_asked_whatever_the_seed():
    def problem(question, answer, item_seed=1):
        return Problem("f", 0, item_seed, question, answer, {}).content_id

    assert problem("1 + 1 =", "2") == problem("1  + 1 =\n", "2", 99)
    assert len({problem("1 + 1 =", "2"), problem("1 + 2 =", "2"), problem("1 + 1 =", None)}) == 3


def test_families_are_drawn_by_weight():
    families = select_families({"gcd": {"weight": 3}, "lcm": {}})
    drawn = [family_of(seed, families).name for seed in range(2000)]
    assert drawn.count("gcd") == pytest.approx(1500, abs=80)


class OneQuestion:
    """A worker whose family asks the same whatever the seed, or cannot ask at all."""

    def __init__(self, answer):
        self.answer = answer

    def ask(self, request, limit_s):
        return self.answer

    def close(self):
        pass


def test_too_few_questions_are_an_error_that_says_so(problems):
    made = problems(FAMILIES)
    made._worker = OneQuestion({"question": "1 + 1 =", "answer": "2", "facts": {}})
    found, refused = [], []
    for seed in (train_seed(0), evaluation_seed(0)):
        try:
            found.append(made.get(seed, "chain_sum"))
        except UserError as error:
            refused.append(str(error))
    assert len(found) == 1
    (message,) = refused
    assert "choose settings that allow more different questions" in message
    made._worker = OneQuestion({"error": "ValueError: no such board"})
    with pytest.raises(UserError, match=r"none of 400 draws .* ValueError: no such board"):
        made.get(train_seed(1), "chain_sum")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"families": {"chain_sums": {}}}, "did you mean 'chain_sum'"),
        ({"families": ["zzzzzz"]}, "known: .*chain_sum"),
        ({"families": {"chain_sum": {"min_term": 2}}}, "did you mean 'min_terms'"),
        ({"families": {"chain_sum": {"wieght": 2}}}, "did you mean 'weight'"),
        (
            {"families": {"chain_sum": {"min_terms": 0}}},
            "min_terms = 0: min_terms must be positive",
        ),
        ({"families": {"chain_sum": {"min_terms": "a"}}}, "refuses min_terms = 'a'"),
        ({"families": {"chain_sum": {"seed": 1}}}, r"chain_sum\.seed.*leave it out"),
        ({"families": {"chain_sum": {"weight": 0}}}, "weight is 0; use a number above 0"),
        ({"families": {"chain_sum": {"weight": "a"}}}, "weight is 'a'"),
        ({"families": {"composite": {}}}, "'composite' cannot be used; name the families"),
        ({"families": {"game_of_life_halting": {}}}, "full marks to any answer"),
        ({"families": {}}, "none is named"),
        ({"families": ["gcd", "gcd"]}, "repeats"),
        ({"families": 3}, "'families' .* is 3"),
        ({"families": {"gcd": 3}}, r"families\.gcd"),
        ({"prompt": "dirct"}, "did you mean 'direct'"),
        ({"threshold": 0}, "'threshold' .* is 0"),
        ({"python_tol": True}, "did you mean 'python_tool'"),
    ],
)
def test_bad_options_get_one_clear_line(options, says):
    with pytest.raises(UserError, match=says) as caught:
        create_task("reasoning", options, None)
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'pip install "headrace\[reasoning\]"'):
        create_task("reasoning", {}, None)


def test_instances_are_made_without_the_worker_and_strangers_refused():
    task = create_task("reasoning", {"families": ["gcd"]}, None)
    assert task.instance(4) == TaskInstance("reasoning", 4, "gcd", 1, 1)
    with pytest.raises(UserError, match="use 0 or more"):
        task.instance(-1)
    with pytest.raises(UserError, match="not of this reasoning task"):
        task.content_id(TaskInstance("reasoning", 4, "lcm", 1, 1))


def test_a_worker_that_cannot_start_or_is_closed_says_so():
    worker = WorkerProcess([("no_such_family", {})])
    assert "KeyError" in worker.ask({"family": 0, "seed": 1}, 60.0)["error"]
    worker.close()
    worker.close()
    with pytest.raises(WorkerLost, match="closed"):
        worker.ask({"family": 0, "seed": 1}, 60.0)
