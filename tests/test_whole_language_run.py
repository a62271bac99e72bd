"""Whole runs from raw text to a chat model, killed at random moments and on several ranks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

DEADLINE_S = 900.0
STAGES = ("base", "mid", "warmup", "adapt", "sft")
RECIPE = """
name = "tiny"
seed = 5
[model]
preset = "glm5-tiny"
[model.overrides]
indexer = "none"
hidden_size = 32
intermediate_size = 48
num_layers = 2
num_heads = 2
max_positions = 48
latent = {{q_rank = 16, kv_rank = 16, nope_dim = 8, rope_dim = 8, value_dim = 16}}
moe = {{num_experts = 4, intermediate_size = 16}}
mtp = {{depth = 2}}
[tokenizer]
vocab_size = 400
format = "glm-5"
corpus = "text"
[data.text]
source = "{text}"
held_out = 0.2
[data.needles]
shape = "retrieval"
count = 40
keys = [1, 1]
[cluster]
trainer_ranks = {ranks}
[sandbox]
kind = "bwrap"
[engine]
max_context = 640
[rollout]
max_tokens = 8
[measure]
corpus = "text"
text_bytes = 500
text_context = 32
retrieval_lengths = [96]
retrieval_keys = [1]
retrieval_examples = 2
format_examples = 2
[[stages]]
kind = "pretrain"
name = "base"
steps = 12
sequence = 48
batch_tokens = 192
checkpoint_every = 3
optimizer = "muon_split"
balance_weight = 1e-4
router_bias_rate = 1e-3
mix = {{text = 1.0}}
evaluate = false
[[stages]]
kind = "midtrain"
name = "mid"
steps = 8
batch_tokens = 192
checkpoint_every = 3
evaluate = false
[[stages.context]]
sequence = 64
share = 0.4
[[stages.context]]
sequence = 128
share = 0.6
rope_theta = 4e4
[[stages]]
kind = "dsa_warmup"
name = "warmup"
steps = 6
sequence = 64
batch_tokens = 192
checkpoint_every = 2
index_heads = 2
index_head_dim = 16
topk = 16
share_every = 2
evaluate = false
[[stages]]
kind = "dsa_adapt"
name = "adapt"
steps = 6
sequence = 64
batch_tokens = 192
checkpoint_every = 2
evaluate = false
[[stages]]
kind = "sft"
name = "sft"
steps = 6
batch_tokens = 600
checkpoint_every = 2
conversations = "{conversations}"
evaluate = {evaluate}
"""


class Folder:
    """A recipe, its data and private caches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "text").mkdir()
        for i in range(24):
            lines = [f"def f{i}_{j}(x):\n    return x + {i * j}  # naïve" for j in range(6)]
            (root / "text" / f"m{i}.py").write_text("\n".join(lines))
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"What is {i} plus {i}?"},
                    {"role": "assistant", "content": str(2 * i), "reasoning_content": "I add."},
                ]
            }
            for i in range(40)
        ]
        (root / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.environment = {
            **os.environ,
            "NO_COLOR": "1",
            # No sandbox can be found there, and none is needed.
            "PATH": str(Path(sys.executable).parent),
            "XDG_CACHE_HOME": str(root / "cache"),
            # Compiling the fast ops into a private cache would take longer than all of this.
            "HEADRACE_OPS": "reference",
        }

    def recipe(
        self, name: str, *, ranks: int = 1, measured: bool = False, stages: int = len(STAGES)
    ) -> str:
        """A file with the first `stages` of the recipe."""
        text = RECIPE.format(
            text=self.root / "text",
            conversations=self.root / "talk.jsonl",
            ranks=ranks,
            evaluate=str(measured).lower(),
        )
        tables = text.split("[[stages]]")[: stages + 1]
        file = self.root / f"{name}.toml"
        file.write_text("[[stages]]".join(tables))
        return str(file)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> str:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == 0, output
        return output

    def run(self, recipe: str, run_dir: Path) -> Path:
        self.finish(self.start(recipe, "--run-dir", str(run_dir)))
        return run_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def whole(folder: Folder) -> Path:
    """A run that nothing interrupted, measured at its end."""
    return folder.run(folder.recipe("whole", measured=True), folder.root / "whole")


def weights(run_dir: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / stage / "model.safetensors")


def losses(run_dir: Path, stage: str) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["metrics"]["loss"] for row in rows if row["stage"] == stage]


def leftovers(root: Path) -> list[Path]:
    """Drafts and resumable checkpoints that no one needs any more."""
    found = [p for p in root.rglob(".*") if p.name != ".cache"]
    return found + list(root.glob("training/*"))


