"""The lag function: its table, and that it only ever looks at the oldest token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.staleness import is_stale, lag

VERSIONS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("current", "versions", "expected", "kept_at_1", "kept_at_0"),
    [
        (5, [5], 0, True, True),
        (5, [4], 1, True, False),
        (5, [3], 2, False, False),
        (5, [5, 4, 5], 1, True, False),
        (5, [6], 0, True, True),
        (5, [], 0, True, True),
        (0, [0], 0, True, True),
    ],
)
def test_docstring_table(current, versions, expected, kept_at_1, kept_at_0):
    assert lag(current, versions) == expected
    assert is_stale(current, versions, 1) is not kept_at_1
    assert is_stale(current, versions, 0) is not kept_at_0


@given(VERSIONS, st.integers(0, 60))
def test_only_the_oldest_token_counts(versions, current):
    assert lag(current, versions) == lag(current, [min(versions)])
    assert lag(current, iter(versions)) == lag(current, sorted(versions, reverse=True))


@given(VERSIONS, st.integers(0, 60))
def test_each_publication_adds_exactly_one(versions, age):
    current = min(versions) + age
    assert lag(current, versions) == age
    assert lag(current + 1, versions) == age + 1


@given(VERSIONS, st.integers(0, 60), st.integers(0, 10))
def test_once_stale_always_stale(versions, current, tau):
    if is_stale(current, versions, tau):
        assert is_stale(current + 1, versions, tau)
        assert tau == 0 or is_stale(current, versions, tau - 1)


def test_negative_tau_is_refused():
    with pytest.raises(ValueError, match="tau -1"):
        is_stale(1, [0], -1)
