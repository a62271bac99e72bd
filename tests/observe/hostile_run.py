"""A run whose texts try to break out of the page, with forks, failures and a second task."""

import random
from pathlib import Path

from synthetic_run import START, RunMaker

from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import Call, FinishReason, Outcome, ParseState, Span

SCRIPT = '<img src=x onerror="window.broken=1"><script>window.broken=1</script></script>'
FORKED = "fork-1"


def add_hostile_sessions(path: Path, maker: RunMaker) -> None:
    """Add rollouts of a task "maze" to a finished run: failures, forks, hostile texts."""
    rng = random.Random(5)
    ledger = Ledger.resume(path, clock=lambda: START + 330.0)
    instance = {"task": "maze", "seed": 1, "family": SCRIPT, "level": 1}
    names = [FORKED, *(f"maze-{i}" for i in range(5))]
    ledger.dispatch("rl-maze", "train", "maze-group", "maze", instance, names)
    prompt = tuple(maker.tokenizer.encode(f"<|user|>{SCRIPT} näive ☃<|assistant|>").ids)

    def call(session: str, index: int, parent: str | None, fork: str | None) -> Call:
        said = f"step {index} {SCRIPT}\n\x1b[31m\u202e end"
        ids = tuple(maker.tokenizer.encode(said).ids)
        half = len(ids) // 2
        return Call(
            id=f"{session}/{index}",
            session_id=session,
            index=index,
            parent_id=parent,
            fork_reason=fork,
            idempotency_key=None,
            messages=[{"role": "user", "content": f"{SCRIPT} näive ☃"}],
            tools=[],
            renderer_id="compact",
            prompt_delta=prompt if parent is None else prompt[:3],
            spans=tuple(
                Span(part, tuple(-rng.expovariate(1) for _ in part), version, "engine-0")
                for version, part in ((10, ids[:half]), (11, ids[half:]))
            ),
            finish_reason=FinishReason.STOP,
            parse_state=ParseState.MALFORMED if index == 2 else ParseState.OK,
            response={"role": "assistant", "content": said},
            started_at=1.0,
            finished_at=3.5,
        )

    for index, parent, fork in (
        (0, None, None),
        (1, "fork-1/0", None),
        (2, "fork-1/1", None),
        (3, "fork-1/0", "history_rewritten"),
        (4, None, "system_changed"),
        (5, "fork-1/3", None),
    ):
        ledger.record_call(call(FORKED, index, parent, fork))
    ledger.finish(FORKED, Outcome.OK, {"reward": 0.5, "path": 2.0}, f"half way {SCRIPT}")
    for i in range(5):
        ledger.record_call(call(f"maze-{i}", 0, None, None))
    for i in range(3):
        ledger.finish(f"maze-{i}", Outcome.ENV_FAILED, {}, f"sandbox died {SCRIPT}")
    ledger.finish("maze-3", Outcome.TIMEOUT, {"reward": 0.0}, "60 s were over")
    ledger.close()  # maze-4 stays open, as after a crash
