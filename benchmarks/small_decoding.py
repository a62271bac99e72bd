"""Decoding of small random models in float32 on one thread, against transformers' `generate`.

The quickstart's shape and a larger one, sixteen requests together, in this process. Rounds
alternate, so that load from elsewhere hits both sides alike, and a ratio is the median over rounds
of that round's times. The engine runs a second time without its compiled step, as on a machine that
has no C compiler.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from transformers.utils import logging

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder

CONCURRENCY = 16
PROMPT, NEW = 64, 96


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> ModelConfig:
    """A llama with tied embeddings."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=512,
        tie_embeddings=True,
    )


SHAPES = {
    "quickstart": (shape(192, 512, 4, 6, 6, 512), 5, 9),
    "medium": (shape(384, 1024, 8, 6, 2, 8192), 2, 5),
}
"""By name: the shape, and rounds with `--quick` and without."""


def new_prompts(vocab: int, seed: int) -> torch.Tensor:
    """[CONCURRENCY, PROMPT] random ids, other ones each round, so that no prefix is ever reused."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (CONCURRENCY, PROMPT), generator=generator)


def run_engine(core: EngineCore, prompts: torch.Tensor, new: int) -> float:
    """Seconds for the whole batch."""
    sampling = SamplingParams(max_tokens=new)
    began = time.perf_counter()
    for i, prompt in enumerate(prompts.tolist()):
        core.add(GenerationRequest(f"r{i}", tuple(prompt), sampling, timeout_s=600.0))
    sampled = 0
    while core.has_work:
        for ended in core.step():
            if not isinstance(ended, GenerationResult):
                raise RuntimeError(f"not a result: {ended}")
            sampled += sum(len(span.ids) for span in ended.spans)
    took = time.perf_counter() - began
    if sampled != len(prompts) * new:
        raise RuntimeError(f"the engine sampled {sampled} tokens, not {len(prompts) * new}")
    return took


@torch.inference_mode()
def run_transformers(model: Any, prompts: torch.Tensor, new: int) -> float:
    """Seconds for the whole batch."""
    began = time.perf_counter()
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=0,
    )
    took = time.perf_counter() - began
    if ids.shape != (len(prompts), PROMPT + new):
        raise RuntimeError(f"transformers returned {tuple(ids.shape)}")
    return took


def measure(config: ModelConfig, rounds: int, new: int) -> tuple[dict[str, float], bool]:
    """Metrics of one model, and whether the compiled step was in use."""
    from transformers import LlamaForCausalLM

    model = Decoder(config, dtype=torch.float32)
    model.init_weights(0)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, folder + "/model")
        theirs = LlamaForCausalLM.from_pretrained(folder + "/model", dtype=torch.float32).eval()
    sizes = EngineConfig(max_running=CONCURRENCY, max_context=PROMPT + NEW)
    core = EngineCore(model, sizes)
    plain = EngineCore(model, msgspec.structs.replace(sizes, compiled=False))
    sides = {
        "engine": functools.partial(run_engine, core),
        "transformers": functools.partial(run_transformers, theirs),
        "engine_without_compiler": functools.partial(run_engine, plain),
    }
    for i, run in enumerate(sides.values()):
        run(new_prompts(config.vocab_size, -1 - i), 2)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name, run in sides.items():
            seconds[name].append(run(new_prompts(config.vocab_size, i), new))
    tokens = CONCURRENCY * new
    metrics = {
        f"tokens_per_s_{name}_c16": tokens / statistics.median(times)
        for name, times in seconds.items()
    }
    for name, key in (("engine", ""), ("engine_without_compiler", "_without_compiler")):
        ratios = [b / a for a, b in zip(seconds[name], seconds["transformers"], strict=True)]
        metrics[f"ratio_vs_transformers_c16{key}"] = statistics.median(ratios)
        metrics[f"ratio_lowest_round{key}"] = min(ratios)
    return metrics, core.compiled


def measure_small(quick: bool, say: Callable[[str], None]) -> dict[str, float]:
    """Metrics of all shapes, named *_quickstart and *_medium.

    Args:
        quick: fewer rounds.
        say: takes a line about each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    metrics: dict[str, float] = {}
    for name, (config, few, many) in SHAPES.items():
        rounds = few if quick else many
        found, compiled = measure(config, rounds, NEW)
        metrics |= {f"{key}_{name}": value for key, value in found.items()}
        ratio = found["ratio_vs_transformers_c16"]
        step = "compiled step" if compiled else "torch only"
        say(f"small model {name}: {ratio:.2f} x transformers, {step}, {rounds} rounds")
    torch.set_num_threads(threads)
    return metrics
