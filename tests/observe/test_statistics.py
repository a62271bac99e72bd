"""Intervals against published values and by their own properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.statistics import (
    difference_of_pairs,
    paired_difference,
    quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("ok", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_values(ok: int, n: int, low: float, high: float) -> None:
    assert wilson(ok, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_says_nothing_without_trials() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("ok", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_wilson_refuses_counts_that_are_no_proportion(ok: int, n: int) -> None:
    with pytest.raises(ValueError, match="wilson"):
        wilson(ok, n)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_mirrors(counts: tuple[int, int]) -> None:
    ok, n = counts
    low, high = wilson(ok, n)
    assert 0.0 <= low <= ok / n <= high <= 1.0
    mirrored_low, mirrored_high = wilson(n - ok, n)
    assert (low, high) == pytest.approx((1 - mirrored_high, 1 - mirrored_low))


def test_paired_difference_equals_published_value() -> None:
    # Cavo et al. 2012 in Fagerland, Lydersen, Laake, "Statistical Analysis of Contingency Tables",
    # chapter 8: pi_1+ - pi_+1 = -0.0621, Newcombe square-and-add (-0.1186, -0.0046).
    # Rows are the first measurement there, so the difference here has the other sign.
    change = difference_of_pairs(both=59, lost=6, gained=16, neither=80)
    assert change.difference == pytest.approx(0.0621, abs=5e-5)
    assert (change.low, change.high) == pytest.approx((0.0046, 0.1186), abs=5e-5)


counts = st.integers(0, 80)


@given(counts, counts, counts, counts)
def test_paired_difference_properties(both: int, lost: int, gained: int, neither: int) -> None:
    if both + lost + gained + neither == 0:
        with pytest.raises(ValueError, match="no table"):
            difference_of_pairs(both, lost, gained, neither)
        return
    change = difference_of_pairs(both, lost, gained, neither)
    assert -1.0 <= change.low <= change.difference <= change.high <= 1.0
    back = difference_of_pairs(both, gained, lost, neither)
    assert back.difference == pytest.approx(-change.difference)
    assert (back.low, back.high) == pytest.approx((-change.high, -change.low))


def test_pairs_are_matched_by_instance_and_others_left_out() -> None:
    before = {"instances": {"1": 0, "2": 1, "3": 0, "9": 1}}
    after = {"instances": {"3": 1, "2": 1, "1": 0, "7": 0}}
    change = paired_difference(before, after)
    assert change is not None
    assert (change.n, change.gained, change.lost) == (3, 1, 0)
    assert change.before == pytest.approx(1 / 3)
    assert change.after == pytest.approx(2 / 3)


def test_no_shared_instance_is_no_comparison() -> None:
    assert paired_difference({"instances": {"1": 1}}, {"instances": {"2": 1}}) is None
    assert paired_difference({}, {"instances": {"2": 1}}) is None


def test_pairing_narrows_the_interval() -> None:
    """The same margins, once paired as strongly and once as weakly as they can be."""
    strong = difference_of_pairs(both=100, lost=0, gained=60, neither=140)
    weak = difference_of_pairs(both=0, lost=100, gained=160, neither=40)
    assert strong.difference == pytest.approx(weak.difference)
    assert strong.high - strong.low < 0.7 * (weak.high - weak.low)


def test_quantile_interpolates() -> None:
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert quantile([5.0], 0.99) == 5.0
    assert math.isnan(quantile([], 0.5))
