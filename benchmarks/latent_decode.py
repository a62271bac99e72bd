"""Time per decoded token of the GLM-5 architecture after long contexts: sparse against dense.

Two engines over the same weights, one without the indexer, decode one request each after contexts
that are not computed: their cache blocks hold random numbers, which takes as long to attend to.
Sides take turns. Scaled down from GLM-5: see `SHAPE` for what the model is.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.presets import preset

CONTEXTS = {"1k": 1024, "8k": 8192, "32k": 32768}
SHAPE = (
    "glm5-mini (12 layers) with 6 layers, 16 heads instead of 8 and 4 indexer heads instead of 8, "
    "so that attention to all keys costs 17 times what indexing them does, as in GLM-5; it selects "
    "256 keys (GLM-5: 78 layers, 64 heads, 2,048 keys)"
)


def config_of(*, sparse: bool) -> ModelConfig:
    """The model of one side."""
    return preset(
        "glm5-mini",
        num_layers=6,
        num_heads=16,
        max_positions=2 * max(CONTEXTS.values()),
        indexer={"num_heads": 4} if sparse else None,
        mtp=None,
    )


def new_engine(*, sparse: bool, new: int) -> EngineCore:
    """Random weights; those that both sides have are not the same, and need not be."""
    model = Decoder(config_of(sparse=sparse), dtype=torch.bfloat16)
    model.init_weights(0)
    longest = max(CONTEXTS.values()) + 1 + new
    return EngineCore(model, EngineConfig(max_running=1, max_context=longest, dtype="bfloat16"))


def step_seconds(core: EngineCore, context: int, new: int) -> list[float]:
    """Seconds of each step that decodes after `context` tokens."""
    vocabulary = core.model.config.vocab_size
    ids = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(context))
    core.forget_prefixes()
    core.hold_noise(ids.tolist())
    # One token behind what is held, which the first step computes.
    prompt = (*ids.tolist(), 1)
    core.add(GenerationRequest("one", prompt, SamplingParams(new + 1, seed=0), timeout_s=600.0))
    seconds = []
    while core.has_work:
        began = time.perf_counter()
        for ended in core.step():
            if not isinstance(ended, GenerationResult):
                raise RuntimeError(f"not a result: {ended}")
            if ended.reused_tokens != context:
                raise RuntimeError(f"{ended.reused_tokens} of {context} tokens were in the cache")
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def growth(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of a straight line through both on log scales."""
    x, y = [math.log(n) for n in lengths], [math.log(s) for s in seconds]
    x_mean, y_mean = statistics.fmean(x), statistics.fmean(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)


def measure(rounds: int, new: int, say: Callable[[str], None]) -> dict[str, float]:
    """Metrics: decode_ms_*, speedup_sparse_*, exponent_*.

    Args:
        rounds: of both sides in turns.
        new: decoded tokens of each.
        say: takes a line about what was found.
    """
    engines = {name: new_engine(sparse=name == "sparse", new=new) for name in ("sparse", "dense")}
    metrics: dict[str, float] = {}
    for label, context in CONTEXTS.items():
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, core in engines.items():
                found[name].append(statistics.median(step_seconds(core, context, new)))
        for name, seconds in found.items():
            metrics[f"decode_ms_{name}_{label}"] = 1000 * statistics.median(seconds)
        ratios = [b / a for a, b in zip(found["sparse"], found["dense"], strict=True)]
        metrics[f"speedup_sparse_{label}"] = statistics.median(ratios)
        sparse, dense = (metrics[f"decode_ms_{name}_{label}"] for name in ("sparse", "dense"))
        say(f"latent attention, context {label}: sparse {sparse:.2f} ms, dense {dense:.2f} ms")
    for name in engines:
        times = [metrics[f"decode_ms_{name}_{label}"] for label in CONTEXTS]
        metrics[f"exponent_{name}"] = growth(list(CONTEXTS.values()), times)
    return metrics
