"""When scores end a stage; which of them is the best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.recipe import StopTable
from headrace.training.early_stop import Score, best_score, early_stop, without_improvement


def scores(*values: float) -> list[Score]:
    return [Score(10 * (i + 1), value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "min_gain", "count"),
    [
        ((), 0.0, 0),
        ((0.0,), 0.0, 0),
        ((0.1, 0.3, 0.2, 0.3), 0.0, 2),
        ((0.1, 0.3, 0.2, 0.4), 0.0, 0),
        ((0.10, 0.14, 0.18), 0.05, 0),
        ((0.10, 0.14, 0.15), 0.05, 2),
    ],
)
def test_improvements_are_counted_from_the_last_one(values, min_gain, count):
    assert without_improvement(scores(*values), min_gain) == count
    assert without_improvement(scores(*values)[::-1], min_gain) == count, "order is that of steps"


def test_rules_end_a_stage_by_name():
    assert early_stop(None, scores(1.0)) is None
    both = StopTable(score=0.9, patience=2)
    assert early_stop(both, scores(0.5, 0.6, 0.5)) is None
    assert early_stop(both, scores(0.5, 0.4, 0.5)) == "patience"
    assert early_stop(both, scores(0.5, 0.95, 0.1, 0.1)) == "score"
    assert early_stop(StopTable(score=0.9), scores(*[0.1] * 50)) is None


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 1))
def test_the_best_is_the_earliest_of_the_highest_and_is_never_behind_patience(values, min_gain):
    found = scores(*values)
    best = best_score(found)
    if best is None:
        assert not found
        return
    assert best.value == max(values)
    assert all(s.value < best.value for s in found if s.step < best.step)
    later = sum(s.step > best.step for s in found)
    assert without_improvement(found, 0.0) == later
    assert later <= without_improvement(found, min_gain) < len(found)
