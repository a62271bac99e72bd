"""What is kept of a finished evaluation by rollouts, during a stage or between two."""

from collections.abc import Mapping
from typing import Any

from headrace.observe.statistics import wilson
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import Evaluation


def keep_evaluation(
    ledger: Ledger, label: str, stage: str, result: Mapping[str, Any]
) -> dict[str, Any]:
    """Put what `evaluate` returned into the ledger.

    Args:
        ledger: of the run.
        label: of the evaluation.
        stage: whose model was measured.
        result: see `evaluate`; further keys are kept.

    Returns:
        The same as summary.json has it: with "after", the label, and its 95% interval.
    """
    low, high = wilson(result["ok"], result["n"])
    ledger.put_evaluation(
        Evaluation(
            label=label,
            task=result["task"],
            stage=stage,
            n=result["n"],
            success=result["success"],
            low=low,
            high=high,
            detail=dict(result),
        )
    )
    return {"after": label, "low": low, "high": high, **result}
