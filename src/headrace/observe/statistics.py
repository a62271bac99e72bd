"""Intervals for success rates: how sure a measured proportion, or a paired change of it, is.

Pure functions of counts; no scipy, no randomness. Every interval is two-sided 95%.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Z95 = 1.959963984540054
"""The 97.5% quantile of the standard normal distribution."""


def wilson(ok: int, n: int) -> tuple[float, float]:
    """Wilson's score interval for a proportion.

    Args:
        ok: successes, 0 <= ok <= n.
        n: trials; 0 says nothing, so the interval is (0, 1).

    Raises:
        ValueError: counts that are no proportion.

    Source: Wilson 1927; Newcombe 1998, Statistics in Medicine 17:857-872, method 3.
    """
    if n < 0 or not 0 <= ok <= n:
        raise ValueError(f"wilson: {ok} successes of {n} trials")
    if n == 0:
        return 0.0, 1.0
    rate = ok / n
    centre = rate + Z95**2 / (2 * n)
    spread = Z95 * math.sqrt(rate * (1 - rate) / n + Z95**2 / (4 * n * n))
    scale = 1 + Z95**2 / n
    low = 0.0 if ok == 0 else (centre - spread) / scale
    high = 1.0 if ok == n else (centre + spread) / scale
    return low, high


def mean_interval(n: int, total: float, squares: float) -> tuple[float, float] | None:
    """The interval of a mean: Wilson's where every value is 0 or 1, else the normal one.

    Args:
        n: values, taken as independent.
        total: their sum.
        squares: the sum of their squares.

    Returns:
        (low, high); None where the values say nothing about their spread.
    """
    if n < 1:
        return None
    # Of values 0 and 1 both sums are the same whole number; others can only meet it by chance.
    if total == squares and total == int(total) and 0 <= total <= n:
        return wilson(int(total), n)
    if n < 2:
        return None
    mean = total / n
    spread = Z95 * math.sqrt(max(squares / n - mean * mean, 0.0) / (n - 1))
    return mean - spread, mean + spread


class PairedDifference(msgspec.Struct, frozen=True):
    """How a success rate changed between two measurements of the same instances.

    Attributes:
        n: instances measured both times.
        before: success rate of the first measurement on those, in [0, 1].
        after: success rate of the second.
        difference: after - before, in [-1, 1].
        low: lower 95% limit of the difference.
        high: upper 95% limit of the difference.
        gained: instances that failed first and succeeded then.
        lost: instances that succeeded first and failed then.
    """

    n: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    gained: int
    lost: int


def paired_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> PairedDifference | None:
    """Compare two evaluation records on the instances they share.

    Args:
        a: the earlier record; its "instances" maps an instance's seed to 0 or 1.
        b: the later record.

    Returns:
        The change from a to b, or None when they share no instance.
    """
    first: Mapping[str, Any] = a.get("instances") or {}
    second: Mapping[str, Any] = b.get("instances") or {}
    shared = [key for key in first if key in second]
    if not shared:
        return None
    pairs = [(bool(first[key]), bool(second[key])) for key in shared]
    return difference_of_pairs(
        both=sum(x and y for x, y in pairs),
        lost=sum(x and not y for x, y in pairs),
        gained=sum(y and not x for x, y in pairs),
        neither=sum(not x and not y for x, y in pairs),
    )


def difference_of_pairs(both: int, lost: int, gained: int, neither: int) -> PairedDifference:
    """The change of a proportion from the four counts of a paired table.

    Args:
        both: succeeded before and after.
        lost: succeeded before only.
        gained: succeeded after only.
        neither: failed both times.

    Raises:
        ValueError: a negative count, or no pairs.

    Source: Newcombe 1998, Statistics in Medicine 17:2635-2650, method 10 (square and add of two
    Wilson intervals, with the pairs' correlation).
    """
    n = both + lost + gained + neither
    if min(both, lost, gained, neither) < 0 or n == 0:
        raise ValueError(f"difference_of_pairs: no table of counts: {both, lost, gained, neither}")
    ok_before, ok_after = both + lost, both + gained
    before, after = ok_before / n, ok_after / n
    before_low, before_high = wilson(ok_before, n)
    after_low, after_high = wilson(ok_after, n)
    phi = _correlation(both, lost, gained, neither)

    def combine(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))

    difference = after - before
    low = difference - combine(after - after_low, before_high - before)
    high = difference + combine(after_high - after, before - before_low)
    return PairedDifference(
        n=n,
        before=before,
        after=after,
        difference=difference,
        low=max(low, -1.0),
        high=min(high, 1.0),
        gained=gained,
        lost=lost,
    )


def _correlation(both: int, lost: int, gained: int, neither: int) -> float:
    """The phi coefficient, pulled towards zero by Newcombe's continuity correction."""
    n = both + lost + gained + neither
    margins = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    if margins == 0:
        return 0.0
    product = float(both * neither - lost * gained)
    if product > 0:
        product = max(product - n / 2, 0.0)
    return product / math.sqrt(margins)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of `values` by linear interpolation; nan when there are none.

    Args:
        values: any order.
        q: in [0, 1].
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
