"""A run without models: it drives a ledger as the orchestrator and the trainer do.

Its "weights" are the list of sessions trained into them, kept in memory and written out only by
checkpoints, so that a crash takes them back exactly as it does with real weights. As a program
(`python ledger_writer.py RUN_DIR SEED`) it acts at random, says on stdout what is durable, and goes
on until it is killed.
"""

import json
import os
import random
import sys
from collections import deque
from pathlib import Path

from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import TRAIN, Batch, BatchMember
from headrace.rollout.staleness import is_stale
from headrace.rollout.types import Call, DropReason, FinishReason, Outcome, ParseState, Span

STAGE = "rl"
TAU = 1


def make_call(session_id, index, versions=(0,), *, parent=None, tokens=3, text="hi", **changes):
    """A call with `tokens` sampled tokens for each version in `versions`."""
    messages = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": text}]
    for i in range(index):
        messages += [{"role": "assistant", "content": f"c{i}"}, {"role": "tool", "content": "é\n"}]
    fields = {
        "id": f"{session_id}/{index}",
        "session_id": session_id,
        "index": index,
        "parent_id": parent,
        "fork_reason": None,
        "idempotency_key": None,
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": "bash"}}],
        "renderer_id": "compact",
        "prompt_delta": (5, 300, 70_000),
        "spans": tuple(Span((7,) * tokens, (-0.25,) * tokens, v, "engine-0") for v in versions),
        "finish_reason": FinishReason.STOP,
        "parse_state": ParseState.OK,
        "response": {"role": "assistant", "content": f"c{index}"},
        "started_at": 1.5,
        "finished_at": 2.25,
    }
    return Call(**(fields | changes))


def play(ledger, group, rewards, *, stage="rl", versions=(0,), tokens=3, decide=True):
    """A group from dispatch to decision: one call each; reward None is an environment failure."""
    names = [f"{group}.{i}" for i in range(len(rewards))]
    ledger.dispatch(stage, "train", group, "toy", {"seed": 1}, names)
    for name, reward in zip(names, rewards, strict=True):
        ledger.record_call(make_call(name, 0, versions, tokens=tokens))
        if reward is None:
            ledger.finish(name, Outcome.ENV_FAILED, reason="no disk")
        else:
            ledger.finish(name, Outcome.OK, {"reward": reward, "format": 1.0})
    if decide:
        ledger.decide_group(group, advantages(ledger.rollouts(group)))
    return names


def batch(index, names, *, version=0, tau=None, stage="rl", **excluded):
    members = tuple(
        BatchMember(name, -0.5 if name.endswith("0") else 0.5, 1, excluded.get("excluded", {}))
        for name in names
    )
    return Batch(stage, index, version, tau, members)


