"""A session's calls as the tree they form: who continues whom, with how many tokens, and why not.

Pure; how the tree is drawn is up to the terminal or the page.
"""

import msgspec

from headrace.rollout.types import FinishReason, ParseState, Session


class CallNode(msgspec.Struct, frozen=True):
    """One call under the call it continues.

    Attributes:
        id, index, parent_id, fork_reason, finish_reason, parse_state, model: as in `Call`.
        held: tokens of the path it continues; 0 for a root or a fork.
        read: prompt tokens that were new.
        sampled: output tokens.
        versions: weight versions in its output, rising.
        depth: calls above it.
        seconds: from its start to its end.
    """

    id: str
    index: int
    parent_id: str | None
    fork_reason: str | None
    finish_reason: FinishReason
    parse_state: ParseState
    held: int
    read: int
    sampled: int
    versions: tuple[int, ...]
    depth: int
    seconds: float
    model: str | None = None


def call_nodes(session: Session) -> list[CallNode]:
    """The calls of a session in order, parents before children."""
    nodes: dict[str, CallNode] = {}
    for call in session.calls:
        parent = nodes.get(call.parent_id or "")
        nodes[call.id] = CallNode(
            id=call.id,
            index=call.index,
            parent_id=call.parent_id,
            fork_reason=call.fork_reason,
            finish_reason=call.finish_reason,
            parse_state=call.parse_state,
            held=0 if parent is None else parent.held + parent.read + parent.sampled,
            read=len(call.prompt_delta),
            sampled=len(call.output_ids),
            versions=tuple(sorted({span.weight_version for span in call.spans})),
            depth=0 if parent is None else parent.depth + 1,
            seconds=call.finished_at - call.started_at,
            model=call.model,
        )
    return list(nodes.values())
