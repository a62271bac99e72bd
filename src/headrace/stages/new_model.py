"""The checkpoint a run starts from: one that exists, or new weights and a tokenizer for them."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.cluster.local import available_cores
from headrace.cluster.types import Cluster, WorkerFailure
from headrace.data.corpora import open_corpus, sample_texts
from headrace.errors import UserError
from headrace.recipe import ModelTable, Recipe, SftStage
from headrace.recipe.tables import TokenizerTable
from headrace.stages.held_out import demonstrations_of, measured
from headrace.stages.language import corpus_spec
from headrace.stages.trainers import open_trainer
from headrace.tasks.types import TaskService
from headrace.tokens.renderer import create_renderer
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer

_CONVERSATIONS = 400
"""Built-in conversations whose words a chat tokenizer learns besides its corpus."""
_CREATE_TIMEOUT_S = 600.0


async def start_checkpoint(
    recipe: Recipe,
    run_dir: Path,
    target: Path,
    *,
    cluster: Cluster,
    tasks: Mapping[str, TaskService],
    message: Callable[[str], None],
) -> Path:
    """The checkpoint the first stage starts from; a new one is made once, at `target`.

    Raises:
        UserError: the model does not exist, or the tokenizer cannot be trained.
    """
    model = recipe.model
    if model.path is not None:
        from headrace.model.gguf_import import resolve_model

        message(f"loading {model.path}")
        return await asyncio.to_thread(resolve_model, model.path)
    if (target / "config.json").is_file():
        return target
    assert recipe.tokenizer is not None  # the recipe's validator saw to it
    message("training the tokenizer")
    tokenizer = await _tokenizer(recipe, recipe.tokenizer, tasks)
    folder = run_dir / "tokenizer"
    tokenizer.save(folder)
    parameters = await create_checkpoint(
        cluster, model, tokenizer, folder, target, seed=recipe.seed, run_dir=run_dir
    )
    message(f"new model: {parameters:,} parameters, {tokenizer.vocab_size} tokens")
    return target


async def create_checkpoint(
    cluster: Cluster,
    model: ModelTable,
    tokenizer: TextTokenizer,
    tokenizer_dir: Path,
    target: Path,
    *,
    seed: int,
    run_dir: Path,
) -> int:
    """Write a checkpoint with random weights, in a process of its own; returns its parameters.

    Raises:
        UserError: there is no such model, or it cannot be written.
    """
    cores = available_cores()
    async with open_trainer(cluster, "initialiser", cores, run_dir) as worker:
        try:
            return await worker.request(
                "create",
                {
                    "shape": shape_of(model),
                    "vocab_size": tokenizer.vocab_size,
                    "seed": seed,
                    "path": str(target),
                    "tokenizer": str(tokenizer_dir),
                },
                timeout_s=_CREATE_TIMEOUT_S,
            )
        except WorkerFailure as failure:
            raise UserError(f"new model: {failure.message}") from None


def shape_of(model: ModelTable) -> dict[str, Any]:
    """A new model's shape, but for its vocabulary, as the trainer's process takes it."""
    if model.preset is not None:
        # TOML has no null: "none" leaves a part of the preset out.
        overrides = {k: None if v == "none" else v for k, v in model.overrides.items()}
        return {"preset": model.preset, "overrides": overrides}
    init = model.init
    assert init is not None
    return {
        "config": {
            "hidden_size": init.hidden_size,
            "intermediate_size": init.intermediate_size,
            "num_layers": init.num_layers,
            "num_heads": init.num_heads,
            "num_kv_heads": init.num_kv_heads,
            "head_dim": init.hidden_size // init.num_heads,
            "max_positions": init.max_positions,
            "rope_theta": init.rope_theta,
            "tie_embeddings": True,
            "qk_norm": init.family == "qwen3",
            "family": init.family,
        }
    }


async def _tokenizer(
    recipe: Recipe, table: TokenizerTable, tasks: Mapping[str, TaskService]
) -> TextTokenizer:
    if table.format == "glm-5" or table.corpus is not None:
        return await asyncio.to_thread(_text_tokenizer, recipe, table)
    named = [s.demonstrated_task for s in recipe.stages if isinstance(s, SftStage)]
    task = next((tasks[name] for name in named if name is not None), None)
    if task is None:
        raise UserError(
            "tokenizer: nothing to learn from; give tokenizer.corpus, or an sft stage with a task"
        )
    held_out = await asyncio.to_thread(measured, recipe, tasks)
    found = await demonstrations_of(task, table.demonstrations, recipe.seed, 0.5, held_out)
    texts = [text for d in found for text in _texts(d.messages)]
    return await asyncio.to_thread(train_tokenizer, texts, table.vocab_size, table.format)


def _text_tokenizer(recipe: Recipe, table: TokenizerTable) -> TextTokenizer:
    """Of a corpus and, for a chat format, of conversations."""
    texts: list[str] = []
    if recipe.data:
        name = table.corpus or next(iter(recipe.data))
        texts += sample_texts(open_corpus(corpus_spec(recipe.data[name])))
    if table.format == "glm-5":
        texts += _chat_texts(texts, recipe.seed)
    return train_tokenizer(texts, table.vocab_size, table.format)


def _chat_texts(texts: list[str], seed: int) -> list[str]:
    """Built-in conversations as a model reads them, tool declarations included.

    What stands in every prompt deserves its own tokens. Rendering needs a tokenizer, so a first
    one that knows little more than bytes serves for that.
    """
    from headrace.data.assistant import conversations
    from headrace.tokens.thinking import render_conversation

    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(texts, SMALLEST_VOCABULARY + 256, "glm-5").save(folder)
        renderer = create_renderer("auto", folder)
        return [
            renderer.tokenizer.decode(sequence.ids, skip_special_tokens=True)
            for c in conversations(seed, _CONVERSATIONS)
            for sequence in render_conversation(renderer, c.messages, c.tools, c.mode)
        ]


def _texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Everything readable in a conversation."""
    texts = []
    for message in messages:
        if message.get("content"):
            texts.append(message["content"])
        for call in message.get("tool_calls") or []:
            texts += [str(v) for v in json.loads(call["function"]["arguments"]).values()]
    return texts
