"""Asks a measuring process for everything a recipe's [measure] table wants to know of a model."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.cluster.types import Cluster, WorkerFailure, WorkerSpec
from headrace.errors import UserError
from headrace.observe.statistics import wilson
from headrace.recipe import MeasureTable, Recipe
from headrace.stages.language import corpus_spec
from headrace.system import placement

_TIMEOUT_S = 1800.0


async def measure_model(
    cluster: Cluster,
    recipe: Recipe,
    checkpoint: Path,
    run_dir: Path,
    *,
    chat: bool,
    progress: Callable[[float], None],
) -> list[dict[str, Any]]:
    """Records of what was measured, ready for summary.json.

    Each has task, n, value, text (value and interval in words), wall_s; rates also have success,
    low and high (95% Wilson interval).

    Args:
        chat: also measure the chat format, which only a chat model has.

    Raises:
        UserError: a length or corpus that cannot be measured.
    """
    table = recipe.measure
    assert table is not None
    cores = placement(recipe).all
    worker = await cluster.start(
        WorkerSpec(
            name="measure",
            target="headrace.measure.worker:MeasureWorker",
            kwargs={"threads": len(cores)},
            cores=cores,
            threads=len(cores),
            log_path=os.fspath(run_dir / "logs" / "measure.log"),
        )
    )
    records: list[dict[str, Any]] = []
    try:
        longest = await worker.request("load", {"path": str(checkpoint)}, timeout_s=_TIMEOUT_S)
        plan = _plan(recipe, table, chat=chat, longest=longest)
        for index, (method, payload) in enumerate(plan):
            started = time.monotonic()
            result = await worker.request(method, payload, timeout_s=_TIMEOUT_S)
            record = _record(method, result)
            records.append({**record, "wall_s": time.monotonic() - started})
            progress((index + 1) / len(plan))
    except WorkerFailure as failure:
        raise UserError(f"measure: {failure.message}") from None
    finally:
        await worker.stop()
    return records


def _plan(
    recipe: Recipe, table: MeasureTable, *, chat: bool, longest: int
) -> list[tuple[str, dict[str, Any]]]:
    plan: list[tuple[str, dict[str, Any]]] = []
    if table.text_bytes:
        name = table.corpus or next(iter(recipe.data))
        corpus = msgspec.to_builtins(corpus_spec(recipe.data[name]))
        plan.append(
            (
                "text",
                {
                    "corpus": corpus,
                    "context": table.text_context,
                    "max_bytes": table.text_bytes,
                },
            )
        )
    for length in table.retrieval_lengths:
        for keys in table.retrieval_keys:
            # A model that cannot hold the context yet is measured when it can.
            if length <= longest:
                payload = {
                    "length": length,
                    "keys": keys,
                    "examples": table.retrieval_examples,
                    "seed": 0,
                    "letters": table.retrieval_letters,
                    "digits": table.retrieval_digits,
                }
                plan.append(("retrieval", payload))
    if chat and table.format_examples:
        plan.append(
            (
                "format",
                {
                    "renderer": recipe.model.renderer,
                    "examples": table.format_examples,
                    "max_context": recipe.engine.max_context,
                    "max_tokens": recipe.rollout.max_tokens,
                },
            )
        )
    return plan


def _record(method: str, result: dict[str, Any]) -> dict[str, Any]:
    if method == "text":
        bits = result["bits_per_byte"]
        return {
            "task": "bits per byte",
            "n": result["text_bytes"],
            "value": bits,
            "text": f"{bits:.3f} over {result['text_bytes']:,} bytes",
            "detail": result,
        }
    if method == "retrieval":
        keys = result["keys"]
        task = f"retrieval, {keys} {'key' if keys == 1 else 'keys'}, {result['length']} tokens"
        return _rate(task, result["right"], result["examples"], result)
    count = result["count"]
    return _rate("chat format", round(result["following"] * count), count, result)


def _rate(task: str, right: int, n: int, detail: dict[str, Any]) -> dict[str, Any]:
    low, high = wilson(right, n)
    share = right / n
    return {
        "task": task,
        "n": n,
        "value": share,
        "success": share,
        "low": low,
        "high": high,
        "text": f"{share:.1%} ({low:.1%} to {high:.1%}) of {n}",
        "detail": detail,
    }
