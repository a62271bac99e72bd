"""Trajectories for the dashboard: rows of the list, one in full, its tokens page by page.

From ledger types to JSON-compatible values of bounded size. What trains and what became of it is
decided by `rollout.segments` and the ledger; texts are made showable, never trusted.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.observe.calls import call_nodes
from headrace.observe.conversation import conversation
from headrace.observe.fates import failure_of, fate_words, short_fate
from headrace.observe.units import readable
from headrace.observe.vocabulary import Vocabulary
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import reasons_of
from headrace.rollout.record.browsing import CallFate
from headrace.rollout.record.rows import SessionSummary
from headrace.rollout.segments import segments
from headrace.rollout.types import Segment, Session

TOKENS = 4000
"""Tokens of one answer."""
_TURNS = 200
_TEXT = 20_000
_CALLS = 2000
_INSTANCE = 2000


def row(summary: SessionSummary) -> dict[str, Any]:
    """A trajectory in the list."""
    return {
        "id": summary.id,
        "stage": summary.stage,
        "purpose": summary.purpose,
        "task": summary.task,
        "family": readable(str(summary.instance.get("family", "")))[:80],
        "group": summary.group_id,
        "outcome": "open" if summary.outcome is None else summary.outcome.value,
        "failure": None if (failure := failure_of(summary)) is None else failure.value,
        "reasons": [r.value for r in _reasons(summary, ())],
        "reason": readable(summary.reason)[:200],
        "reward": summary.reward,
        "tokens": summary.tokens,
        "calls": summary.calls,
        "version": summary.oldest_version,
        "advantage": summary.advantage,
        "step": summary.step,
        "drop": None if summary.drop_reason is None else summary.drop_reason.value,
        "fate": short_fate(summary),
        "dispatched": summary.dispatched_at,
        "finished": summary.finished_at,
    }


def detail(
    summary: SessionSummary, session: Session, fates: Mapping[str, CallFate]
) -> dict[str, Any]:
    """One trajectory without its tokens: facts, conversation, calls as a tree, segments.

    Args:
        summary, session: the trajectory.
        fates: of its calls.
    """
    turns = conversation(session)
    skipped = max(len(turns) - _TURNS, 0)
    nodes = call_nodes(session)
    lanes = _lanes(session)
    indices = {node.id: node.index for node in nodes}
    return {
        **row(summary),
        "reasons": [r.value for r in _reasons(summary, fates.values())],
        "instance": _cut(readable(str(summary.instance)), _INSTANCE),
        "rewards": dict(sorted(summary.rewards.items())),
        "said": fate_words(summary),
        "turns": [
            {
                "role": turn.role,
                "text": _cut(turn.text, _TEXT),
                "reasoning": _cut(turn.reasoning, _TEXT),
                "note": turn.note,
            }
            for turn in turns[skipped:]
        ],
        "turns_skipped": skipped,
        "tree": [
            {
                "index": node.index,
                "lane": lanes[node.id],
                "parent": indices.get(node.parent_id or ""),
                "fork": node.fork_reason,
                "model": node.model,
                "held": node.held,
                "read": node.read,
                "sampled": node.sampled,
                "finish": node.finish_reason.value,
                "parse": node.parse_state.value,
                "versions": list(node.versions),
                "seconds": node.seconds,
            }
            for node in nodes[:_CALLS]
        ],
        "tree_skipped": max(len(nodes) - _CALLS, 0),
        "segments": [
            {"tokens": len(s.ids), "sampled": sum(v >= 0 for v in s.versions)}
            for s in segments(session)
        ],
    }


def _reasons(summary: SessionSummary, fates: Iterable[CallFate]) -> list[FailureReason]:
    """Everything that keeps it from being a clean sample: as a whole, and of single calls."""
    found = list(reasons_of(summary.outcome, summary.failure, summary.drop_reason))
    found += [FailureReason(fate.drop_reason) for fate in fates if fate.drop_reason is not None]
    return [r for r in dict.fromkeys(found) if r is not FailureReason.EVALUATION]


def tokens(
    summary: SessionSummary,
    session: Session,
    fates: Mapping[str, CallFate],
    vocabulary: Vocabulary | None,
    index: int,
    offset: int = 0,
) -> dict[str, Any] | None:
    """Up to TOKENS tokens of one segment as columns of equal length; None where there is none.

    "state" is, for each token: "read", "trained", "pending" (may still train), "elsewhere" (shared
    with an earlier segment, which has it), or why it does not train.

    Args:
        summary, session: the trajectory.
        fates: of its calls.
        vocabulary: texts of ids; None where the run has no tokenizer.
        index: of the segment.
        offset: of the first token.
    """
    found = segments(session)
    if not 0 <= index < len(found) or offset < 0:
        return None
    segment = found[index]
    part = slice(offset, offset + TOKENS)
    versions = segment.versions[part]
    newest = (segment.newest_versions or segment.versions)[part]
    ids = segment.ids[part]
    texts = ["" for _ in ids] if vocabulary is None else vocabulary.running(ids)
    return {
        "offset": offset,
        "total": len(segment.ids),
        "named": vocabulary is not None,
        "ids": list(ids),
        "text": [readable(text) for text in texts],
        "special": [vocabulary is not None and vocabulary.is_special(i) for i in ids],
        "state": _states(segment, session, summary, fates)[part],
        "logprob": [
            round(p, 5) if v >= 0 else None
            for p, v in zip(segment.logprobs[part], versions, strict=True)
        ],
        "version": [v if v >= 0 else None for v in versions],
        "newest": [n if v >= 0 else None for n, v in zip(newest, versions, strict=True)],
        # The ledger holds one advantage per trajectory; an objective may weigh single tokens.
        "advantage": summary.advantage,
    }


def _states(
    segment: Segment, session: Session, summary: SessionSummary, fates: Mapping[str, CallFate]
) -> list[str]:
    """See `tokens`."""
    whole = "pending"
    if summary.drop_reason is not None:
        whole = summary.drop_reason.value
    elif summary.step is not None:
        whole = "trained"
    lengths = {call.id: len(call.output_ids) for call in session.calls}
    # Owned tokens come call by call, in the order of call_ids.
    owned: list[str] = []
    for call_id in segment.call_ids:
        fate = fates.get(call_id)
        reason = None if fate is None else fate.drop_reason
        owned += [whole if reason is None else reason.value] * lengths[call_id]
    mine = iter(owned)
    return [
        next(mine) if masked else ("read" if version < 0 else "elsewhere")
        for masked, version in zip(segment.train_mask, segment.versions, strict=True)
    ]


def _lanes(session: Session) -> dict[str, int]:
    """A column for every call: a call's first continuation stays in its column, others branch."""
    lanes: dict[str, int] = {}
    continued: set[str] = set()
    used = 0
    for call in session.calls:
        parent = call.parent_id
        if parent is not None and parent in lanes and parent not in continued:
            lanes[call.id] = lanes[parent]
            continued.add(parent)
        else:
            lanes[call.id] = used
            used += 1
    return lanes


def _cut(text: str, limit: int) -> str:
    left = len(text) - limit
    return text if left <= 0 else f"{text[:limit]}\n… {left:,} more letters"
