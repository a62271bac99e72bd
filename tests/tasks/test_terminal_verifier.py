"""The verifier is exact about content and lenient about edges only."""

import pytest

from headrace.sandbox.types import FileEntry
from headrace.tasks.terminal.problem import AnswerGoal, StateGoal
from headrace.tasks.terminal.verifier import answer_matches, score, state_difference

A = FileEntry("file", 0o644, b"one\n")
B = FileEntry("file", 0o644, b"two\n")
D = FileEntry("dir", 0o755)


@pytest.mark.parametrize("answer", ["12", " 12\n", "12.", "`12`", '"12"', "\t12 \n"])
def test_fair_answers_pass(answer):
    assert score(AnswerGoal("12"), answer, None) == {"reward": 1.0, "answer": 1.0}


@pytest.mark.parametrize(
    "answer", ["", "1", "2", "13", "012", "12 12", "12 13", "The answer is 12", "1 2", "`12", "x12"]
)
def test_other_answers_fail(answer):
    assert score(AnswerGoal("12"), answer, None) == {"reward": 0.0, "answer": 0.0}


def test_words_must_match_whole():
    goal = AnswerGoal("apple river")
    assert answer_matches(goal, "apple  river")
    assert not answer_matches(goal, "apple")
    assert not answer_matches(goal, "Apple river")
    assert not answer_matches(goal, "appleriver")


def test_paths_may_start_with_a_dot():
    assert answer_matches(AnswerGoal("docs/a.txt", is_path=True), "./docs/a.txt")
    assert not answer_matches(AnswerGoal("docs/a.txt", is_path=True), "a.txt")
    assert not answer_matches(AnswerGoal("docs/a.txt"), "./docs/a.txt")


GOAL = StateGoal({"a": A, "d": D, "d/b": B}, any_mode=frozenset({"d/b"}))


@pytest.mark.parametrize(
    "tree",
    [
        {"a": A, "d": D, "d/b": B},
        {"a": A, "d": FileEntry("dir", 0o700), "d/b": FileEntry("file", 0o600, b"two\n")},
        {"a": A, "d": D, "d/b": FileEntry("file", 0o644, b"two")},
    ],
)
def test_wanted_states_pass(tree):
    assert state_difference(GOAL, tree) is None
    assert score(GOAL, "anything", tree) == {"reward": 1.0, "state": 1.0}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({}, "a is missing"),
        ({"a": A, "d": D}, "d/b is missing"),
        ({"a": A, "d": D, "d/b": A}, "d/b has other content"),
        ({"a": B, "d": D, "d/b": B}, "a has other content"),
        ({"a": A, "d": D, "d/b": B, "x": A}, "x should not exist"),
        ({"a": FileEntry("file", 0o600, b"one\n"), "d": D, "d/b": B}, "a has mode 600, not 644"),
        ({"a": FileEntry("link", 0o777, b"one\n"), "d": D, "d/b": B}, "a is a link, not a file"),
        ({"a": D, "d": D, "d/b": B}, "a is a dir, not a file"),
    ],
)
def test_other_states_fail(tree, says):
    assert state_difference(GOAL, tree) == says
    assert score(GOAL, "done", tree) == {"reward": 0.0, "state": 0.0}


def test_a_state_needs_a_tree():
    with pytest.raises(ValueError, match="tree"):
        score(GOAL, "done", None)
