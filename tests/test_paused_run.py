"""A whole run in which rollouts fail and one tampers: rules, counts, the pause, and going on."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import RunPaused
from headrace.recipe import Recipe
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.segments import segments
from headrace.rollout.types import Outcome
from headrace.run import run_recipe
from headrace.sandbox.types import SandboxError
from headrace.stages.tripping import StageTripwires
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from small_runs import ChatTask, ask, logged, small_checkpoint, small_recipe, use_tasks

TAMPERS, FAILS, SLOW = 21, 6, 3
"""Rollouts, by number: the one cheats, the sandbox of the other dies, the third takes too long."""


class Chat(ChatTask):
    """One turn; rewards alternate, so that there is signal."""

    def __init__(self) -> None:
        self.rollouts = 0

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        self.rollouts += 1
        number = self.rollouts
        await ask(endpoint, f"hello {number}", max_tokens=4)
        if number == FAILS:
            raise SandboxError("the sandbox server ended")
        if number == SLOW:
            return RolloutResult(Outcome.TIMEOUT, {"reward": 0.0}, "too slow")
        if number == TAMPERS:
            return RolloutResult(
                Outcome.OK,
                {"reward": 1.0},
                "tampering: looks into a process: 'cat /proc/1/environ'",
                failure=FailureReason.TAMPERING,
            )
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return small_recipe(
        small_checkpoint(tmp_path / "model"),
        {
            "kind": "agentic_rl",
            "name": "rl",
            "task": "chat",
            "updates": 8,
            "group_size": 4,
            "groups_per_batch": 2,
            "concurrency": 8,
            "evaluate": False,
            "failures": {
                "sandbox_died": "retry",
                "session_time": "penalise",
                "penalty": -0.5,
            },
        },
    )


@pytest.mark.slow
def test_tampering_pauses_a_run_until_somebody_has_looked(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    task = Chat()

    use_tasks(monkeypatch.setattr, {"chat": task})
    run_dir = tmp_path / "run"

    with pytest.raises(RunPaused, match="tripwire tampering in stage rl after update") as pause:
        run_recipe(recipe, run_dir, resume=False, no_isolation=True)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "paused"
    with Ledger.resume(run_dir) as ledger:
        (cheat,) = [s for s in ledger.sessions(stage="rl") if s.failure is FailureReason.TAMPERING]
        assert (cheat.outcome, cheat.reward) == (Outcome.AGENT_FAILED, -0.5)
        assert f"headrace show {run_dir} trajectory {cheat.id}" in str(pause.value)
        trained = [b for b in ledger.batches("rl") if b.step is not None]
        assert ledger.publications("rl")[-1].step == len(trained), "what was trained is saved"
    done = task.rollouts

    assert main(["run", "--resume", str(run_dir)]) == 2
    assert f"--resume {run_dir} --acknowledge tampering" in capsys.readouterr().err
    assert main(["run", "--resume", str(run_dir), "--acknowledge", "length_factor"]) == 2
    assert "is paused by tampering" in capsys.readouterr().err
    assert task.rollouts == done

    assert main(["run", "--resume", str(run_dir), "--acknowledge", "tampering"]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], set(summary["laws"].values())) == ("finished", {"held"})
    rows = logged(run_dir, "rl")
    assert sum(row.get("failed.sandbox_died", 0) for row in rows) == 1
    assert sum(row["retried"] for row in rows) == 1
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger, derive=segments).values())
        assert ledger.conservation("rl").closes
        counts = ledger.failure_counts("rl")
        assert counts[FailureReason.SANDBOX_DIED] == counts[FailureReason.SESSION_TIME] == 1
        sessions = list(ledger.sessions(stage="rl"))
        (slow,) = [s for s in sessions if s.failure is FailureReason.SESSION_TIME]
        (lost,) = [s for s in sessions if s.failure is FailureReason.SANDBOX_DIED]
        assert slow.reward == -0.5
        assert lost.reward is None
        members = [s for s in sessions if s.group_id == lost.group_id]
        assert len(members) == 5, "its place in the group was attempted again"
        assert len(ledger.rollouts(lost.group_id)) == 4
    assert main(["show", str(run_dir)]) == 0
    assert "sandbox_died" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_trips_on_what_its_first_part_saw(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, checked = Chat(), StageTripwires.check

    class Crashed(Exception):
        pass

    def crash(wires: StageTripwires, step: int) -> None:
        if wires.measures()["tampering"]:
            raise Crashed  # before anybody has looked
        checked(wires, step)

    use_tasks(monkeypatch.setattr, {"chat": task})
    monkeypatch.setattr(StageTripwires, "check", crash)
    with pytest.raises(Crashed):
        run_recipe(recipe, tmp_path / "run", resume=False, no_isolation=True)
    monkeypatch.setattr(StageTripwires, "check", checked)
    assert task.rollouts >= TAMPERS, "nothing that comes after cheats"

    with pytest.raises(RunPaused, match="tripwire tampering in stage rl after update"):
        run_recipe(recipe, tmp_path / "run", resume=True, no_isolation=True)
