"""The checkpoint a run starts from: new weights of a preset or a shape, or one that exists."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.cluster.types import WorkerFailure, WorkerSpec
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint
from headrace.recipe import Recipe, parse_recipe
from headrace.stages.new_model import start_checkpoint
from headrace.tokens.renderer import create_renderer
from headrace.tokens.tokenizer import load_tokenizer
from headrace.training.worker import TrainerWorker

SMALL = {
    "indexer": "none",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 64,
    "latent": {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 16},
    "moe": {"num_experts": 4, "intermediate_size": 16},
}


class Here:
    """A worker in this process, and the cluster that starts it."""

    name, pid, alive = "initialiser", 0, True

    def __init__(self, failure: WorkerFailure | None = None) -> None:
        self.failure = failure
        self.started: list[WorkerSpec] = []

    async def start(self, spec: WorkerSpec) -> "Here":
        self.started.append(spec)
        return self

    async def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        if self.failure is not None:
            raise self.failure
        worker = TrainerWorker(None)  # type: ignore[arg-type]  # no request comes through it
        return getattr(worker, f"_do_{method}")(**payload)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        pass


@pytest.fixture(autouse=True)
def few_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering hundreds of them takes seconds, and these tests do not look at their words."""
    monkeypatch.setattr("headrace.stages.new_model._CONVERSATIONS", 5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"river stone number {i} lies beside river stone {i + 1}")
    return folder


def recipe_of(text: Path, model: dict[str, Any], **tables: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "r",
            "model": model,
            "tokenizer": {"format": "glm-5", "vocab_size": 320},
            "data": {"text": {"source": str(text)}},
            "measure": {},
            "stages": [{"kind": "pretrain", "name": "p", "steps": 1}],
            **tables,
        },
        "recipe",
    )


async def start(recipe: Recipe, run_dir: Path, cluster: Here) -> tuple[Path, list[str]]:
    messages: list[str] = []
    found = await start_checkpoint(
        recipe,
        run_dir,
        run_dir / "checkpoints" / "start",
        cluster=cluster,  # type: ignore[arg-type]  # a stand-in
        tasks={},
        message=messages.append,
    )
    return found, messages


async def test_a_preset_becomes_a_checkpoint_with_its_tokenizer_once(text, tmp_path):
    recipe = recipe_of(text, {"preset": "glm5-tiny", "overrides": SMALL})
    cluster = Here()
    path, messages = await start(recipe, tmp_path / "run", cluster)
    assert path == tmp_path / "run" / "checkpoints" / "start"
    model = load_checkpoint(path)
    tokenizer = load_tokenizer(path)
    assert model.config.vocab_size == tokenizer.vocab_size == 320
    assert (model.config.family, model.config.max_positions) == ("deepseek_v3", 64)
    assert create_renderer("auto", path).id == "renderers:glm-5"
    # Words of the corpus were learned.
    assert len(tokenizer.encode_text(" river stone")) < 8
    assert f"{model.num_parameters():,} parameters" in messages[-1]
    again = await start(recipe, tmp_path / "run", cluster)
    assert again == (path, [])
    assert len(cluster.started) == 1


async def test_weights_follow_from_the_seed(text, tmp_path):
    model = {"preset": "glm5-tiny", "overrides": SMALL}
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        path, _ = await start(recipe_of(text, model, seed=seed), tmp_path / name, Here())
        found.append(load_file(path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


async def test_a_shape_becomes_a_dense_model(text, tmp_path):
    init = {"family": "qwen3", "hidden_size": 48, "num_layers": 1, "num_heads": 4}
    init |= {"num_kv_heads": 2, "intermediate_size": 64, "max_positions": 512}
    path, _ = await start(recipe_of(text, {"init": init}), tmp_path / "run", Here())
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["head_dim"]) == ("qwen3", 48, 12)
    assert (config["num_key_value_heads"], config["vocab_size"]) == (2, 320)


async def test_a_path_is_taken_as_it_is(text, tmp_path):
    recipe = recipe_of(text, {"preset": "glm5-tiny", "overrides": SMALL})
    path, _ = await start(recipe, tmp_path / "run", Here())
    cluster = Here()
    other = recipe_of(text, {"path": str(path)}, tokenizer=None)
    found, messages = await start(other, tmp_path / "other", cluster)
    assert found == path
    assert messages == [f"loading {path}"]
    assert cluster.started == []
    assert not (tmp_path / "other").exists()


async def test_what_the_process_refuses_is_a_users_mistake(text, tmp_path):
    recipe = recipe_of(text, {"preset": "glm5-tiny", "overrides": SMALL})
    cluster = Here(WorkerFailure("io_error", "No space left on device"))
    with pytest.raises(UserError, match="new model: No space left"):
        await start(recipe, tmp_path / "run", cluster)


async def test_a_tokenizer_needs_something_to_learn_from(text, tmp_path):
    recipe = recipe_of(text, {"preset": "glm5-tiny"}, tokenizer={"format": "compact"})
    with pytest.raises(UserError, match="nothing to learn from"):
        await start(recipe, tmp_path / "run", Here())
