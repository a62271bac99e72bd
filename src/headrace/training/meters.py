"""How fast training runs, and how much memory it takes: tokens/s, MFU, resident memory.

MFU is the share of this machine's own measured matrix-multiplication rate that the model's
necessary operations amount to. Necessary means: multiplications of the parameters a token uses, of
queries with visible (or selected) keys and of probabilities with values; nothing recomputed.
"""

import functools
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headrace.model.config import ModelConfig
from headrace.model.presets import count_parameters

_MATMUL_SIZE = 2048
_MATMUL_REPEATS = 5
_MIB = 2**20


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of one forward pass over one document of T tokens.

    A multiplication with an addition counts as two. `linear` and `attention` are for a token on
    average; `indexer` is the part of both that the lightning indexers take.
    """

    linear: float
    attention: float
    indexer: float

    @property
    def forward(self) -> float:
        """Per token."""
        return self.linear + self.attention


def forward_flops(config: ModelConfig, length: int, *, mtp_steps: int = 0) -> FlopCount:
    """Operations per token of a document of `length` tokens.

    Args:
        config: dense, latent, sparse, mixture of experts: whatever the decoder can be.
        length: >= 1; a token sees (length + 1) / 2 keys on average, at most top-k if selected.
        mtp_steps: multi-token prediction steps that are run, each with its own output projection.
    """
    if length < 1:
        raise ValueError(f"forward_flops: length {length} must be at least 1")
    count = _parameters(config)
    linear = 2.0 * count.active
    attention = indexer = 0.0
    for layer in range(config.num_layers):
        attend, index = _attention(config, length, selects=not config.shares_selection(layer))
        attention, indexer = attention + attend, indexer + index
    if config.indexer is not None:
        indexer += 2.0 * count.by_part.get("indexers", 0)
    for step in range(mtp_steps):
        attend, index = _attention(config, length, selects=step == 0)
        attention, indexer = attention + attend, indexer + index
        linear += 2.0 * _active_mtp(config) + 2.0 * config.hidden_size * config.vocab_size
    return FlopCount(linear, attention, indexer)


def training_flops(
    config: ModelConfig,
    length: int,
    *,
    mtp_steps: int = 0,
    trainable: Literal["all", "indexer", "all_but_indexer"] = "all",
) -> float:
    """Operations per token of one training step: forward, and twice that for what has gradients."""
    count = forward_flops(config, length, mtp_steps=mtp_steps)
    trained = {
        "all": count.forward,
        "indexer": count.indexer,
        "all_but_indexer": count.forward - count.indexer,
    }[trainable]
    return count.forward + 2.0 * trained


@functools.cache
def matmul_rate(dtype: torch.dtype, device: str = "cpu", threads: int = 0) -> float:
    """This machine's matrix-multiplication rate in FLOP/s; measured once per process.

    The best of a few products of two large square matrices, a fraction of a second in all.

    Args:
        dtype: of the matrices.
        device: where.
        threads: part of the cache key only; pass `torch.get_num_threads()`.
    """
    size = _MATMUL_SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_MATMUL_REPEATS + 1):
        started = time.perf_counter()
        torch.matmul(a, a)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


class StepMeter:
    """Counts the work of training steps until it is read.

    Args:
        config: of the model.
        mtp_steps: prediction steps that are trained.
        trainable: which parameters have gradients.
        bfloat16: what the matrix products are measured against.
        device: where they run.
        ranks: processes with as many threads each, working on the same batches.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        mtp_steps: int = 0,
        trainable: Literal["all", "indexer", "all_but_indexer"] = "all",
        bfloat16: bool = False,
        device: str = "cpu",
        ranks: int = 1,
    ) -> None:
        self._config = config
        self._mtp_steps = mtp_steps
        self._trainable: Literal["all", "indexer", "all_but_indexer"] = trainable
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        self._rate = ranks * matmul_rate(dtype, device, torch.get_num_threads())
        self._tokens = 0
        self._flops = 0.0

    def add(self, lengths: Iterable[int]) -> None:
        """A step on documents of these lengths."""
        for length in lengths:
            if length:
                self._tokens += length
                self._flops += length * training_flops(
                    self._config, length, mtp_steps=self._mtp_steps, trainable=self._trainable
                )

    def read(self, seconds: float) -> dict[str, float]:
        """tokens_per_s, mfu in [0, 1], memory_mb and peak_memory_mb; then starts afresh."""
        tokens, flops = self._tokens, self._flops
        self._tokens, self._flops = 0, 0.0
        return {
            "tokens_per_s": tokens / seconds,
            "mfu": flops / seconds / self._rate,
            **memory(),
        }


def memory() -> dict[str, float]:
    """Resident memory of this process now and at its most, in MiB; the device's peak on CUDA."""
    found = {
        "memory_mb": _resident_bytes() / _MIB,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if torch.cuda.is_available():
        found["device_peak_memory_mb"] = torch.cuda.max_memory_allocated() / _MIB
    return found


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


_parameters = functools.cache(count_parameters)


@functools.cache
def _active_mtp(config: ModelConfig) -> float:
    """Parameters one token is multiplied with in one prediction step."""
    if config.mtp is None:
        raise ValueError("mtp_steps of a model without prediction layers")
    one = _parameters(config).mtp / config.mtp.stored_layers
    moe = config.moe
    if moe is not None and config.feed_forward(config.num_layers) == "moe":
        expert = 3 * config.hidden_size * moe.intermediate_size
        one -= (moe.num_experts - moe.experts_per_token) * expert
    return one


@functools.lru_cache(maxsize=65536)
def _attention(config: ModelConfig, length: int, *, selects: bool) -> tuple[float, float]:
    """(attention with its indexer's scores, those scores alone) of one layer, per token."""
    visible = (length + 1) / 2
    latent, indexer = config.latent, config.indexer
    if latent is None:
        return 4.0 * config.num_heads * config.head_dim * visible, 0.0
    dense = 2.0 * config.num_heads * (config.head_dim + latent.value_dim)
    if indexer is None or length <= indexer.topk:
        # Everything visible is selected: the indexer need not be asked.
        return dense * visible, 0.0
    k = indexer.topk
    kept = (k * (k + 1) / 2 + (length - k) * k) / length
    absorbed = 2.0 * config.num_heads * (2 * latent.kv_rank + latent.rope_dim)
    scores = 2.0 * indexer.num_heads * indexer.head_dim * visible if selects else 0.0
    return absorbed * kept + scores, scores
