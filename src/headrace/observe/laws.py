"""The invariants a run is audited for, in one sentence each, and what the audit found."""

from collections.abc import Mapping
from typing import Any

LAWS = {
    "L1": "A sampled token is never re-tokenized.",
    "L2": "Every sampled token trains at most once; those that do not have a counted reason.",
    "L3": "Loss only on sampled tokens.",
    "L4": "Every sampled token carries a log-probability and a weight version.",
    "L5": "Ids, masks, log-probabilities and versions have one length.",
    "L6": "An environment failure is never a reward of 0.",
    "L7": "Staleness is bounded when the batch is cut.",
    "L8": "Cached keys and values never outlive their weights.",
    "L9": "Nothing finished is lost in a crash, nothing trains twice.",
    "L10": "Every wait has a deadline, every queue a bound.",
    "L11": "Train and rollout log-probabilities are always compared.",
    "L12": "Same seed in deterministic mode: same tokens, same loss.",
    "L13": "Parsers are total.",
    "L14": "Loss does not depend on batching.",
}


def laws_of(summary: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    """(law, held, detail) from the summary, in the laws' order."""
    found: list[tuple[str, bool, str]] = []
    for law, verdict in (summary.get("laws") or {}).items():
        if isinstance(verdict, dict):
            held, detail = bool(verdict.get("held")), str(verdict.get("detail", ""))
        elif isinstance(verdict, list | tuple) and verdict:
            held, detail = bool(verdict[0]), " ".join(str(part) for part in verdict[1:])
        else:
            word, _, detail = str(verdict).partition(":")
            held, detail = word.strip() == "held", detail.strip()
        found.append((str(law), held, detail))
    return sorted(found, key=lambda item: (len(item[0]), item[0]))
