"""What must hold of the calls that a gateway recorded, whatever its client did: laws L1 to L4.

The engine is scripted, remembers what it read and wrote, and gives every sampled token a logprob of
its own, so that each can be followed into the segments that train it.
"""

from collections import Counter

from scripted import ScriptedEngine

from headrace.rollout.segments import accounting, segments
from headrace.rollout.types import Call, Outcome, Session


def check_laws(calls: tuple[Call, ...], engine: ScriptedEngine) -> None:
    """Every call's tokens are the engine's, and every sampled token trains exactly once.

    Args:
        calls: all of the one session that the engine served.
        engine: what answered them.
    """
    by_id = {call.id: call for call in calls}
    assert [call.index for call in calls] == list(range(len(calls)))

    def path(call: Call) -> tuple[int, ...]:
        return prompt(call) + call.output_ids

    def prompt(call: Call) -> tuple[int, ...]:
        held = path(by_id[call.parent_id]) if call.parent_id else ()
        return held + call.prompt_delta

    # L1: what the record says is what the engine read and wrote, call by call.
    recorded = Counter((prompt(call), call.output_ids) for call in calls)
    assert recorded == Counter(engine.log)

    session = Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=calls)
    derived = segments(session)
    read_or_written = {prompt + output for prompt, output in engine.log}
    sampled = {p: span for c in calls for span in c.spans for p in span.logprobs}
    trained: Counter[float] = Counter()
    for segment in derived:
        assert segment.ids in read_or_written
        rows = zip(segment.ids, segment.train_mask, segment.logprobs, segment.versions, strict=True)
        for token, mask, logprob, version in rows:
            if mask:
                trained[logprob] += 1
            if logprob:  # L3 and L4: the very token, at its own logprob and version
                span = sampled[logprob]
                assert token == span.ids[span.logprobs.index(logprob)]
                assert version == span.weight_version
            else:
                assert not mask
                assert version == -1
    # L2: every sampled token trains exactly once.
    assert trained == Counter(dict.fromkeys(sampled, 1))
    account = accounting(session)
    assert account.sampled == account.trainable == len(sampled)
    for limit in (0, 40, 80):
        account = accounting(session, max_tokens=limit)
        assert account.sampled == account.trainable + sum(account.dropped.values())
        kept = segments(session, max_tokens=limit)
        assert all(len(segment.ids) <= limit for segment in kept)
        assert sum(sum(segment.train_mask) for segment in kept) == account.trainable
