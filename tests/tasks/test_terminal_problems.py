"""Problems are pure functions of their seeds, and training and evaluation never meet."""

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest

from headrace.errors import UserError
from headrace.tasks.terminal import FAMILIES, TerminalOptions, TerminalTasks
from headrace.tasks.terminal.files import EXTENSIONS, FOLDERS, STEMS, WORDS
from headrace.tasks.terminal.problem import AnswerGoal, StateGoal
from headrace.tasks.terminal.seeds import (
    content_hash,
    evaluation_seed,
    is_evaluation,
    make_problem,
    train_seed,
)
from headrace.tasks.terminal.verifier import state_difference

TASKS = TerminalTasks(None)
GRID = [(f, level) for f in FAMILIES.values() for level in (1, 2, 3)]


def test_there_are_enough_kinds_of_problem():
    assert len(FAMILIES) >= 14
    long = [f.name for f in FAMILIES.values() if make_problem(0, f, 1).min_turns >= 3]
    assert len(long) >= 4


def test_equal_seeds_give_equal_problems():
    for seed in (0, 1, 77, 2**40 + 3):
        instance = TASKS.instance(seed)
        assert TASKS.instance(seed) == instance
        again = TerminalTasks(None)
        assert again.problem(instance) == TASKS.problem(instance)
        assert again.content_id(instance) == TASKS.content_id(instance)


def test_problems_do_not_depend_on_the_process():
    code = (
        "from headrace.tasks.terminal import TerminalTasks as T; t = T(None)\n"
        "print([t.content_id(t.instance(s)) for s in range(60)])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4242"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str([TASKS.content_id(TASKS.instance(s)) for s in range(60)])


def test_training_and_evaluation_contents_are_disjoint():
    # That no hash is shared could be luck; that each side keeps to its own hashes cannot.
    for family, level in GRID:
        trained = {content_hash(make_problem(train_seed(i), family, level)) for i in range(40)}
        evaluated = {
            content_hash(make_problem(evaluation_seed(i), family, level)) for i in range(8)
        }
        assert not trained & evaluated
        assert {int(h[:8], 16) % 8 == 0 for h in trained} == {False}
        assert {int(h[:8], 16) % 8 == 0 for h in evaluated} == {True}


def test_seeds_are_disjoint():
    train = {train_seed(i) for i in range(500)}
    evaluation = {evaluation_seed(i) for i in range(500)}
    assert not train & evaluation
    assert not any(map(is_evaluation, train))
    assert all(map(is_evaluation, evaluation))


@pytest.mark.parametrize("seed_of", [train_seed, evaluation_seed])
def test_every_block_of_seeds_holds_every_family_once(seed_of):
    n = len(FAMILIES)
    blocks = [[TASKS.instance(seed_of(b * n + i)).family for i in range(n)] for b in range(2)]
    assert all(sorted(block) == sorted(FAMILIES) for block in blocks)
    assert blocks[0] != blocks[1]


def test_levels_follow_their_weights():
    only_hard = TerminalTasks(None, TerminalOptions(level_weights=(0, 0, 1)))
    assert {only_hard.instance(s).level for s in range(40)} == {3}
    mixed = Counter(TASKS.instance(s).level for s in range(300))
    assert mixed[1] > mixed[2] > mixed[3] > 20


def test_negative_seeds_are_refused():
    with pytest.raises(UserError, match="-1"):
        TASKS.instance(-1)
    with pytest.raises(UserError, match="-3"):
        train_seed(-3)


def test_instances_of_other_services_are_refused():
    instance = TASKS.instance(0)
    from msgspec.structs import replace

    for broken in (
        replace(instance, task="chess"),
        replace(instance, family="nope"),
        replace(instance, level=4),
    ):
        with pytest.raises(UserError, match="not of the terminal task"):
            TASKS.problem(broken)


def test_no_word_hides_in_another():
    for a, b in combinations((*WORDS, *STEMS, *FOLDERS, *EXTENSIONS), 2):
        if a in WORDS or b in WORDS:
            assert a not in b
            assert b not in a


@pytest.mark.parametrize(("family", "level"), GRID, ids=lambda v: getattr(v, "name", str(v)))
def test_problems_are_well_formed_and_short(family, level):
    for i in range(12):
        problem = make_problem(train_seed(i), family, level)
        assert len(problem.instruction.split()) <= 14
        assert len(problem.instruction) <= 75
        for step in problem.steps:
            for command in (step.right, *(m.command for m in step.mistakes)):
                assert len(command.replace("{out}", "report2.log")) <= 50
                assert "{" not in command.replace("{out}", "")
        assert any(step.mistakes for step in problem.steps)
        for path in problem.files:
            parent = path.rpartition("/")[0]
            assert not parent or problem.files[parent].kind == "dir"
        if isinstance(problem.goal, StateGoal):
            assert state_difference(problem.goal, problem.files), "solved before it begins"
        else:
            assert 1 <= len(problem.goal.expected) <= 30


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_no_constant_answer_pays(family):
    goals = [make_problem(train_seed(i), family, 1 + i % 3).goal for i in range(90)]
    answers = Counter(g.expected for g in goals if isinstance(g, AnswerGoal))
    if answers:
        assert answers.most_common(1)[0][1] / answers.total() <= 0.25


def test_the_order_of_files_says_nothing():
    for family, level in GRID:
        problem = make_problem(4, family, level)
        assert list(problem.files) == sorted(problem.files)
