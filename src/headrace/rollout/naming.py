"""What a rollout is called and which random numbers it draws: functions of its place in the run.

A rollout's place is its group and its number in it. Its seed depends on the place alone, so that
what it samples depends on neither its neighbours nor on when it ran, and a rollout that a crash
lost is attempted again with the same luck: otherwise crashes, which meet long rollouts more often,
would favour short ones. No I/O.
"""

import hashlib
from collections.abc import Iterable

_AGAIN = "~"


def session_name(group_id: str, member: int, attempt: int = 0) -> str:
    """Id of a rollout's session; unique in a run as long as its group's id is.

    | group_id  | member | attempt | session        |
    |-----------|--------|---------|----------------|
    | rl-000007 | 3      | 0       | rl-000007-03   |
    | rl-000007 | 3      | 2       | rl-000007-03~2 |

    Args:
        group_id: of its group.
        member: its number in the group, >= 0.
        attempt: how often it was attempted before: a crash took it, or it failed.
    """
    return f"{group_id}-{member:02d}{f'{_AGAIN}{attempt}' if attempt else ''}"


def first_name(session_id: str) -> str:
    """The id that a session's rollout had at its first attempt: the same for all its attempts."""
    return session_id.partition(_AGAIN)[0]


def place(session_id: str) -> tuple[int, str]:
    """What sorts sessions by group and number, whichever attempts they are."""
    name = first_name(session_id)
    return len(name), name


def missing_names(
    group_id: str, size: int, kept: Iterable[str], lost: Iterable[str]
) -> list[tuple[int, str]]:
    """Which rollouts of a group have to be dispatched again: (number, session id) of each.

    Args:
        group_id: of the group.
        size: rollouts it is meant to have.
        kept: sessions it still has.
        lost: sessions that a crash took from it.
    """
    found, attempts = {first_name(name) for name in kept}, [first_name(name) for name in lost]
    names = [(m, session_name(group_id, m)) for m in range(size)]
    missing = [(m, name) for m, name in names if name not in found]
    # Ledgers of earlier versions hold names of another form, which say no number.
    missing = missing[: size - len(found)]
    return [(m, session_name(group_id, m, attempts.count(name))) for m, name in missing]


def next_attempt(session_id: str) -> tuple[int, str, int]:
    """Number, session id and attempt of what takes a session's place in its group."""
    name, _, before = session_id.partition(_AGAIN)
    group_id, _, member = name.rpartition("-")
    attempt = int(before or 0) + 1
    return int(member), session_name(group_id, int(member), attempt), attempt


def rollout_seed(recipe_seed: int, group_id: str, member: int, draw: int = 0) -> int:
    """The seed of everything that a rollout samples, in [0, 2^63).

    Args:
        recipe_seed: of the run.
        group_id: of its group.
        member: its number in the group.
        draw: other random numbers for the same place; for attempts that must not repeat another.
    """
    text = f"{recipe_seed}/{group_id}/{member}{f'/{draw}' if draw else ''}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