class SimulatedRun:
    """One process of a run, from its start (fresh or recovered) to its end (orderly or not)."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        exists = (run_dir / "ledger.sqlite").exists()
        self.ledger = Ledger.resume(run_dir) if exists else Ledger.create(run_dir)
        self.weights: list[str] = []
        self.step = 0
        self.sampling: dict[str, list[Call]] = {}
        self.waiting: deque[str] = deque()
        self.ready: deque[BatchMember] = deque()
        self.uncommitted: deque[Batch] = deque()
        self.ledger.stage_started(STAGE)
        self.recovery = self.ledger.recover(STAGE, usable=os.path.exists)
        if self.recovery.checkpoint is not None:
            saved = json.loads(Path(self.recovery.checkpoint).read_text())
            self.weights, self.step = saved["weights"], saved["step"]
        assert self.step == self.recovery.step
        assert self.recovery.version in (None, self.version)
        if self.recovery.version is None:
            self.ledger.publish(STAGE, self.version, self.step, "weights")
        self.next_batch = self.recovery.next_batch
        self.uncommitted.extend(self.recovery.replay)
        self.waiting.extend(group.group_id for group in self.recovery.undecided)
        for group in self.recovery.ready:
            self._make_ready(group.rollouts, set(group.pending))
        for group in self.recovery.incomplete:
            fresh = [f"{group.group_id}/{self._serial()}" for _ in range(group.missing)]
            self.ledger.dispatch(
                group.stage, group.purpose, group.group_id, group.task, group.instance, fresh
            )
            self.sampling |= {name: [] for name in fresh}

    @property
    def version(self) -> int:
        return self.step // 2

    def _serial(self) -> int:
        serial = self.ledger.get_state("serial", 0)
        self.ledger.put_state("serial", serial + 1)
        return serial

    def dispatch(self, size: int, purpose: str = TRAIN) -> list[str]:
        with self.ledger.transaction():
            number = self._serial()
            group = f"{'g' if purpose == TRAIN else 'e'}{number}"
            names = [f"{group}/{i}" for i in range(-size, 0)]
            self.ledger.dispatch(STAGE, purpose, group, "toy", {"seed": number}, names)
        self.sampling |= {name: [] for name in names}
        return names

    def record(self, session_id: str, *, behind: int, tokens: int, fork: bool) -> Call:
        calls = self.sampling[session_id]
        version = max(0, self.version - behind)
        call = make_call(
            session_id,
            len(calls),
            (version, self.version) if behind % 2 else (version,),
            parent=calls[-1].id if calls and not fork else None,
            tokens=tokens,
            fork_reason="history_rewritten" if calls and fork else None,
        )
        self.ledger.record_call(call)
        calls.append(call)
        return call

    def finish(self, session_id: str, outcome: Outcome, reward: float) -> str:
        """End a session; its group becomes decidable with its last member."""
        rewards = {"reward": reward} if outcome.scored else {}
        self.ledger.finish(session_id, outcome, rewards, "why", {"n": 1})
        del self.sampling[session_id]
        group = session_id.split("/")[0]
        others = any(name.split("/")[0] == group for name in self.sampling)
        if group.startswith("g") and not others:
            self.waiting.append(group)
        return group

    def decide(self) -> None:
        group = self.waiting.popleft()
        rollouts = self.ledger.rollouts(group)
        self.ledger.decide_group(group, advantages(rollouts))
        self._make_ready(rollouts, {r.session_id for r in rollouts})

    def _make_ready(self, rollouts: tuple[ScoredRollout, ...], pending: set[str]) -> None:
        for member in advantages(rollouts).members:
            if member.session_id in pending:
                self.ready.append(
                    BatchMember(member.session_id, member.advantage, member.multiplicity)
                )

    def cut(self, size: int, *, exclude: bool = False) -> Batch | None:
        members, dropped = [], []
        while self.ready and len(members) < size:
            member = self.ready.popleft()
            calls = self.ledger.trainable(member.session_id).calls
            versions = [span.weight_version for call in calls for span in call.spans]
            if is_stale(self.version, versions, TAU):
                dropped.append((member.session_id, DropReason.STALE))
                continue
            if exclude and len(calls) > 1:
                long = {calls[-1].id: DropReason.TOO_LONG}
                member = BatchMember(member.session_id, member.advantage, member.multiplicity, long)
            members.append(member)
        if not members:
            self.ledger.drop(dropped)
            return None
        batch = Batch(STAGE, self.next_batch, self.version, TAU, tuple(members))
        self.ledger.cut_batch(batch, dropped)
        self.next_batch += 1
        self.uncommitted.append(batch)
        return batch

    def train(self) -> Batch:
        batch = self.uncommitted.popleft()
        before = self.version
        self.weights.extend(member.session_id for member in batch.members)
        self.step += 1
        self.ledger.commit_batch(STAGE, batch.index, self.step)
        if self.version != before:
            self.ledger.publish(STAGE, self.version, self.step, "weights")
        return batch

    def checkpoint(self) -> bool:
        if self.step == self.recovery.step:
            return False
        path = self.run_dir / f"checkpoint-{self.step}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"weights": self.weights, "step": self.step}))
        part.replace(path)
        try:
            self.ledger.checkpointed(STAGE, self.step, path)
        except ValueError:  # there is one of this step already
            return False
        return True

    def drain(self) -> None:
        """Bring the stage to its end as a real one would."""
        for session_id in list(self.sampling):
            self.finish(session_id, Outcome.OK, 1.0)
        while self.waiting:
            self.decide()
        while self.cut(4):
            pass
        while self.uncommitted:
            self.train()
        self.checkpoint()
        self.ledger.stage_finished(STAGE, 1.0)


def act_at_random(run: SimulatedRun, rng: random.Random) -> str:
    """One random action; returns the line that says what is durable now."""
    action = rng.choice(["dispatch", "call", "call", "call", "finish", "finish", "decide", "cut"])
    if run.uncommitted and rng.random() < 0.15:
        return f"trained {run.train().index}"
    if run.step and rng.random() < 0.03 and run.checkpoint():
        return f"checkpoint {run.step}"
    if action == "decide" and run.waiting:
        run.decide()
    elif action == "cut" and len(run.ready) >= 4:
        run.cut(4, exclude=rng.random() < 0.3)
    elif action == "call" and run.sampling:
        session_id = rng.choice(list(run.sampling))
        call = run.record(
            session_id,
            behind=rng.randrange(3),
            tokens=rng.randrange(1, 4),
            fork=rng.random() < 0.2,
        )
        return f"call {call.id}"
    elif action == "finish" and run.sampling:
        session_id = rng.choice(list(run.sampling))
        outcome = rng.choice([*Outcome, Outcome.OK, Outcome.OK, Outcome.OK])
        run.finish(session_id, outcome, float(rng.randrange(2)))
        return f"finished {session_id} {outcome}"
    elif len(run.sampling) < 16:
        purpose = "eval:x" if rng.random() < 0.1 else TRAIN
        return f"dispatched {' '.join(run.dispatch(rng.randrange(1, 5), purpose))}"
    return "nothing"


def main() -> None:
    run_dir, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    run = SimulatedRun(run_dir)
    print("ready", flush=True)
    for _ in range(100_000):  # a bound, should nobody kill it
        print(act_at_random(run, rng), flush=True)


if __name__ == "__main__":
    main()
