"""Derives training sequences from a session's calls: pure, and the only place that does.

Calls form a tree: a child's prompt extends its parent's prompt and output (law L1). Every path from
a root to a call that nothing was sampled after is one segment, so every fork trains; a sampled
token shared by several segments is trained in the first of them only (law L2).
"""

from collections.abc import Iterator

import msgspec

from headrace.rollout.types import Call, DropReason, Outcome, Segment, Session


class TokenAccount(msgspec.Struct, frozen=True):
    """Where a session's sampled tokens go. `sampled == trainable + sum(dropped.values())`.

    Attributes:
        sampled: tokens the engine sampled in the session.
        trainable: of these, the ones that the session's segments train.
        dropped: the others, by reason.
    """

    sampled: int
    trainable: int
    dropped: dict[DropReason, int]


def segments(session: Session, max_tokens: int | None = None) -> list[Segment]:
    """The session's training sequences, in the order of the calls they end with.

    A sampled token's logprob and version appear in every segment that holds it; its train_mask is
    True in the first only. Segments that own no token are left out, as are calls without output
    that nothing was sampled after.

    Args:
        session: calls in index order, parents before children.
        max_tokens: leave out segments longer than this; tokens they share with a kept segment are
            trained there.

    Raises:
        ValueError: a call's parent is not an earlier call of the session.
    """
    owned: set[str] = set()
    result: list[Segment] = []
    for path in _paths(session):
        if max_tokens is not None and _length(path) > max_tokens:
            continue
        fresh = {call.id for call in path if call.id not in owned and call.spans}
        if not fresh:
            continue
        owned |= fresh
        result.append(_segment(session.id, path, fresh))
    return result


def accounting(session: Session, max_tokens: int | None = None) -> TokenAccount:
    """What becomes of each sampled token by the session's own facts (law L2).

    Reasons that depend on other sessions (staleness, groups, budgets) are decided later, over the
    tokens that are trainable here. An open session's tokens count as trainable.

    Args:
        session: see `segments`.
        max_tokens: see `segments`.
    """
    sampled = sum(len(span.ids) for call in session.calls for span in call.spans)
    own = sum(len(span.ids) for call in session.policy_calls for span in call.spans)
    others = sampled - own
    reason = _session_reason(session)
    if reason is not None:
        dropped = {DropReason.OTHER_MODEL: others, reason: own}
        return TokenAccount(sampled, 0, {why: n for why, n in dropped.items() if n})
    trainable = sum(sum(segment.train_mask) for segment in segments(session, max_tokens))
    dropped = {DropReason.OTHER_MODEL: others, DropReason.TOO_LONG: own - trainable}
    return TokenAccount(sampled, trainable, {why: n for why, n in dropped.items() if n})


def _session_reason(session: Session) -> DropReason | None:
    if session.purpose != "train":
        return DropReason.EVALUATION
    if session.outcome is Outcome.ENV_FAILED:
        return DropReason.ENV_FAILED
    if session.outcome is Outcome.CANCELLED:
        return DropReason.CANCELLED
    return None


def _paths(session: Session) -> Iterator[list[Call]]:
    """Root-to-leaf paths; a leaf is a call with output after which nothing was sampled. Calls of
    other models are of no interest."""
    by_id: dict[str, Call] = {}
    for call in session.policy_calls:
        if call.parent_id is not None and call.parent_id not in by_id:
            raise ValueError(
                f"call {call.id}: its parent {call.parent_id} is no earlier call of "
                f"session {session.id}"
            )
        if call.id in by_id:
            raise ValueError(f"call {call.id} appears twice in session {session.id}")
        by_id[call.id] = call
    continued: set[str] = set()
    for call in reversed(session.policy_calls):
        if call.parent_id is not None and (call.spans or call.id in continued):
            continued.add(call.parent_id)
    for call in session.policy_calls:
        if not call.spans or call.id in continued:
            continue
        path = [call]
        while path[-1].parent_id is not None:
            path.append(by_id[path[-1].parent_id])
        yield path[::-1]


def _length(path: list[Call]) -> int:
    return sum(len(call.prompt_delta) + len(call.output_ids) for call in path)


def _segment(session_id: str, path: list[Call], owned: set[str]) -> Segment:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    newest: list[int] = []
    for call in path:
        given = len(call.prompt_delta)
        ids += call.prompt_delta
        mask += [False] * given
        logprobs += [0.0] * given
        versions += [-1] * given
        newest += [-1] * given
        for span in call.spans:
            ids += span.ids
            mask += [call.id in owned] * len(span.ids)
            logprobs += span.logprobs
            versions += [span.weight_version] * len(span.ids)
            newest += [span.newest_version or span.weight_version] * len(span.ids)
    return Segment(
        session_id,
        tuple(ids),
        tuple(mask),
        tuple(logprobs),
        tuple(versions),
        tuple(call.id for call in path if call.id in owned),
        tuple(newest) if newest != versions else (),
    )
