"""Context management for agents that have none: old tool results folded, or a fresh start.

Three policies, as GLM-5 describes them (arXiv 2602.15763, section 4.2.4): keep-recent-k replaces
all but the newest k tool results by one sentence; discard-all starts over from the task once the
context exceeds a threshold; hierarchical does the first always and the second when that is not
enough. Pure functions over messages: what they change makes the next call a fork, which is recorded
with its reason and trains as any other.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from headrace.tokens.messages import Message

FOLDED = "Tool result is omitted to save tokens."
"""What stands in for an old tool result."""


class ContextPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to drop what; None turns a part off.

    Attributes:
        keep_recent: tool results kept, counted from the newest; older ones are folded.
        discard_above: tokens of a prompt above which everything but the task is discarded.
        placeholder: what a folded result says.

    Raises:
        ValueError: a number below 1.
    """

    keep_recent: int | None = None
    discard_above: int | None = None
    placeholder: str = FOLDED

    def __post_init__(self) -> None:
        for name in ("keep_recent", "discard_above"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"ContextPolicy: {name} is {value}; it must be at least 1")


class Change(StrEnum):
    """What was done to a conversation."""

    NOTHING = "nothing"
    FOLDED = "folded"
    DISCARDED = "discarded"


class Managed(NamedTuple):
    """A conversation as the model will read it."""

    messages: list[Message]
    change: Change


def fold(messages: Sequence[Message], keep: int, placeholder: str) -> list[Message]:
    """All but the newest `keep` tool results replaced by the placeholder."""
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    old = set(results[: max(0, len(results) - keep)])
    return [
        {**message, "content": placeholder} if i in old else message
        for i, message in enumerate(messages)
    ]


def task(messages: Sequence[Message]) -> list[Message]:
    """What a fresh start begins with: everything up to the first user message."""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            return list(messages[: i + 1])
    return list(messages[:1])


class ContextManager:
    """One session's policy, and where its conversations were cut.

    A client goes on sending everything; what stood before the last cut stays away.

    Args:
        policy: see there.
    """

    def __init__(self, policy: ContextPolicy) -> None:
        self._policy = policy
        # Lengths at which a conversation was cut, by how it began: a session may hold several.
        self._cuts: dict[bytes, int] = {}

    def apply(self, messages: Sequence[Message], count: Callable[[list[Message]], int]) -> Managed:
        """The conversation as the model is to read it.

        Args:
            messages: normalised, as the client sent them.
            count: tokens of a prompt made of messages.
        """
        policy = self._policy
        start = task(messages)
        key = msgspec.json.encode(start)
        cut = self._cuts.get(key, 0)
        if cut > len(messages):
            cut = 0  # The client went back to before it.
        change = Change.DISCARDED if cut else Change.NOTHING
        kept = [*start, *messages[max(cut, len(start)) :]]
        kept, folded = self._folded(kept)
        if policy.discard_above is not None and count(kept) > policy.discard_above:
            if len(kept) > len(start):
                self._cuts[key] = len(messages)
                return Managed(start, Change.DISCARDED)
            return Managed(kept, change)
        return Managed(kept, Change.FOLDED if folded and not cut else change)

    def _folded(self, messages: list[Message]) -> tuple[list[Message], bool]:
        if self._policy.keep_recent is None:
            return messages, False
        folded = fold(messages, self._policy.keep_recent, self._policy.placeholder)
        return folded, folded != messages
