"""A run with two tasks, one of which fails in the middle of its RL stage, and what such a run has
to show for it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import Outcome

UPDATES, INSTANCES = 6, 4


def stage(steady: str, failing: str, *, seconds: float) -> dict[str, Any]:
    """An RL stage of both, in equal parts. What `steady` may wait for leaves room for the other."""
    return {
        "kind": "agentic_rl",
        "name": "rl",
        "tasks": {steady: {"ratio": 1.0, "concurrency": 8}, failing: 1.0},
        "updates": UPDATES,
        "group_size": 4,
        "groups_per_batch": 2,
        "concurrency": 16,
        "seconds": seconds,
    }


def evaluation(task: str) -> dict[str, Any]:
    """The table that measures one of them at the end."""
    return {"tasks": [task], "instances": INSTANCES, "before": False}


def check(run_dir: Path, steady: str, failing: str, reasons: Sequence[str]) -> None:
    """Fail unless the run ended well, `steady` noticed nothing and `failing` came back.

    Args:
        reasons: words of which every lost rollout's reason holds one.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["laws"].values()) == {"held"}
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger).values())
        assert ledger.conservation("rl").closes
        ended = [s for s in ledger.sessions(stage="rl") if s.outcome is not Outcome.CANCELLED]
        assert len(ledger.batches("rl")) == UPDATES
    assert {s.outcome for s in ended if s.task == steady} == {Outcome.OK}
    hurt = [s for s in ended if s.task == failing]
    lost = [s for s in hurt if s.outcome is Outcome.ENV_FAILED]
    assert lost
    assert [s.reason for s in lost if not any(words in s.reason for words in reasons)] == []
    assert all(not s.rewards for s in lost)
    fell = max(s.dispatched_at for s in lost)
    assert any(s.outcome is Outcome.OK and s.dispatched_at > fell for s in hurt)  # it came back
    (measured,) = summary["evaluations"]
    assert (measured["task"], measured["n"]) == (failing, INSTANCES)
