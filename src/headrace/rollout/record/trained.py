"""What the surviving weights of a stage were trained on, so that two runs can be compared.

Names of sessions, weight versions and times differ between a run that was interrupted and one that
was not; the problem, the tokens, the advantage and the update do not, if the run is deterministic.
"""

import hashlib
import struct
from collections import Counter

from headrace.rollout.record.evidence import encode_json
from headrace.rollout.record.reading import LedgerReader


def trained_trajectories(ledger: LedgerReader, stage: str) -> Counter[str]:
    """The multiset of trajectories in the surviving weights of a stage.

    Returns:
        How often each occurs, by "STEP/HASH", where the hash is of the instance, the exact bits of
        the advantage, the multiplicity, and every trained call's prompt and sampled ids.
    """
    found: Counter[str] = Counter()
    with ledger.snapshot():
        for batch in ledger.batches(stage):
            if batch.step is None:
                continue
            for member in batch.members:
                session = ledger.trainable(member.session_id)
                calls = [c for c in session.policy_calls if c.id not in member.excluded]
                parts = [
                    encode_json(dict(sorted(session.instance.items()))),
                    struct.pack("<dq", member.advantage, member.multiplicity),
                    *(encode_json([call.prompt_delta, call.output_ids]) for call in calls),
                ]
                digest = hashlib.blake2b(digest_size=16)
                for part in parts:
                    digest.update(len(part).to_bytes(8, "little") + part)
                found[f"{batch.step}/{digest.hexdigest()}"] += 1
    return found


def trained_digest(ledger: LedgerReader, stage: str) -> str:
    """One short text that is equal exactly when `trained_trajectories` is; "" when it is empty."""
    found = trained_trajectories(ledger, stage)
    if not found:
        return ""
    text = "\n".join(f"{name} {count}" for name, count in sorted(found.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
