"""Scores come from the families' own scorers, and no answer gets past them or through them."""

import pytest

from headrace.tasks.reasoning.families import select_families
from headrace.tasks.reasoning.problems import Problem, Problems
from headrace.tasks.reasoning.process import WorkerProcess
from headrace.tasks.reasoning.screen import refusal
from headrace.tasks.reasoning.verifier import Verifier, find_answer

NAMES = (
    "chain_sum",
    "gcd",
    "basic_arithmetic",
    "simple_equations",
    "spell_backward",
    "number_sorting",
    "word_sorting",
    "prime_factorization",
    "tower_of_hanoi",
    "mini_sudoku",
    "knights_knaves",
    "countdown",
    "simple_integration",
    "polynomial_multiplication",
    "spiral_matrix",
    "propositional_logic",
)
MALFORMED = ("", "zzz", "(((", "9" * 5000, "[" * 3000, "\ud800", "a\0b", "- ?", "💡", "x" * 30_000)


@pytest.fixture(scope="module")
def problems():
    families = select_families({name: {} for name in NAMES})
    made = Problems(families)
    yield {name: made.get(0, name) for name in NAMES}
    made.close()


@pytest.fixture(scope="module")
def verifier():
    worker = WorkerProcess([(name, {}) for name in NAMES])
    verifier = Verifier(worker, 10.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize("name", NAMES)
def test_right_wrong_and_malformed_answers(problems, verifier, name):
    problem = problems[name]
    right = problem.answer or problem.facts["example_answer"]
    if problem.answer is not None:
        assert verifier.score(problem, right).score == 1.0
    for answer in MALFORMED:
        verdict = verifier.score(problem, answer)
        assert 0.0 <= verdict.score < 1.0, (answer[:20], verdict)
    # Whatever those did, the scorer still knows what is right.
    assert problem.answer is None or verifier.score(problem, right).score == 1.0


def test_equal_formulas_and_partial_scores_count_as_the_scorer_says(problems, verifier):
    sums = problems["chain_sum"]
    assert sums.answer is not None
    assert verifier.score(sums, f"{sums.answer}.0").score == 1.0
    assert 0.0 < verifier.score(sums, f"it is {sums.answer}").score < 1.0
    integral = problems["simple_integration"]
    assert verifier.score(integral, f"{integral.answer} - 3 + 7").score == 1.0
    product = problems["polynomial_multiplication"]
    assert verifier.score(product, f"0 + {product.answer}").score == 1.0
    words = problems["spiral_matrix"]
    assert words.answer is not None
    listed = "[" + ", ".join(words.answer.split()) + "]"
    assert verifier.score(words, listed).score == pytest.approx(0.1)


def code(path, family):
    """An answer that writes a file if anything evaluates it."""
    return f"__import__('pathlib').Path({str(path)!r}).touch() or {4 if family else 0}"


@pytest.mark.parametrize("name", ["countdown", "simple_integration", "spiral_matrix"])
@pytest.mark.parametrize("wrap", ["{}", "[{}]", " \t{}", "1 + {}", "({})"])
def test_no_code_reaches_a_scorer_that_evaluates(problems, verifier, tmp_path, name, wrap):
    answer = wrap.format(code(tmp_path / "owned", name))
    assert verifier.score(problems[name], answer).score < 0.1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("spiral_matrix", "[0 for entry['answer'] in ['x']]"),
        ("spiral_matrix", "(lambda: 1)"),
        ("spiral_matrix", "f'{1}'"),
        ("n_queens", "[].__class__"),
        ("countdown", "(1).real"),
        ("countdown", "'1'"),
        ("countdown", "5!"),
        ("simple_integration", "Symbol('x')"),
        ("simple_integration", "exp(*x)"),
        ("simple_integration", "sin(x=1)"),
        ("puzzle24", "x" * 3000),
        ("puzzle24", "(" * 1500 + ")" * 400),
    ],
)
def test_what_is_more_than_a_plain_value_is_refused(family, answer):
    assert refusal(family, answer) is not None


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("spiral_matrix", "[[1, -2], ['a']]"),
        ("spiral_matrix", "1 2 3"),
        ("string_insertion", "ABCD"),
        ("countdown", "(3 + 4) * -2 / 5"),
        ("simple_integration", "x**(3/2) + exp(2*x) + C"),
        ("chain_sum", "__import__('os')"),
    ],
)
def test_what_scorers_are_made_for_passes(family, answer):
    assert refusal(family, answer) is None


def test_an_answer_that_never_ends_scores_nothing_and_the_next_one_counts(problems):
    problem = problems["countdown"]
    worker = WorkerProcess([(name, {}) for name in NAMES])
    impatient = Verifier(worker, 1.0)
    try:
        # A tower of powers: plain arithmetic that no machine finishes.
        verdict = impatient.score(problem, "9**9**9**9")
        assert verdict.score <= 0.1
        if verdict.reason:
            assert "gave up" in verdict.reason
        assert impatient.score(problem, problem.answer).score == 1.0
    finally:
        impatient.close()


def test_the_answer_is_what_stands_between_the_last_tags():
    assert find_answer("<answer>1</answer> no, <answer>\n 2 </answer>.") == "2"
    assert find_answer("<answer></answer>") == ""
    for message in ("", "2", "<answer>2", "2</answer>", "<Answer>2</Answer>"):
        assert find_answer(message) is None


@pytest.mark.slow
def test_every_family_can_be_used_and_rewards_no_nonsense():
    from reasoning_gym.factory import DATASETS

    from headrace.tasks.reasoning.families import _UNUSABLE

    names = sorted(set(DATASETS) - set(_UNUSABLE))
    families = select_families({name: {} for name in names})
    made = Problems(families)
    verifier = Verifier(WorkerProcess([(f.name, {}) for f in families]), 60.0)
    try:
        for name in names:
            problem: Problem = made.get(0, name)
            assert verifier.score(problem, "zzz").score < 1.0, name
            if problem.answer is not None:
                assert verifier.score(problem, problem.answer).score == 1.0, name
    finally:
        made.close()
        verifier.close()
