"""Which recorded call a new request continues: messages first, tokens last.

`History` is one session's tree of calls. It answers `match` from messages alone; the tokens of the
matched call are then extended by the renderer's bridge (law L1). Pure bookkeeping: no I/O, no
tokens made here.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from headrace.rollout.types import Call
from headrace.tokens.messages import Message, identity, same_reasoning


class ForkReason(StrEnum):
    """Why a call has no parent although its session already had calls."""

    REPEATED = "repeated_first_call"
    """The same messages as an earlier call without a parent: a sibling root, nothing lost."""
    REWRITTEN = "history_rewritten"
    """No recorded call's messages and answer begin this request."""
    ASSISTANT_INJECTED = "assistant_injected"
    """The client put an assistant message of its own after the recorded answer."""
    TOOLS_CHANGED = "tools_changed"
    """The messages continue a call that was shown other tools."""
    BRIDGE_REFUSED = "bridge_refused"
    """The template cannot be continued after the held tokens (thinking dropped, for example)."""


class Node(msgspec.Struct, frozen=True):
    """A recorded call as others continue it.

    Attributes:
        call: the record.
        prompt_ids: everything the engine read.
        answer: the returned assistant message, normalised.
        tools_key: identity of the tools shown.
    """

    call: Call
    prompt_ids: tuple[int, ...]
    answer: Message
    tools_key: bytes


class Match(msgspec.Struct, frozen=True):
    """A parent and the messages that are new after it, or the reason there is no parent."""

    parent: Node | None
    new_messages: list[Message]
    fork: ForkReason | None


_encode = msgspec.json.Encoder(order="deterministic").encode


def tools_key(tools: Sequence[dict[str, Any]]) -> bytes:
    """Equal exactly for equal tool lists."""
    return _encode(tools) if tools else b""


class History:
    """The calls of one session, found again by what a client sends."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """In index order."""
        self._by_messages: dict[bytes, list[Node]] = {}
        self._roots: set[bytes] = set()

    def add(self, node: Node, messages: Sequence[Message]) -> None:
        """Record `node`, which answered `messages`."""
        digests = _digests([*messages, node.answer])
        self._by_messages.setdefault(digests[-1], []).append(node)
        if node.call.parent_id is None:
            self._roots.add(digests[-2])
        self.calls.append(node.call)

    def match(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Match:
        """The call with the longest history that `messages` continue with new messages only."""
        everything = list(messages)
        if not self.calls:
            return Match(None, everything, None)
        digests = _digests(messages)
        fork = ForkReason.REPEATED if digests[-1] in self._roots else ForkReason.REWRITTEN
        wanted = tools_key(tools)
        for count in range(len(messages) - 1, 0, -1):
            nodes = self._by_messages.get(digests[count - 1])
            if not nodes:
                continue
            answer = messages[count - 1]
            nodes = [node for node in nodes if same_reasoning(answer, node.answer)]
            if not nodes:
                continue
            if any(message["role"] == "assistant" for message in messages[count:]):
                return Match(None, everything, ForkReason.ASSISTANT_INJECTED)
            same_tools = [node for node in nodes if node.tools_key == wanted]
            if not same_tools:
                return Match(None, everything, ForkReason.TOOLS_CHANGED)
            return Match(_meant(same_tools, answer), everything[count:], None)
        return Match(None, everything, fork)


def _meant(nodes: list[Node], answer: Message) -> Node:
    """Among equal answers the one whose tool call ids came back, else the latest."""
    ids = _call_ids(answer)
    return next((node for node in nodes if ids and _call_ids(node.answer) == ids), nodes[-1])


def _call_ids(message: Message) -> list[str | None]:
    return [call.get("id") for call in message.get("tool_calls", ())]


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """A digest of every non-empty prefix of `messages`."""
    running = hashlib.blake2b(digest_size=16)
    digests: list[bytes] = []
    for message in messages:
        part = identity(message)
        running.update(len(part).to_bytes(8, "little"))
        running.update(part)
        digests.append(running.copy().digest())
    return digests
