"""How old a trajectory is, as one pure function (law L7).

It is called in exactly one place, when a batch is cut: the age of a trajectory that waits in a
queue grows with every publication, so a check made on entry proves nothing.
"""

from collections.abc import Iterable


def lag(current_version: int, versions: Iterable[int]) -> int:
    """How many publications the oldest sampled token of a trajectory is behind.

    | current_version | versions  | lag | kept at tau = 1 | kept at tau = 0 |
    |-----------------|-----------|-----|-----------------|-----------------|
    | 5               | 5         | 0   | yes             | yes             |
    | 5               | 4         | 1   | yes             | no              |
    | 5               | 3         | 2   | no              | no              |
    | 5               | 5, 4, 5   | 1   | yes             | no              |
    | 5               | 6         | 0   | yes             | yes             |
    | 5               | (nothing) | 0   | yes             | yes             |

    The fifth row happens for a moment during a publication: an engine has loaded version 6 and
    stamps it, while the caller still waits for the acknowledgement.

    Args:
        current_version: newest published version at the moment the batch is cut, >= 0.
        versions: weight version of every sampled token (or of every span) of the trajectory.

    Returns:
        Publications between the oldest of `versions` and `current_version`, >= 0.
    """
    return max(0, current_version - min(versions, default=current_version))


def is_stale(current_version: int, versions: Iterable[int], tau: int) -> bool:
    """Whether a trajectory is too old to train on: its lag exceeds `tau`.

    Args:
        current_version: as in `lag`.
        versions: as in `lag`.
        tau: largest lag that still trains, in publications, >= 0.

    Raises:
        ValueError: tau is negative.

    Source: GLM-5 (arXiv 2602.15763), section 4.1 (stale samples).
    """
    if tau < 0:
        raise ValueError(f"tau {tau} is negative; 0 trains only on the newest weights")
    return lag(current_version, versions) > tau
