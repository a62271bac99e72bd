"""A whole run one step off, measured beside training; and one killed meanwhile and resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import loop_run
from headrace.observe.runs import open_run
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.segments import segments
from headrace.rollout.types import DropReason, Outcome
from headrace.run import run_recipe
from small_runs import small_checkpoint

DEADLINE_S = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("loop") / "model")


@pytest.fixture(scope="module", params=["whole", pytest.param("killed", marks=pytest.mark.slow)])
def finished(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The folder of a finished run, and what was in it right after the kill, if there was one."""
    run_dir = tmp_path_factory.mktemp("loop-run") / "run"
    killed = request.param == "killed"
    facts: dict[str, Any] = {"dir": run_dir, "killed": killed, "done": set()}
    if killed:
        died = subprocess.run(
            [sys.executable, loop_run.__file__, str(checkpoint), str(run_dir)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "NO_COLOR": "1"},
            check=False,
        )
        assert died.returncode == -signal.SIGKILL, died.stdout + died.stderr
        with Ledger.resume(run_dir) as ledger:
            assert ledger.get_state("evaluate:rl")[0]["step"] == 1
            assert ledger.publications("rl")[-1].step >= 2
            sessions = ledger.sessions(stage="evaluation")
            facts["done"] = {s.id for s in sessions if s.outcome is Outcome.OK}
        assert len(facts["done"]) == loop_run.KILLED_AT
    recipe, task = loop_run.recipe_of(checkpoint), loop_run.Chat(resumed=killed)
    with pytest.MonkeyPatch.context() as patch, loop_run.scripted(task, patch.setattr):
        assert run_recipe(recipe, run_dir, resume=killed, no_isolation=True) == 0
    return facts


def test_an_evaluation_keeps_its_version_while_newer_ones_train(finished):
    with Ledger.resume(finished["dir"]) as ledger:
        measured = {e.label: e for e in ledger.evaluations()}
        assert next(iter(measured)) == "rl@1"
        for label, evaluation in measured.items():
            sessions = [
                ledger.session(s.id)
                for s in ledger.sessions(stage="evaluation")
                if s.purpose == f"eval:{label}"
            ]
            spans = [span for s in sessions for c in s.policy_calls for span in c.spans]
            assert len(spans) >= 2 * loop_run.INSTANCES
            assert {s.weight_version for s in spans} == {evaluation.detail["version"]}
            assert {s.newest_version or s.weight_version for s in spans} == {
                evaluation.detail["version"]
            }
            assert {s.engine_id for s in spans} == {"evaluation-0"}
            assert (evaluation.n, evaluation.success) == (loop_run.INSTANCES, 0.5)
        first = {
            s.id
            for s in ledger.sessions(stage="evaluation")
            if s.purpose == "eval:rl@1" and s.outcome is Outcome.OK
        }
        assert finished["done"] <= first
        assert len(first) == loop_run.INSTANCES, "what was done is not done again"
        # The first one's second turns waited for an update: training went on beside it.
        first_end = max(
            s.finished_at or 0.0 for s in ledger.sessions(stage="evaluation") if s.id in first
        )
        newer = [
            p for p in ledger.publications("rl") if p.version > measured["rl@1"].detail["version"]
        ]
        assert newer[0].published_at < first_end
        kept = ledger.conservation("evaluation")
        assert kept.trained == 0
        assert kept.dropped.keys() <= {DropReason.EVALUATION, DropReason.CANCELLED}


def test_a_batch_invariant_trainer_finds_the_engines_logprobs_to_the_bit(finished):
    lines = (finished["dir"] / "metrics.jsonl").read_text().splitlines()
    # Where the batch was sampled by the very weights that train, as the first one was.
    found = [json.loads(line)["metrics"].get("mismatch_max_abs") for line in lines]
    assert {gap for gap in found if gap is not None} == {0.0}


def test_one_step_off_trains_one_version_behind_over_a_whole_run(finished):
    with Ledger.resume(finished["dir"]) as ledger:
        assert all(finding.held for finding in audit(ledger, derive=segments).values())
        assert DropReason.STALE not in ledger.drop_counts("rl")
        batches = ledger.batches("rl")
        found = []
        for batch in batches:
            versions = {
                v
                for member in batch.members
                for call in ledger.session(member.session_id).policy_calls
                for span in call.spans
                for v in (span.weight_version, span.newest_version or span.weight_version)
            }
            found.append({batch.current_version - v for v in versions})
        # When a process begins, nothing may be ahead.
        for index, lags in enumerate(found):
            assert lags in (({0}, {1}) if finished["killed"] else ({0},) if index == 0 else ({1},))
        assert {b.tau for b in batches} == {1}


def test_patience_ends_the_run_and_its_best_weights_are_the_result(finished):
    run_dir = finished["dir"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["laws"].values()) == {"held"}
    (stage,) = summary["stages"]
    result = stage["result"]
    assert result["ended_by"] == "patience"
    assert 3 <= result["updates"] < 12
    assert result["best"] == {
        "step": 1,
        "score": 0.5,
        "path": str(run_dir / "checkpoints" / "rl-best"),
    }
    with Ledger.resume(run_dir) as ledger:
        assert result["trained_tokens"] == ledger.conservation("rl").trained > 0
    best, target = (
        load_file(run_dir / "checkpoints" / name / "model.safetensors")
        for name in ("rl-best", "rl")
    )
    assert all((best[name] == target[name]).all() for name in best)
    assert not (run_dir / "checkpoints" / "rl" / "trainer.pt").exists()
    assert len(list((run_dir / "weights").iterdir())) == 2, "pins are let go"
    with open_run(run_dir) as run:
        labels = [e["after"] for e in run.evaluations]
        moments = run.measured_at()
        assert [moments[label] for label in labels] == sorted(moments[label] for label in labels)
        assert labels[0] == "rl@1"
        assert len(labels) >= 3
        held = [row.metrics["held.batch_s"] for row in run.rows_of("rl")]
        assert all(value >= 0.0 for value in held)
        assert len(run.rows_of("evaluate rl chat")) == len(labels)
