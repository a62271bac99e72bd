"""Which recorded call a new request continues: messages first, tokens last.

`History` is one session's tree of calls. It answers `match` from messages alone; the tokens of the
matched call are then extended by the renderer's bridge (law L1). What was rendered afresh may still
begin with the very tokens of a recorded call: `match_tokens` finds it. Pure bookkeeping: no I/O, no
tokens made here.
"""

import hashlib
import operator
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.rollout.types import Call
from headrace.tokens.messages import Message, identity, same_reasoning


class ForkReason(StrEnum):
    """Why a call has no parent although its session already had calls."""

    REPEATED = "repeated_first_call"
    """The same messages as an earlier call without a parent: a sibling root, nothing lost."""
    NEW_CONVERSATION = "new_conversation"
    """It begins with other messages than any recorded call: a subagent, or a changed prompt."""
    REWRITTEN = "history_rewritten"
    """It begins like a recorded call and goes on otherwise: messages dropped or changed."""
    RENDERED = "rendered_differently"
    """The template, asked to render everything again, does not repeat what was sampled."""
    CONTEXT_FOLDED = "context_folded"
    """The gateway replaced old tool results, as it was told to."""
    CONTEXT_DISCARDED = "context_discarded"
    """The gateway began a fresh context, as it was told to."""
    ASSISTANT_INJECTED = "assistant_injected"
    """The client put an assistant message of its own after the recorded answer."""
    TOOLS_CHANGED = "tools_changed"
    """The messages continue a call that was shown other tools."""
    BRIDGE_REFUSED = "bridge_refused"
    """The template cannot be continued after the held tokens (thinking dropped, for example)."""


class Node(msgspec.Struct, frozen=True, eq=False):
    """A recorded call as others continue it.

    It holds the ids that it added, in its call, and shares those before with the call it continues
    (law L1): the memory of a session grows with its tokens, not with tokens times turns.

    Attributes:
        call: the record.
        parent: the node that it continues; None for a fork or a root.
        prompt_length: of everything the engine read.
        answer: the returned assistant message, normalised.
        tools_key: identity of the tools shown.
    """

    call: Call
    parent: "Node | None"
    prompt_length: int
    answer: Message
    tools_key: bytes

    @classmethod
    def of(cls, call: Call, parent: "Node | None", answer: Message, tools_key: bytes) -> "Node":
        """The node of a call that was just recorded."""
        before = 0 if parent is None else parent.path_length
        return cls(call, parent, before + len(call.prompt_delta), answer, tools_key)

    @property
    def path_length(self) -> int:
        """Of everything read and sampled."""
        return self.prompt_length + sum(len(span.ids) for span in self.call.spans)

    def prompt_ids(self) -> list[int]:
        """Everything the engine read, put together anew."""
        nodes: list[Node] = [self]
        while (before := nodes[-1].parent) is not None:
            nodes.append(before)
        ids: list[int] = []
        for node in reversed(nodes):
            ids += node.call.prompt_delta
            if node is not self:
                for span in node.call.spans:
                    ids += span.ids
        return ids

    def path_ids(self) -> list[int]:
        """Everything read and sampled, put together anew."""
        return [*self.prompt_ids(), *self.call.output_ids]


class Match(msgspec.Struct, frozen=True):
    """A parent and the messages that are new after it, or the reason there is no parent."""

    parent: Node | None
    new_messages: list[Message]
    fork: ForkReason | None


class _Digested(NamedTuple):
    """Messages, a digest of each of their non-empty prefixes, and the hash to go on with."""

    messages: list[Message]
    digests: list[bytes]
    running: "hashlib.blake2b"


_NOTHING_DIGESTED = _Digested([], [], hashlib.blake2b(digest_size=16))
_DIGESTED_KEPT = 4

_encode = msgspec.json.Encoder(order="deterministic").encode


def tools_key(tools: Sequence[dict[str, Any]]) -> bytes:
    """Equal exactly for equal tool lists."""
    return _encode(tools) if tools else b""


