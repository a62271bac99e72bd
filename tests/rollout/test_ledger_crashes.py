"""Law L9 by random histories: crash anywhere, nothing finished is lost, nothing trains twice."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_writer import STAGE, SimulatedRun, act_at_random

from headrace.rollout.record.audit import audit
from headrace.rollout.record.rows import TRAIN
from headrace.rollout.types import Call, DropReason, Outcome

OUTCOMES = st.sampled_from([*Outcome, Outcome.OK, Outcome.OK, Outcome.OK])


def sampled(calls) -> int:
    return sum(len(call.output_ids) for call in calls)


class CrashingRun(RuleBasedStateMachine):
    """What is kept beside the run is what its ledger acknowledged; it must never take that back."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-ledger-"))
        self.lives = 0
        self.run = self._start()
        self.calls: dict[str, list[Call]] = {}
        self.late: set[str] = set()
        self.excluded: set[str] = set()
        self.ended: dict[str, tuple[Outcome, float | None]] = {}

    def _start(self) -> SimulatedRun:
        run_dir = self.folder / f"life-{self.lives}"
        run_dir.mkdir(exist_ok=True)
        return SimulatedRun(run_dir)

    def teardown(self) -> None:
        try:
            self.check()
            self.run.drain()
            self.check()
            account = self.run.ledger.conservation(STAGE)
            assert account.pending == 0
            self.audit()
        finally:
            self.run.ledger.close()
            shutil.rmtree(self.folder)

    # -- acting

    @rule(size=st.integers(1, 4))
    def dispatch(self, size):
        self.calls |= {name: [] for name in self.run.dispatch(size)}

    @rule(behind=st.integers(0, 2), cut=st.booleans(), train=st.booleans())
    def play_group(self, behind, cut, train):
        """A group without mishap, so that histories get somewhere."""
        names = self.run.dispatch(2)
        for reward, name in enumerate(names):
            self.calls[name] = [self.run.record(name, behind=behind, tokens=2, fork=False)]
            self.run.finish(name, Outcome.OK, float(reward))
            self.ended[name] = (Outcome.OK, float(reward))
        self.decide()
        if cut:
            self.cut(4, exclude=False)
        if train and self.run.uncommitted:
            self.run.train()

    @rule(size=st.integers(1, 2))
    def dispatch_evaluation(self, size):
        self.calls |= {name: [] for name in self.run.dispatch(size, "eval:x")}

    @precondition(lambda self: self.run.sampling)
    @rule(data=st.data(), behind=st.integers(0, 2), tokens=st.integers(1, 3), fork=st.booleans())
    def record(self, data, behind, tokens, fork):
        name = data.draw(st.sampled_from(sorted(self.run.sampling)))
        call = self.run.record(name, behind=behind, tokens=tokens, fork=fork)
        self.calls.setdefault(name, []).append(call)

    @precondition(lambda self: self.run.sampling)
    @rule(data=st.data(), outcomes=st.lists(OUTCOMES, min_size=1, max_size=4), late=st.booleans())
    def finish(self, data, outcomes, late):
        for outcome in outcomes:
            if not self.run.sampling:
                return
            name = data.draw(st.sampled_from(sorted(self.run.sampling)))
            reward = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            calls = self.run.sampling[name]
            self.run.finish(name, outcome, reward)
            self.ended[name] = (outcome, reward if outcome.scored else None)
            if late:
                self.run.sampling[name] = calls
                call = self.run.record(name, behind=0, tokens=1, fork=False)
                del self.run.sampling[name]
                self.calls.setdefault(name, []).append(call)
                self.late.add(call.id)

    @precondition(lambda self: self.run.waiting)
    @rule()
    def decide_all(self):
        self.decide()

    def decide(self):
        while self.run.waiting:
            self.run.decide()

    @precondition(lambda self: self.run.ready)
    @rule(size=st.integers(1, 4), exclude=st.booleans())
    def cut_some(self, size, exclude):
        self.cut(size, exclude=exclude)

    def cut(self, size, *, exclude):
        batch = self.run.cut(size, exclude=exclude)
        if batch is not None:
            self.excluded |= {call for member in batch.members for call in member.excluded}

    @precondition(lambda self: self.run.uncommitted)
    @rule(checkpoint=st.booleans())
    def train(self, checkpoint):
        self.run.train()
        if checkpoint:
            self.run.checkpoint()

    # -- crashing

    @rule(seed=st.integers(0, 9), inside=st.booleans())
    def crash(self, seed, inside):
        """The disk as it is now, possibly inside a transaction, is all that the next life gets."""
        former = self.run
        self.lives += 1
        target = self.folder / f"life-{self.lives}"
        with contextlib.suppress(_Crash):
            if inside:
                with former.ledger.transaction():
                    rng = random.Random(seed)
                    for _ in range(seed + 1):
                        with contextlib.suppress(ValueError):
                            act_at_random(former, rng)
                    self._copy(former.run_dir, target)
                    raise _Crash
            else:
                self._copy(former.run_dir, target)
        before = {m.session_id for b in former.uncommitted for m in b.members}
        former.ledger.close()
        self.run = self._start()
        recovery = self.run.recovery
        replayed = {m.session_id for batch in recovery.replay for m in batch.members}
        if not inside:
            assert before <= replayed, "a batch that was cut is neither trained nor replayed"
        lost = Counter(name.split("/")[0] for name in recovery.cancelled)
        assert lost == {group.group_id: group.missing for group in recovery.incomplete}
        for name in recovery.cancelled:
            assert name not in self.ended
            self.ended[name] = (Outcome.CANCELLED, None)
        self.calls |= {name: [] for name in self.run.sampling}

    def _copy(self, source: Path, target: Path) -> None:
        target.mkdir()
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)
        # Checkpoints keep their path in the ledger, so their files stay where they are.

    # -- checking

    @invariant()
    def check(self):
        ledger, weights = self.run.ledger, self.run.weights
        assert len(set(weights)) == len(weights), "trained twice in the surviving weights"
        account = ledger.conservation(STAGE)
        assert account.closes, account
        assert account.sampled == sum(map(sampled, self.calls.values()))
        pending_batches = {m.session_id for b in self.run.uncommitted for m in b.members}
        ready = {m.session_id for m in self.run.ready}
        summaries = {summary.id: summary for summary in ledger.sessions()}
        assert set(summaries) == set(self.calls)
        for name, (outcome, reward) in self.ended.items():
            summary = summaries[name]
            assert (summary.outcome, summary.reward) == (outcome, reward)
            places = [
                name in weights,
                summary.drop_reason is not None,
                name in pending_batches,
                name in ready,
                summary.group_id in self.run.waiting
                or any(other.startswith(summary.group_id + "/") for other in self.run.sampling),
            ]
            if summary.drop_reason is not None:
                places[4] = False
            assert sum(places) == 1, (name, places)
            assert (summary.step is not None) == (name in weights)
        # Calls that were late or too long are the only tokens of a trained session that did not.
        left_out = self.excluded | self.late
        assert account.trained == sum(
            sampled(c for c in self.run.ledger.session(name).calls if c.id not in left_out)
            for name in weights
        )
        if DropReason.EVALUATION in account.dropped:
            assert account.dropped[DropReason.EVALUATION] == sum(
                s.tokens for s in summaries.values() if s.purpose != TRAIN
            )

    def audit(self):
        for law, finding in audit(self.run.ledger).items():
            assert finding.held, (law, finding.detail)
        for name, calls in self.calls.items():
            assert list(self.run.ledger.session(name).calls) == calls


