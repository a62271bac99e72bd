"""Which trajectories a report shows: a fixed rule, so that nobody picks the pretty ones by hand."""

from collections.abc import Iterable

import msgspec

from headrace.observe.runs import Run
from headrace.rollout.record.rows import TRAIN, SessionSummary


class SamplePair(msgspec.Struct, frozen=True):
    """Attempts at one instance: `after` RL, and `before` it where both were measured."""

    before: SessionSummary | None
    after: SessionSummary


def sample_pairs(run: Run, wanted: int = 3) -> list[SamplePair]:
    """Up to `wanted` instances to show, deterministic for a given ledger.

    With evaluations on both sides of the last RL stage: instances it learned (those with more turns
    first, one per family), then one that still fails, then any. Otherwise rollouts of the newest
    measurement or of training, the most recent ones.
    """
    if run.ledger is None:
        return []
    sessions = list(run.ledger.sessions())
    before, after = _around_rl(run, sessions)
    pairs = [
        SamplePair(before[key], after[key])
        for key in sorted(before.keys() & after.keys())
        if before[key].reward is not None and after[key].reward is not None
    ]
    if pairs:
        return _choose(pairs, wanted)
    finished = [s for s in sessions if s.reward is not None and s.calls]
    return [SamplePair(None, s) for s in finished[-wanted:]]


def _around_rl(
    run: Run, sessions: list[SessionSummary]
) -> tuple[dict[str, SessionSummary], dict[str, SessionSummary]]:
    """The measurements just before and just after the last RL stage, by instance."""
    names = [str(s["name"]) for s in run.stages() if s.get("kind") == "agentic_rl"]
    trained = [s for s in sessions if s.purpose == TRAIN and s.stage in names]
    if not trained:
        return {}, {}
    stage = trained[-1].stage
    start = min(s.dispatched_at for s in trained if s.stage == stage)
    end = max(s.dispatched_at for s in trained if s.stage == stage)
    measured: dict[str, list[SessionSummary]] = {}
    for session in sessions:
        if session.purpose != TRAIN:
            measured.setdefault(session.purpose, []).append(session)
    # A second, greedy measurement of the same model would compare unlike with unlike.
    purposes = [p for p in measured if "greedy" not in p] or list(measured)
    earlier = [p for p in purposes if measured[p][-1].dispatched_at <= start]
    later = [p for p in purposes if measured[p][0].dispatched_at >= end]
    if not earlier or not later:
        return {}, {}
    first = max(earlier, key=lambda p: measured[p][0].dispatched_at)
    second = min(later, key=lambda p: measured[p][0].dispatched_at)
    return _by_instance(measured[first]), _by_instance(measured[second])


def _by_instance(sessions: Iterable[SessionSummary]) -> dict[str, SessionSummary]:
    """The last attempt at each instance (a crashed evaluation repeats some)."""
    return {f"{s.task}/{s.instance.get('seed')}": s for s in sessions}


def _choose(pairs: list[SamplePair], wanted: int) -> list[SamplePair]:
    """Learned instances of different families, then a failing one, then any; see sample_pairs."""
    learned = [p for p in pairs if not _solved(p.before) and _solved(p.after)]
    learned.sort(key=lambda p: -int(p.after.instance.get("min_turns", 0)))
    failing = [p for p in pairs if not _solved(p.after)]
    chosen: list[SamplePair] = []
    families: set[object] = set()
    for pair in learned:
        family = pair.after.instance.get("family")
        if family not in families and len(chosen) < wanted - 1:
            chosen.append(pair)
            families.add(family)
    for pair in [*failing[:1], *learned, *pairs]:
        if len(chosen) < wanted and pair not in chosen:
            chosen.append(pair)
    return chosen


def _solved(session: SessionSummary | None) -> bool:
    return session is not None and (session.reward or 0.0) >= 1.0
