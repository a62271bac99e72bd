"""Whole runs through the command line: the smoke recipe, and runs that are killed and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from headrace.rollout.choosing.curriculum import choices_key, difficulty_key
from headrace.rollout.choosing.difficulty import DifficultyState
from headrace.rollout.choosing.sharing import cursor_key
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.types import Outcome
from headrace.sandbox import probe

DEADLINE_S = 600.0

pytestmark = pytest.mark.skipif(
    "ok" not in (probe()["bwrap"], probe()["unshare"]), reason="no sandbox works on this machine"
)

RESUMED = """
name = "resumed"
[model]
path = "{checkpoint}"
[engine]
max_running = 16
max_context = 384
[tasks.terminal]
families = ["delete_extension", "set_mode", "count_files"]
level_weights = [1.0, 0.0, 0.0]
[evaluation]
instances = 6
before = false
[[stages]]
kind = "agentic_rl"
name = "rl"
updates = {updates}
group_size = 4
groups_per_batch = 1
concurrency = 8
publish_every = 2
learning_rate = 1e-4
"""


def headrace(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    """A finished run of the smoke recipe."""
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    # As many steps and updates on a slow machine as on a fast one.
    limits = [f"--set=stages.{stage}.seconds={DEADLINE_S:g}" for stage in ("warmup", "rl")]
    finish(headrace("run", "quickstart-smoke", "--run-dir", str(run_dir), *limits))
    return run_dir


def test_the_smoke_recipe_leaves_a_complete_record(smoke):
    summary = json.loads((smoke / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [s["name"] for s in summary["stages"]] == ["warmup", "rl"]
    assert [e["after"] for e in summary["evaluations"]] == ["warmup", "rl"]
    assert set(summary["laws"].values()) == {"held"}
    assert (smoke / "checkpoints" / "rl" / "model.safetensors").is_file()
    assert "<svg" in (smoke / "report.html").read_text()
    rows = [json.loads(line) for line in (smoke / "metrics.jsonl").read_text().splitlines()]
    updates = [row["metrics"] for row in rows if row["stage"] == "rl"]
    assert updates
    fresh = [m["mismatch_max_abs"] for m in updates if "mismatch_max_abs" in m]
    assert all(value < 1e-4 for value in fresh)
    assert all(0 <= row["signal_share"] <= 1 for row in updates if "signal_share" in row)
    assert 0 < updates[-1]["difficulty.terminal.level1.pass_rate"] < 1
    with Ledger.resume(smoke) as ledger:
        assert ledger.conservation("rl").closes
        assert ledger.conservation("rl").trained > 0
        trained = next(s for s in ledger.sessions(stage="rl") if s.step is not None)
    shown = finish(headrace("show", str(smoke), "trajectory", trained.id))
    assert "bash" in shown


def progress(run_dir: Path) -> int:
    """Updates the run has reported."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum('"stage":"rl"' in line.replace(" ", "") for line in lines)


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_resumes_without_loss(smoke, tmp_path, kills):
    recipe = tmp_path / "resumed.toml"
    # Enough of them that no kill comes too late.
    recipe.write_text(
        RESUMED.format(checkpoint=smoke / "checkpoints" / "warmup", updates=4 + 4 * kills)
    )
    run_dir = tmp_path / "run"
    rng = random.Random(7)
    finished_before: set[str] = set()
    arguments = ["run", str(recipe), "--run-dir", str(run_dir)]
    for kill in range(kills):
        process = headrace(*arguments)
        target = progress(run_dir) + 2
        deadline = time.monotonic() + DEADLINE_S
        while progress(run_dir) < target and process.poll() is None:
            assert time.monotonic() < deadline, "the run made no progress"
            time.sleep(0.02)  # another process's file: there is nothing to wait on
        time.sleep(rng.random() * 0.5)  # the random moment
        assert process.poll() is None, f"kill {kill} came too late"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        with Ledger.resume(run_dir) as ledger:
            finished_before |= {
                s.id for s in ledger.sessions(stage="rl") if s.outcome is Outcome.OK
            }
        arguments = ["run", "--resume", str(run_dir)]
    finish(headrace(*arguments))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["laws"].values()) == {"held"}
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger).values())
        batches = ledger.batches("rl")
        assert [b.step for b in batches] == list(range(1, len(batches) + 1))
        members = [m.session_id for b in batches for m in b.members]
        assert len(members) == len(set(members))
        sessions = {s.id: s for s in ledger.sessions(stage="rl")}
        assert finished_before <= set(sessions)
        for name in finished_before:
            found = sessions[name]
            assert (found.step is not None) != (found.drop_reason is not None), found
        assert ledger.conservation("rl").closes


CURRICULUM = """
[stages.curriculum]
start_level = 1
promote_at = 0.05
explore = 0.2
repeat_share = 0.2
repeat_after = 4
"""


@pytest.mark.slow
def test_a_curriculum_goes_on_after_a_kill_with_the_same_estimates(smoke, tmp_path):
    text = RESUMED.format(checkpoint=smoke / "checkpoints" / "warmup", updates=6) + CURRICULUM
    text = text.replace("[1.0, 0.0, 0.0]", "[0.5, 0.3, 0.2]")
    recipe = tmp_path / "curriculum.toml"
    recipe.write_text(text)
    run_dir = tmp_path / "run"
    process = headrace("run", str(recipe), "--run-dir", str(run_dir))
    deadline = time.monotonic() + DEADLINE_S
    while progress(run_dir) < 3 and process.poll() is None:
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    with Ledger.resume(run_dir) as ledger:
        before = kept(ledger)
        # What is known is what the decided groups tell, no more and no less.
        complete = Counter(s.group_id for s in ledger.sessions(stage="rl") if s.reward is not None)
        groups = sum(kind.groups for kind in before.kinds.values())
        assert 0 < groups <= len(complete)
        choices = ledger.get_state(choices_key("rl"))["choices"]["terminal"]
        assert choices == ledger.get_state(cursor_key("rl"))["terminal"][1]
        held_out = ledger.get_state("held_out")
    finish(headrace("run", "--resume", str(run_dir)))
    with Ledger.resume(run_dir) as ledger:
        after = kept(ledger)
        assert after.decided["terminal"] > before.decided["terminal"]
        for key, kind in before.kinds.items():
            assert after.kinds[key].groups >= kind.groups
        assert ledger.get_state(choices_key("rl"))["choices"]["terminal"] > choices
        assert ledger.get_state("held_out") == held_out
        assert all(finding.held for finding in audit(ledger).values())
        assert len(ledger.batches("rl")) == 6


def kept(ledger: Ledger) -> DifficultyState:
    """What a run's ledger knows of difficulty."""
    return msgspec.convert(ledger.get_state(difficulty_key("rl")), DifficultyState)
