"""What the tripwires of a stage had seen before its process ended, from the ledger.

Every rollout that finished is in the ledger with its calls, so nothing has to be kept beside it.
Only answers are read: prompts, token ids and logprobs stay on disk. Who trips over it is not known
here.
"""

from headrace.errors import UserError
from headrace.rollout.failures.tripwires import Seen, seen_in
from headrace.rollout.record.evidence import decode_reply
from headrace.rollout.record.reading import SESSION_SQL, LedgerReader, session_summary
from headrace.rollout.record.rows import TRAIN
from headrace.rollout.types import Outcome


def finished_rollouts(ledger: LedgerReader, stage: str, most: int) -> list[Seen]:
    """The newest training rollouts of a stage that ended by themselves, oldest first.

    Those that a crash or the end of a stage cut off have shown nothing that counts.

    Args:
        most: how many, at most.

    Raises:
        UserError: stored bytes are damaged.
    """
    rows = ledger.query(
        f"{SESSION_SQL} WHERE s.key IN (SELECT key FROM sessions WHERE stage = ? AND purpose = ? "
        "AND outcome IS NOT NULL AND outcome != ? ORDER BY finished_at DESC, key DESC LIMIT ?) "
        "ORDER BY s.finished_at, s.key",
        (stage, TRAIN, Outcome.CANCELLED, most),
    )
    found = []
    for row in rows:
        summary = session_summary(row)
        responses, sampled = [], 0
        for call, tokens, body in ledger.query(
            "SELECT id, tokens, body FROM calls WHERE session = ? AND late = 0 ORDER BY idx",
            (row[0],),
        ):
            try:
                model, response = decode_reply(body)
            except ValueError as error:
                raise UserError(
                    f"the ledger is damaged at call {call} ({error}); restore it from a copy"
                ) from error
            if model is None:
                responses.append(response)
                sampled += tokens
        found.append(seen_in(summary, summary.detail, responses=responses, tokens=sampled))
    return found