class _Crash(Exception):
    pass


TestCrashingRun = CrashingRun.TestCase
TestCrashingRun.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
)


def test_sigkill_at_random_moments(tmp_path):
    """A real process, really killed: what it said is durable is there, and the laws hold."""
    rng = random.Random(20)
    finished: dict[str, str] = {}
    recorded: set[str] = set()
    checkpoint = 0
    for life in range(5):
        lines = _run_and_kill(tmp_path, seed=life, after=rng.randrange(1, 800))
        for line in lines:
            kind, *names = line.split()
            if kind == "finished":
                finished[names[0]] = names[1]
            elif kind == "call":
                recorded.add(names[0])
            elif kind == "checkpoint":
                checkpoint = int(names[0])
        run = SimulatedRun(tmp_path)
        try:
            summaries = {summary.id: summary for summary in run.ledger.sessions()}
            for name, outcome in finished.items():
                assert summaries[name].outcome == outcome
            calls = {c.id for name in summaries for c in run.ledger.session(name).calls}
            assert recorded <= calls
            assert run.recovery.step >= checkpoint
            assert len(set(run.weights)) == len(run.weights)
            assert {s.id for s in summaries.values() if s.step is not None} == set(run.weights)
            for law, finding in audit(run.ledger).items():
                assert finding.held, (life, law, finding.detail)
        finally:
            run.ledger.close()
    assert len(finished) > 50
    assert checkpoint > 0
    run = SimulatedRun(tmp_path)
    try:
        run.drain()
        assert len(set(run.weights)) == len(run.weights)
        account = run.ledger.conservation(STAGE)
        assert account.closes
        assert account.pending == 0
        assert all(finding.held for finding in audit(run.ledger).values())
    finally:
        run.ledger.close()


def _run_and_kill(run_dir: Path, *, seed: int, after: int) -> list[str]:
    """Start the writer, SIGKILL it once it has said `after` lines; every line it got out."""
    writer = Path(__file__).with_name("ledger_writer.py")
    process = subprocess.Popen(
        [sys.executable, str(writer), str(run_dir), str(seed)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after)]
        process.kill()
        rest = process.stdout.read().split("\n")
        rest.pop()  # it may be cut in the middle
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
    assert process.returncode == -9, "the writer ended by itself"
    return [line.strip() for line in [*lines, *rest] if line.strip()]


def test_a_checkpoint_that_cannot_be_loaded_is_passed_over(tmp_path):
    run = SimulatedRun(tmp_path)
    for _ in range(2):
        names = run.dispatch(2)
        for reward, name in enumerate(names):
            run.record(name, behind=0, tokens=2, fork=False)
            run.finish(name, Outcome.OK, float(reward))
        run.decide()
        run.cut(2)
        run.train()
        assert run.checkpoint()
    weights = list(run.weights)
    run.ledger.close()
    newest = tmp_path / "checkpoint-2.json"
    assert json.loads(newest.read_text())["weights"] == weights
    newest.unlink()

    run = SimulatedRun(tmp_path)
    assert run.recovery.step == 1
    assert run.weights == weights[:2]
    assert [[m.session_id for m in b.members] for b in run.recovery.replay] == [weights[2:]]
    run.drain()
    assert run.weights == weights
    run.ledger.close()
