"""Random numbers as pure functions of a seed and a counter, by hashing.

Nothing here has state, so whoever knows a request's seed knows all its draws. It knows neither
tokens nor distributions.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

SEED_MASK = (1 << 64) - 1
"""A seed's bits that count."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LANE_STEP = 0xD1342543DE82EF95


class Lane(IntEnum):
    """Unrelated streams of random numbers under one seed, each with its own counter."""

    TOKEN = 0
    """Draws each sampled token; the counter is the token's index in the output."""
    CHILD = 1
    """Seeds of what is derived from a request or session; the counter is the child's index."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit moves every output."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def streams(seeds: npt.NDArray[np.uint64], lane: Lane) -> npt.NDArray[np.uint64]:
    """What `numbers` needs of seeds [n], computed once: [n]."""
    mixed = _mix(seeds + _GAMMA)
    return _mix(mixed ^ np.uint64(lane * _LANE_STEP & SEED_MASK)) if lane else mixed


def numbers(
    streams: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (stream, counter) pair; both [n].

    Only 52 bits are used, so that `u * total` stays strictly below `total` after rounding.
    """
    return (_bits(streams, counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _bits(
    streams: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    return _mix(streams + counters * _GAMMA)


def uniform(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64], lane: Lane = Lane.TOKEN
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, counter) pair; both [n]."""
    return numbers(streams(seeds, lane), counters)


def derive_seed(seed: int, k: int) -> int:
    """The seed of child k >= 0 of what has `seed` itself: in [0, 2^63).

    splitmix64 applied to (seed, lane CHILD, k): a pure function, unrelated for neighbouring seeds
    and k, and never a number that any token of the parent is drawn with.
    """
    parent = streams(np.array([seed & SEED_MASK], dtype=np.uint64), Lane.CHILD)
    return int(_bits(parent, np.array([k], dtype=np.uint64))[0] >> np.uint64(1))
