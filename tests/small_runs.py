"""Whole runs as small as they come: a checkpoint of two layers, tasks of the test's own, a recipe.

Importing it costs no torch: processes that serve a task of a test need none.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.recipe import Recipe, parse_recipe
from headrace.tasks.types import Endpoint, TaskInstance


class ChatTask:
    """A task of one family, in which every seed is a problem of its own; tests add rollouts."""

    name = "chat"

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, "chat", 1, 1)

    def train_seed(self, index: int) -> int:
        return index

    def evaluation_seed(self, index: int) -> int:
        return -1 - index

    def content_id(self, instance: TaskInstance) -> str:
        return str(instance.seed)


async def ask(endpoint: Endpoint, text: str, *, max_tokens: int) -> None:
    """One call of the policy, by a client of its own."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
        )


def small_checkpoint(path: Path, *, seed: int = 0, sharp: bool = False) -> Path:
    """A model of 256 positions that nobody trained, with a tokenizer of 400 entries.

    Args:
        sharp: let it prefer some tokens; else any two such models say much the same, anything.
    """
    import torch

    from headrace.model.checkpoint import save_checkpoint
    from headrace.model.config import ModelConfig
    from headrace.model.decoder import Decoder
    from headrace.tokens.training import train_tokenizer

    model = Decoder(
        ModelConfig(
            vocab_size=400,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            max_positions=256,
            tie_embeddings=True,
        )
    )
    model.init_weights(seed)
    if sharp:
        with torch.no_grad():
            model.get_parameter("embed.weight").mul_(8.0)
    save_checkpoint(model, path)
    train_tokenizer(["hello, go on"] * 20, 400).save(path)
    return path


def small_recipe(checkpoint: Path, *stages: Mapping[str, Any], **tables: Any) -> Recipe:
    """A recipe over such a checkpoint; `tables` are added, or replace what is small here."""
    small = {
        "name": "small",
        "model": {"path": str(checkpoint), "renderer": "compact"},
        "engine": {"max_running": 8, "max_context": 128},
        "measure": {"text_bytes": 0},
        "stages": list(stages),
    }
    return parse_recipe(small | tables, "test")


def use_tasks(replace: Callable[[Any, str, Any], Any], tasks: Mapping[str, Any]) -> None:
    """Let runs of this process find `tasks`, by name, whatever their recipe says of them.

    Args:
        replace: a function of owner, name and value, as `monkeypatch.setattr`.
    """
    from headrace import run
    from headrace.tasks import registry

    @contextlib.asynccontextmanager
    async def open_tasks(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield None, tasks

    replace(run, "open_tasks", open_tasks)
    replace(registry, "create_task", lambda name, *_: tasks[name])


def logged(run_dir: Path, stage: str) -> list[dict[str, Any]]:
    """The metrics of a stage, update by update."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["metrics"] for row in rows if row["stage"] == stage]
