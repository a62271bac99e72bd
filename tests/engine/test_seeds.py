"""Hashed random numbers: fixed, unrelated, and evenly spread."""

import numpy as np

from headrace.engine.sampling.seeds import Lane, derive_seed, uniform


def test_uniform_covers_the_unit_interval_and_neighbouring_seeds_are_unrelated() -> None:
    seeds = np.arange(2000, dtype=np.uint64)
    zero, one = np.zeros_like(seeds), np.ones_like(seeds)
    u, v = uniform(seeds, zero), uniform(seeds, one)
    assert u.min() >= 0
    assert max(u.max(), v.max()) < 1
    assert abs(u.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.08
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.08
    assert np.histogram(u, 10, (0, 1))[0].min() > 140
    lanes = np.stack([uniform(seeds, one, lane) for lane in Lane])
    assert np.abs(np.corrcoef(lanes) - np.eye(len(Lane))).max() < 0.08


def test_derived_seeds_are_distinct_and_fixed() -> None:
    seeds = {derive_seed(seed, k) for seed in range(-50, 50) for k in range(50)}
    assert len(seeds) == 5000
    assert 0 <= min(seeds) < max(seeds) < 1 << 63
    assert derive_seed(7, 0) == derive_seed(7 + (1 << 64), 0) != derive_seed(7, 1)
    streams = np.array([derive_seed(7, k) for k in range(2000)], dtype=np.uint64)
    u = uniform(streams, np.zeros_like(streams))
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.08
    assert np.histogram(u, 10, (0, 1))[0].min() > 140