class History:
    """The calls of one session, found again by what a client sends.

    Args:
        normaliser: maps a message to what counts of it for matching, e.g. without a line that
            changes with every request; None takes all of it.
    """

    def __init__(self, normaliser: Callable[[Message], Message] | None = None) -> None:
        self.calls: list[Call] = []
        """In index order."""
        self.normaliser = normaliser
        self._digested: list[_Digested] = []
        self._by_messages: dict[bytes, list[Node]] = {}
        self._roots: set[bytes] = set()
        self._beginnings: set[bytes] = set()
        self._nodes: list[Node] = []
        # Digests of the paths of the first `_indexed` nodes, by length.
        self._by_path: dict[int, dict[bytes, Node]] = {}
        self._indexed = 0

    def add(self, node: Node, messages: Sequence[Message]) -> None:
        """Record `node`, which answered `messages`; none for a raw prompt."""
        self.calls.append(node.call)
        self._nodes.append(node)
        if not messages:
            return
        before = self._digested_to(messages)
        running = before.running.copy()
        self._feed(running, node.answer)
        self._by_messages.setdefault(running.digest(), []).append(node)
        self._beginnings.add(before.digests[0])
        if node.call.parent_id is None:
            self._roots.add(before.digests[-1])

    def match(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Match:
        """The call with the longest history that `messages` continue with new messages only."""
        everything = list(messages)
        if not self.calls:
            return Match(None, everything, None)
        digests = self._digested_to(messages).digests
        fork = ForkReason.REWRITTEN
        if digests[-1] in self._roots:
            fork = ForkReason.REPEATED
        elif digests[0] not in self._beginnings:
            fork = ForkReason.NEW_CONVERSATION
        wanted = tools_key(tools)
        rethought = False
        for count in range(len(messages) - 1, 0, -1):
            nodes = self._by_messages.get(digests[count - 1])
            if not nodes:
                continue
            answer = messages[count - 1]
            nodes = [node for node in nodes if same_reasoning(answer, node.answer)]
            if not nodes:
                rethought = True
                continue
            if any(message["role"] == "assistant" for message in messages[count:]):
                return Match(None, everything, fork if rethought else ForkReason.ASSISTANT_INJECTED)
            same_tools = [node for node in nodes if node.tools_key == wanted]
            if not same_tools:
                return Match(None, everything, ForkReason.TOOLS_CHANGED)
            return Match(_meant(same_tools, answer), everything[count:], None)
        return Match(None, everything, fork)

    def match_tokens(self, ids: Sequence[int]) -> Node | None:
        """The call with the longest path, prompt and output, that these ids begin with and exceed.

        Costs a pass over the ids, and over paths that were not asked for before: for prompts that
        no message matched.
        """
        for node in self._nodes[self._indexed :]:
            path = np.array(node.path_ids(), dtype=np.int32)
            digest = hashlib.blake2b(path.tobytes(), digest_size=16).digest()
            self._by_path.setdefault(len(path), {})[digest] = node
        self._indexed = len(self._nodes)
        data = np.array(ids, dtype=np.int32).tobytes()
        running, at, found = hashlib.blake2b(digest_size=16), 0, None
        for length in sorted(length for length in self._by_path if length < len(ids)):
            running.update(data[4 * at : 4 * length])
            at = length
            found = self._by_path[length].get(running.copy().digest(), found)
        return found

    def _digested_to(self, messages: Sequence[Message]) -> "_Digested":
        """A digest of every non-empty prefix of `messages`.

        Those of objects that were digested before are remembered: only new messages cost.
        """
        known = _NOTHING_DIGESTED
        for other in self._digested:
            count = len(other.messages)
            if len(known.messages) < count <= len(messages) and all(
                map(operator.is_, other.messages, messages)
            ):
                known = other
        running, digests = known.running.copy(), list(known.digests)
        for message in messages[len(digests) :]:
            self._feed(running, message)
            digests.append(running.copy().digest())
        if len(digests) == len(known.digests):
            return known
        # What is longer takes the place of what it continues.
        self._digested = [other for other in self._digested if other is not known]
        found = _Digested(list(messages), digests, running)
        self._digested = [*self._digested[1 - _DIGESTED_KEPT :], found]
        return found

    def _feed(self, running: "hashlib.blake2b", message: Message) -> None:
        if self.normaliser is not None:
            message = self.normaliser(message)
        part = identity(message)
        running.update(len(part).to_bytes(8, "little"))
        running.update(part)


def ignore_lines(patterns: Sequence[str]) -> Callable[[Message], Message]:
    """A normaliser that leaves out every line in which one of the regular expressions is found.

    For clients that put the time, a counter or a list of files into their system prompt.

    Raises:
        re.error: a pattern is not valid.
    """
    compiled = [re.compile(pattern) for pattern in patterns]

    def normaliser(message: Message) -> Message:
        lines = message["content"].split("\n")
        kept = [line for line in lines if not any(p.search(line) for p in compiled)]
        return message if len(kept) == len(lines) else {**message, "content": "\n".join(kept)}

    return normaliser


def _meant(nodes: list[Node], answer: Message) -> Node:
    """Among equal answers the one whose tool call ids came back, else the latest."""
    ids = _call_ids(answer)
    return next((node for node in nodes if ids and _call_ids(node.answer) == ids), nodes[-1])


def _call_ids(message: Message) -> list[str | None]:
    return [call.get("id") for call in message.get("tool_calls", ())]
