"""Mistakes in language recipes: one line and exit code 2 before anything starts."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.model.config import ModelConfig
from headrace.recipe import ModelTable
from headrace.stages.checks import new_config

PRETRAIN = {"kind": "pretrain", "name": "base", "steps": 1}
WARMUP = {"kind": "dsa_warmup", "name": "warmup", "steps": 1}
ADAPT = {"kind": "dsa_adapt", "name": "adapt", "steps": 1}
SFT = {"kind": "sft", "name": "sft", "steps": 1, "conversations": "talk.jsonl"}
CONVERSATION = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(f"file number {i} says {i * i}\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "talk.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    return tmp_path


def write_recipe(folder: Path, stages: list[dict[str, Any]], **tables: Any) -> None:
    """A recipe of `stages` and default tables, of which None leaves one out."""
    whole: dict[str, Any] = {
        "name": "r",
        "model": {"preset": "glm5-tiny", "overrides": {"max_positions": 256}},
        "tokenizer": {"format": "glm-5"},
        "data": {"text": {"source": "text", "held_out": 0.3}},
        "measure": {"text_bytes": 0},
        **tables,
    }
    lines = [f"{key} = {_toml(value)}" for key, value in whole.items() if value is not None]
    lines.append(f"stages = {_toml(stages)}")
    (folder / "r.toml").write_text("\n".join(lines))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


DENSE = {"preset": "glm5-tiny", "overrides": {"indexer": "none", "max_positions": 256}}
RETRIEVAL = {"text": {"source": "text"}, "n": {"shape": "retrieval"}}
MISTAKES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "preset": ([PRETRAIN], {"model": {"preset": "glm5-tyni"}}, 'did you mean "glm5-tiny"'),
    "override": (
        [PRETRAIN],
        {"model": {"preset": "glm5-tiny", "overrides": {"hidden_sise": 64}}},
        'did you mean "hidden_size"',
    ),
    "override type": (
        [PRETRAIN],
        {"model": {"preset": "glm5-tiny", "overrides": {"hidden_size": "wide"}}},
        "hidden_size = 'wide'",
    ),
    "override table type": (
        [PRETRAIN],
        {"model": {"preset": "glm5-tiny", "overrides": {"moe": 3}}},
        'model.overrides.moe = 3; write a table of its fields, or "none"',
    ),
    "override does not fit": (
        [PRETRAIN],
        {"model": {"preset": "glm5-tiny", "overrides": {"moe": {"experts_per_token": 99}}}},
        "experts_per_token = 99",
    ),
    "checkpoint": (
        [PRETRAIN],
        {"model": {"path": "nowhere"}, "tokenizer": None},
        "model.path nowhere: no such directory",
    ),
    "mix": ([{**PRETRAIN, "mix": {"texts": 1.0}}], {}, 'did you mean "text"'),
    "context mix": (
        [
            {
                "kind": "midtrain",
                "name": "mid",
                "steps": 1,
                "context": [{"sequence": 64, "mix": {"code": 1.0}}],
            }
        ],
        {},
        '"code" is no entry of [data]',
    ),
    "no data": ([PRETRAIN], {"data": {}}, "add a [data.NAME] table"),
    "sequence": ([{**PRETRAIN, "sequence": 257}], {}, "sequence = 257"),
    "sequence after a shorter midtrain": (
        [
            {"kind": "midtrain", "name": "mid", "steps": 1, "context": [{"sequence": 300}]},
            {**ADAPT, "sequence": 301},
        ],
        {},
        "stages.adapt: sequence = 301 exceeds the model's 300 positions",
    ),
    "corpus": (
        [PRETRAIN],
        {"data": {"text": {"source": "text2"}}},
        "data.text: corpus source 'text2': no such file or folder",
    ),
    "empty corpus": ([PRETRAIN], {"data": {"text": {"source": "empty"}}}, "data.text: "),
    "all held out": (
        [PRETRAIN],
        {"data": {"text": {"source": "text", "held_out": 0.999999}}},
        "data.text: no document to train on",
    ),
    "nothing held out": (
        [PRETRAIN],
        {"data": {"text": {"source": "text", "held_out": 0}}, "measure": {}},
        "data.text: held_out = 0",
    ),
    "adapt without an indexer": ([PRETRAIN, ADAPT], {"model": DENSE}, "put a dsa_warmup stage"),
    "adapt beside the warm-up": (
        [PRETRAIN, WARMUP, {**ADAPT, "start_from": "base"}],
        {"model": DENSE},
        "stages.adapt: the model has no indexer",
    ),
    "indexer twice": (
        [WARMUP, {**WARMUP, "name": "again", "topk": 64}],
        {"model": DENSE},
        "stages.again: topk = 64 is not that of the indexer the model has already",
    ),
    "indexer of a preset": (
        [{**WARMUP, "share_every": 2}],
        {},
        "stages.warmup: share_every = 2 is not",
    ),
    "indexer too narrow": ([{**WARMUP, "index_head_dim": 4}], {"model": DENSE}, "stages.warmup: "),
    "indexer of a dense model": (
        [WARMUP],
        {"model": {"init": {}}},
        "a llama model has no latent attention",
    ),
    "keys": (
        [PRETRAIN],
        {"data": {**RETRIEVAL, "n": {"shape": "retrieval", "keys": [4, 1]}}},
        "data.n: retrieval keys",
    ),
    "too many keys": (
        [{**PRETRAIN, "sequence": 128}],
        {"data": {**RETRIEVAL, "n": {"shape": "retrieval", "keys": [1, 40]}}},
        "data.n: 40 facts and a question need more than 328 tokens",
    ),
    "retrieval length": (
        [PRETRAIN],
        {"measure": {"text_bytes": 0, "retrieval_lengths": [257]}},
        "measure.retrieval_lengths: no stage's model can hold 257 tokens",
    ),
    "retrieval room": (
        [PRETRAIN],
        {"measure": {"text_bytes": 0, "retrieval_lengths": [32], "retrieval_keys": [4]}},
        "4 facts and a question",
    ),
    "text context": ([PRETRAIN], {"measure": {"text_context": 2}}, "measure.text_context = 2"),
    "conversations": (
        [{**SFT, "conversations": "talks.jsonl"}],
        {},
        "stages.sft.conversations: conversations 'talks.jsonl': no such file",
    ),
    "compact thinking": (
        [{**SFT, "conversations": "builtin"}],
        {"tokenizer": {"format": "compact"}},
        'set tokenizer.format = "glm-5"',
    ),
}


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = cli.main(["run", "r.toml", *arguments])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err + captured.out
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_before_anything_starts(folder, capsys, name):
    stages, tables, message = MISTAKES[name]
    write_recipe(folder, stages, **tables)
    assert message in mistake(capsys, "--dry-run")
    # The same without --dry-run: nothing is written before the recipe is known to be right.
    assert message in mistake(capsys, "--run-dir", "run")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "talk.jsonl:2: not valid JSON"),
        ('{"messages": 3}', "talk.jsonl:2: messages is int"),
        ('{"messages": [{"role": "user", "content": "x", "train": true}]}', "messages[0].train"),
    ],
)
def test_bad_conversations_are_named_by_their_line(folder, capsys, line, message):
    (folder / "talk.jsonl").write_text(json.dumps(CONVERSATION) + f"\n{line}\n")
    write_recipe(folder, [SFT])
    assert message in mistake(capsys, "--dry-run")


def test_a_file_without_conversations(folder, capsys):
    (folder / "talk.jsonl").write_text("\n\n")
    write_recipe(folder, [SFT])
    assert "holds no conversation" in mistake(capsys, "--dry-run")


@pytest.mark.parametrize(
    ("stages", "tables"),
    [
        ([PRETRAIN, SFT], {}),
        ([PRETRAIN, WARMUP, ADAPT, SFT], {"model": DENSE}),
        # A second warm-up of the same indexer, whether spelled out or not.
        ([WARMUP, {**WARMUP, "name": "again"}], {"model": DENSE}),
        ([{**WARMUP, "topk": 64}, {**WARMUP, "name": "again", "topk": 64}], {"model": DENSE}),
        # What a preset brings is trained as it is.
        ([WARMUP, ADAPT], {}),
        # The context that midtraining makes is there for what follows, and for measuring.
        (
            [
                {"kind": "midtrain", "name": "mid", "steps": 1, "context": [{"sequence": 512}]},
                {**ADAPT, "sequence": 512},
            ],
            {"measure": {"retrieval_lengths": [512]}},
        ),
        # A source that no stage reads need not exist.
        (
            [{**PRETRAIN, "mix": {"text": 1.0}}],
            {"data": {"text": {"source": "text"}, "other": {"source": "missing"}}},
        ),
    ],
)
def test_what_is_right_passes(folder, capsys, stages, tables):
    write_recipe(folder, stages, **tables)
    assert cli.main(["run", "r.toml", "--dry-run"]) == 0
    assert f"stage {stages[-1]['name']}: {stages[-1]['kind']}" in capsys.readouterr().out


def test_checkpoints_are_looked_at(folder, capsys):
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=128,
    )
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config.to_hf()))
    text = (
        'name = "r"\nmodel = {path = "model"}\ndata = {text = {source = "text"}}\n'
        "measure = {text_bytes = 0}\n"
        'stages = [{kind = "pretrain", name = "p", steps = 1, sequence = 129}]'
    )
    (folder / "r.toml").write_text(text)
    assert "exceeds the model's 128 positions" in mistake(capsys, "--dry-run")
    (folder / "r.toml").write_text(text.replace("129", "128"))
    assert cli.main(["run", "r.toml", "--dry-run"]) == 0


def test_none_leaves_a_part_of_a_preset_out():
    table = ModelTable(preset="glm5-tiny", overrides={"indexer": "none", "hidden_size": 64})
    config = new_config(table, 500)
    assert config.indexer is None
    assert (config.vocab_size, config.hidden_size, config.family) == (500, 64, "deepseek_v3")


def test_dry_run_needs_no_torch(folder):
    write_recipe(folder, [PRETRAIN, WARMUP], model=DENSE)
    script = (
        "import sys; from headrace.cli import main; code = main(['run', 'r.toml', '--dry-run']);"
        "assert code == 0, code; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_documented_example_passes(folder, capsys):
    page = Path(__file__).parents[2] / "docs" / "stages.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "r.toml").write_text(example)
    assert cli.main(["run", "r.toml", "--dry-run"]) == 0
    assert "stage chat: sft on builtin conversations" in capsys.readouterr().out
