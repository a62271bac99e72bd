"""A synthetic but realistic run of language-model stages: no rollouts, measurements after each."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.observe.metrics import MetricsWriter
from headrace.observe.statistics import wilson
from headrace.observe.summary import write_summary
from headrace.rollout.record.ledger import Ledger

START = 1_770_000_000.0
STAGES = (
    # name, kind, steps, seconds, first and last language loss, tokens per step
    ("pretrain", "pretrain", 60, 150.0, 7.4, 3.1, 4096),
    ("midtrain", "midtrain", 30, 70.0, 3.2, 2.8, 4096),
    ("dsa-warmup", "dsa_warmup", 15, 20.0, 0.9, 0.12, 4096),
    ("dsa-adapt", "dsa_adapt", 20, 40.0, 2.9, 2.7, 4096),
    ("sft", "sft", 40, 110.0, 2.2, 0.25, 4096),
)
BITS = {"pretrain": 1.921, "midtrain": 1.804, "dsa-warmup": 1.806, "dsa-adapt": 1.781, "sft": 1.83}
RIGHT = {
    # (length, keys): right answers of 50 by stage
    (256, 1): {"pretrain": 47, "midtrain": 49, "dsa-warmup": 49, "dsa-adapt": 50, "sft": 48},
    (256, 4): {"pretrain": 21, "midtrain": 44, "dsa-warmup": 43, "dsa-adapt": 46, "sft": 45},
    (1024, 1): {"midtrain": 46, "dsa-warmup": 44, "dsa-adapt": 47, "sft": 45},
    (1024, 4): {"midtrain": 35, "dsa-warmup": 31, "dsa-adapt": 38, "sft": 36},
}
RATES = {
    "parsed": 0.96,
    "thinking": 0.97,
    "call": 0.94,
    "ended": 0.95,
    "correct": 0.71,
    "answer_expected": 0.92,
    "call_expected": 0.95,
    "thinking_off": 0.95,
    "thinking_on": 0.92,
}


def make_language_run(
    path: Path, set_clock: Callable[[float], None], *, until: str = "sft", skipped: bool = True
) -> Path:
    """Write the run directory `path`.

    Args:
        set_clock: sets the time that metrics carry.
        until: the last stage that finished.
        skipped: whether pre-training skipped steps and went on from a checkpoint once.
    """
    path.mkdir(parents=True)
    rng = random.Random(5)
    stages = [
        {"name": name, "kind": kind, "start_from": None, "evaluate": True}
        for name, kind, *_ in STAGES
    ]
    recipe = {
        "name": "glm5-tiny-base",
        "description": "From raw text to a chat model with tools.",
        "seed": 3,
        "evaluation": None,
        "stages": stages,
    }
    (path / "recipe.json").write_text(json.dumps(recipe))
    Ledger.create(path / "ledger.sqlite").close()
    now = START
    finished: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    with MetricsWriter(path) as rows:
        for name, kind, steps, seconds, first, last, tokens in STAGES:
            for step in _logged_steps(steps, again=skipped and name == "pretrain"):
                now += seconds / steps
                set_clock(now)
                metrics = _metrics(rng, kind, step / steps, first, last)
                metrics |= {"tokens": float(tokens), "step": float(step), "skipped": 0.0}
                if skipped and name == "pretrain" and step in (17, 41):
                    metrics["skipped"] = 1.0
                rows.log(name, step, metrics)
            finished.append({"name": name, "wall_s": seconds + 3.0})
            records = _measure(name, chat=kind == "sft")
            measured += records
            now += sum(record["wall_s"] for record in records)
            set_clock(now)
            rows.log(f"measure {name}", 0, {r["task"]: r["value"] for r in records})
            if name == until:
                break
    write_summary(
        path,
        {
            "recipe": "glm5-tiny-base",
            "seed": 3,
            "status": "finished" if until == "sft" else "interrupted",
            "ended": "2026-02-02T10:51:40",
            "wall_s": now - START + 12.0,
            "stages": finished,
            "evaluations": measured,
            "laws": {"L2": "held", "L9": "held"},
            "machine": {"processor": "Example CPU @ 2.1 GHz", "cores": 2, "memory": "8 GiB"},
        },
    )
    return path


def _logged_steps(steps: int, again: bool) -> list[int]:
    """Steps in the order they were logged; `again` repeats five after a crash."""
    half = steps // 2
    return [*range(1, half + 1), *range(half - 4 if again else half + 1, steps + 1)]


def _metrics(
    rng: random.Random, kind: str, done: float, first: float, last: float
) -> dict[str, float]:
    loss = last + (first - last) * math.exp(-4 * done) + rng.gauss(0, 0.01 * first)
    index = 0.12 + 0.1 * math.exp(-3 * done) + rng.gauss(0, 0.004)
    found = {
        "grad_norm": abs(rng.gauss(1.2, 0.15)) * (1 + 2 * math.exp(-8 * done)),
        "tokens_per_s": rng.gauss(5200 if kind == "dsa_warmup" else 2600, 120),
        "mfu": rng.gauss(0.31, 0.01),
        "memory_mb": 812 + 30 * done,
        "peak_memory_mb": 1410 + 12 * done,
        "learning_rate": 0.01 * (1 - 0.95 * done),
    }
    if kind in ("dsa_warmup", "sft"):
        return {"loss": loss, **found}
    mtp = loss + 0.35
    balance = 1.02 + 0.3 * math.exp(-9 * done)
    parts = {"language_loss": loss, "mtp_loss": mtp, "balance_loss": balance}
    total = loss + 0.3 * mtp
    if kind == "dsa_adapt":
        parts["index_loss"] = index
        total += index
    return {"loss": total, **parts, **found}


def _measure(stage: str, *, chat: bool) -> list[dict[str, Any]]:
    bits = BITS[stage]
    found = [
        {
            "after": stage,
            "task": "bits per byte",
            "n": 60_213,
            "value": bits,
            "text": f"{bits:.3f} over 60,213 bytes",
            "wall_s": 3.1,
            "detail": {"bits_per_byte": bits, "tokens": 20_104, "text_bytes": 60_213},
        }
    ]
    for (length, keys), right in RIGHT.items():
        if stage in right:
            task = f"retrieval, {keys} {'key' if keys == 1 else 'keys'}, {length} tokens"
            detail = {"length": length, "keys": keys, "right": right[stage], "examples": 50}
            found.append(_rate(stage, task, right[stage], 50, 0.8, detail))
    if chat:
        detail = {"count": 100, "following": 0.93, "rates": RATES, "examples": EXAMPLES}
        found.append(_rate(stage, "chat format", 93, 100, 6.4, detail))
    return found


def _rate(
    stage: str, task: str, right: int, n: int, wall_s: float, detail: dict[str, Any]
) -> dict[str, Any]:
    low, high = wilson(right, n)
    share = right / n
    return {
        "after": stage,
        "task": task,
        "n": n,
        "value": share,
        "success": share,
        "low": low,
        "high": high,
        "text": f"{share:.1%} ({low:.1%} to {high:.1%}) of {n}",
        "wall_s": wall_s,
        "detail": detail,
    }


def _example(
    prompt: str, completion: str, thinking: bool, expected: dict[str, Any], broken: str = ""
) -> dict[str, Any]:
    names = ("parsed", "thinking", "call", "ended", "correct")
    return {
        "prompt": prompt,
        "completion": completion,
        "expected": {"thinking": thinking, "calls": [], "answer": None, **expected},
        "score": {name: name not in broken.split() for name in names},
    }


_LOOKUP = (
    "<tool_call>lookup<arg_key>key</arg_key><arg_value>age of the snow</arg_value></tool_call>"
)
_ASKED = {"calls": [{"name": "lookup", "arguments": {"key": "age of the snow"}}]}
EXAMPLES = [
    _example(
        "<|user|>What is the age of the snow?<|assistant|><think>",
        "The snow. " * 90,
        True,
        _ASKED,
        "parsed thinking call ended correct",
    ),
    _example(
        "<|user|>Write <b>bold</b> & <script>alert(1)</script><|assistant|></think>",
        "<b>bold</b></think><|user|>",
        False,
        {"answer": "<b>bold</b>"},
        "parsed correct",
    ),
    _example(
        "<|user|>What is the age of the snow?<|assistant|><think>I look up the age of the snow."
        f"</think>{_LOOKUP}<|observation|><tool_response>41</tool_response><|assistant|><think>",
        "The tool says 41.</think>The age of the snow is 41.",
        True,
        {"answer": "The age of the snow is 41."},
        "ended",
    ),
    _example(
        "<|user|>What is the age of the snow?<|assistant|><think>",
        f"I look up the age of the snow.</think>{_LOOKUP}<|observation|>",
        True,
        _ASKED,
    ),
    _example(
        "<|user|>What is 89 times 38?<|assistant|></think>",
        "89 times 38 is 3282.<|user|>",
        False,
        {"answer": "89 times 38 is 3382."},
        "correct",
    ),
    _example(
        "<|user|>Please say this again: shoe fish\x07 milk\nhat<|assistant|></think>",
        "shoe fish milk\nhat<|user|>",
        False,
        {"answer": "shoe fish milk hat"},
    ),
]
