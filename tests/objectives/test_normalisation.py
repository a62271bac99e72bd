"""Each normalisation against the mean that its name says, written as loops."""

from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.objectives.normalisation import normalised_weights

Group = list[tuple[int, list[float]]]
"""(multiplicity, value of each token) of each trajectory."""
trajectory = st.tuples(st.integers(1, 2), st.lists(st.floats(-3, 3), min_size=1, max_size=5))
batches = st.lists(st.lists(trajectory, min_size=1, max_size=4), min_size=1, max_size=4)


def reference(batch: list[Group], normalisation: str) -> float:
    """Repeats what multiplicities stand for, then takes plain means."""
    groups = [[values for m, values in group for _ in range(m)] for group in batch]
    sequences = [values for group in groups for values in group]
    match normalisation:
        case "token_mean":
            return fmean(v for values in sequences for v in values)
        case "sequence_mean":
            return fmean(fmean(values) for values in sequences)
        case _:
            return fmean(fmean(fmean(values) for values in group) for group in groups)


@settings(max_examples=60, deadline=None)
@given(batches, st.sampled_from(["token_mean", "sequence_mean", "group_mean"]), st.randoms())
def test_weights_make_the_mean_that_is_asked_for(batch, normalisation, random):
    rows = []
    number = 0
    for g, group in enumerate(batch):
        for multiplicity, values in group:
            # A token of weight 0 anywhere in a trajectory must change nothing.
            rows += [(float(multiplicity), number, g, v) for v in values] + [(0.0, number, g, 9e9)]
            number += 1
    random.shuffle(rows)  # segments of a trajectory may be anywhere
    weights, trajectories, groups, values = zip(*rows, strict=True)
    found = normalised_weights(
        torch.tensor(weights),
        torch.tensor(trajectories),
        torch.tensor(groups),
        normalisation,
    )
    assert found.sum().item() == pytest.approx(1.0)
    total = (found * torch.tensor(values, dtype=torch.float64)).sum().item()
    assert total == pytest.approx(reference(batch, normalisation), abs=1e-9)


def test_mistakes_are_refused():
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="no token"):
        normalised_weights(one * 0, zero, zero, "token_mean")
    with pytest.raises(ValueError, match="unknown"):
        normalised_weights(one, zero, zero, "mean")  # type: ignore[arg-type] # on purpose
    with pytest.raises(ValueError, match="one length"):
        normalised_weights(one, zero[:1], zero, "token_mean")