def descendants(pid: int) -> list[int]:
    """Processes started by `pid`, and by those."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def ended(pid: int) -> bool:
    """Gone, or only waiting for someone to read its exit code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def wait_for(what: Callable[[], bool], why: str) -> None:
    """Other processes' files and ends give no signal to wait on."""
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL the controller; nothing of it may stay."""
    workers = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: all(map(ended, workers)), f"processes {workers} outlived their run")


def killed_and_resumed(
    folder: Folder, recipe: str, run_dir: Path, stages: tuple[str, ...], seed: int
) -> None:
    """A run that is killed once in each of `stages`, then resumed to its end."""
    rng = random.Random(seed)
    arguments = [recipe, "--run-dir", str(run_dir)]
    for stage in stages:
        process = folder.start(*arguments)
        moments = {
            "started": run_dir / "logs" / f"{stage}.log",
            "stepping": run_dir / "training" / stage,
            "saving": run_dir / "checkpoints" / stage,
        }
        moment = moments[rng.choice(list(moments))]
        wait_for(lambda m=moment, p=process: m.exists() or p.poll() is not None, "no progress")
        time.sleep(rng.random() * 0.3)  # the random moment
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[0]
            return  # the last stage's kill came too late: also a moment
        kill(process)
        arguments = ["--resume", str(run_dir)]
    folder.finish(folder.start(*arguments))


def assert_same(whole: Path, other: Path, stages: tuple[str, ...] = STAGES) -> None:
    for stage in stages:
        expected, found = weights(whole, stage), weights(other, stage)
        assert expected.keys() == found.keys()
        assert [n for n in expected if not torch.equal(expected[n], found[n])] == [], stage
    summary = json.loads((other / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [s["name"] for s in summary["stages"]] == list(stages)


def test_a_whole_recipe_leaves_a_complete_record(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [s["name"] for s in summary["stages"]] == list(STAGES)
    measured = {e["task"]: e for e in summary["evaluations"] if e["after"] == "sft"}
    assert measured.keys() == {"bits per byte", "retrieval, 1 key, 96 tokens", "chat format"}
    assert 0 < measured["bits per byte"]["value"] < 16
    assert measured["bits per byte"]["n"] <= 500
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for stage in STAGES:
        found = [row["metrics"] for row in rows if row["stage"] == stage]
        assert {"loss", "grad_norm", "tokens_per_s", "mfu", "memory_mb"} <= found[0].keys()
    assert "<svg" in (whole / "report.html").read_text()
    assert leftovers(whole) == []
    config = json.loads((whole / "checkpoints" / "sft" / "config.json").read_text())
    assert config["model_type"] == "glm_moe_dsa"
    assert (config["max_position_embeddings"], config["index_topk"]) == (128, 16)
    # Warm-up moves the indexer alone.
    before, after = weights(whole, "mid"), weights(whole, "warmup")
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert all("indexer" in n for n in after.keys() - before.keys())


def test_killed_and_resumed_equals_uninterrupted_to_the_bit(folder, whole):
    run_dir = folder.root / "broken"
    recipe = folder.recipe("broken", stages=2)
    killed_and_resumed(folder, recipe, run_dir, ("mid",), seed=1)
    assert_same(whole, run_dir, STAGES[:2])
    assert leftovers(run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_in_every_stage_and_resumed_equals_uninterrupted_to_the_bit(folder, whole, seed):
    run_dir = folder.root / f"broken-{seed}"
    killed_and_resumed(folder, folder.recipe(run_dir.name), run_dir, STAGES, seed)
    assert_same(whole, run_dir)
    assert leftovers(run_dir) == []


@pytest.mark.slow
def test_two_ranks_end_where_one_does(folder, whole):
    run_dir = folder.run(folder.recipe("ranks", ranks=2), folder.root / "ranks")
    start = weights(whole, "start")
    for stage in STAGES:
        one, two = weights(whole, stage), weights(run_dir, stage)
        assert one.keys() == two.keys()
        for name in one:
            # Not more than rounding can do in so tiny a model: AdamW takes a whole step where a
            # gradient is nothing but rounding, and near ties of experts and keys tip over.
            moved = (one[name] - start.get(name, torch.zeros(()))).norm()
            assert (two[name] - one[name]).norm() <= 0.1 * moved, (stage, name)
        assert losses(run_dir, stage) == pytest.approx(losses(whole, stage), abs=2e-3)
    assert leftovers(run_dir) == []


@pytest.mark.slow
def test_two_ranks_killed_and_resumed_equal_themselves_to_the_bit(folder):
    run_dir = folder.run(folder.recipe("pair", ranks=2), folder.root / "pair")
    recipe = folder.recipe("broken-pair", ranks=2)
    broken = folder.root / "broken-pair"
    process = folder.start(recipe, "--run-dir", str(broken))
    wait_for(
        lambda: (broken / "training" / "mid").exists() or process.poll() is not None, "no progress"
    )
    assert process.poll() is None
    kill(process)
    folder.finish(folder.start("--resume", str(broken)))
    assert_same(run_dir, broken)
