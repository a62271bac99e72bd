"""headrace's engine as a peer, and what this machine could do at most with the same threads.

`run` is timed, steps that only decode apart; `rates` measures memory and matrix products; `turns`
counts what sessions of many turns prefill.
"""

import functools
import time
from typing import Any

import torch
from lines import expect, options, serve, waves
from torch import Tensor

from headrace import ops
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.model.checkpoint import load_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.presets import count_parameters
from headrace.ops import packed_linear
from headrace.ops.packed import PackedMatrix

READ_BYTES = 1 << 31
"""Of the buffer that is read: more than fits any cache."""
SQUARE = 2048
REPEATS = 3


def run(
    core: EngineCore, prompts: list[list[int]], new: int, concurrency: int, seed: int
) -> dict[str, Any]:
    """Seconds in all, and the seconds and tokens of the steps that computed no prompt."""
    sampling = SamplingParams(max_tokens=new)
    decode_s, decode_tokens, sampled = 0.0, 0, 0
    began = time.perf_counter()
    for number, wave in enumerate(waves(prompts, concurrency)):
        for i, prompt in enumerate(wave):
            request = GenerationRequest(
                f"{seed}-{number}-{i}", tuple(prompt), sampling, timeout_s=3600.0
            )
            core.add(request)
        before = core.stats()
        while core.has_work:
            started = time.perf_counter()
            for ended in core.step():
                if not isinstance(ended, GenerationResult):
                    raise RuntimeError(f"not a result: {ended}")
                sampled += sum(len(span.ids) for span in ended.spans)
            took = time.perf_counter() - started
            after = core.stats()
            if after.tokens_prefilled == before.tokens_prefilled:
                decode_s += took
                decode_tokens += after.tokens_sampled - before.tokens_sampled
            before = after
    seconds = time.perf_counter() - began
    expect(sampled, new * len(prompts))
    return {"seconds": seconds, "decode_s": decode_s, "decode_tokens": decode_tokens}


def turns(core: EngineCore, sessions: int, count: int, added: int, new: int) -> dict[str, Any]:
    """Prompt tokens computed in all turns but the first, over those that were new in them."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = core.model.config.vocab_size
    texts: list[list[int]] = [[] for _ in range(sessions)]
    prefilled = 0
    for turn in range(count):
        if turn == 1:
            prefilled = core.stats().tokens_prefilled
        for i, text in enumerate(texts):
            text += torch.randint(100, vocabulary, (added,), generator=generator).tolist()
            sampling = SamplingParams(new)
            core.add(
                GenerationRequest(str(i), tuple(text), sampling, timeout_s=3600.0, session=str(i))
            )
        while core.has_work:
            for ended in core.step():
                if not isinstance(ended, GenerationResult):
                    raise RuntimeError(f"not a result: {ended}")
                texts[int(ended.id)] += [token for span in ended.spans for token in span.ids]
    computed = core.stats().tokens_prefilled - prefilled
    return {"prefill_per_new_token": computed / (sessions * (count - 1) * added)}


class Rates:
    """Measures what bounds decoding of a model: reading memory, and multiplying `rows` rows."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        # Written once: pages that were never touched are all the same page of zeros.
        self._buffer = torch.ones(READ_BYTES // 4)
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._rows = rows
        # As much as the weights, which a large shared cache may hold from step to step.
        self._again = self._buffer[: 2 * count_parameters(config).active // 4]
        self._square = torch.ones(SQUARE, SQUARE, dtype=torch.bfloat16)
        self._shapes = [
            torch.ones(outputs, inputs, dtype=torch.bfloat16)
            for outputs, inputs in (
                (heads, hidden),
                (inner, hidden),
                (hidden, inner),
                (config.vocab_size, hidden),
            )
        ]
        self._packed = [PackedMatrix.pack(m, "bfloat16") for m in (*self._shapes, self._square)]

    def measure(self) -> dict[str, Any]:
        """The best of several ways and repeats, per second.

        `read_bytes` of a buffer larger than caches, `reread_bytes` of one as large as the weights,
        `matmul_flops`.
        """
        read, again = (
            part.nbytes / least(part.sum, lambda part=part: torch.dot(part, part))
            for part in (self._buffer, self._again)
        )
        best = 0.0
        for weight, packed in zip((*self._shapes, self._square), self._packed, strict=True):
            for rows in (self._rows, SQUARE) if weight is self._square else (self._rows,):
                x = torch.ones(rows, weight.shape[1], dtype=torch.bfloat16)
                best = max(best, 2.0 * rows * weight.numel() / self._seconds(x, weight, packed))
        return {"read_bytes": read, "reread_bytes": again, "matmul_flops": best}

    def _seconds(self, x: Tensor, weight: Tensor, packed: PackedMatrix) -> float:
        return least(lambda: torch.mm(x, weight.T), lambda: packed_linear(x, packed))


def least(*ways: Any) -> float:
    """Seconds of the fastest call of any way."""
    best = float("inf")
    for _ in range(REPEATS):
        for way in ways:
            began = time.perf_counter()
            way()
            best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    given = options()
    torch.set_num_threads(given["threads"])
    ops.prepare("cpu")
    model = load_checkpoint(given["model"], dtype=getattr(torch, given["dtype"]))
    config = model.config
    rows = given["max_running"]
    core = EngineCore(
        model,
        EngineConfig(
            max_running=rows, max_context=given["max_context"], dtype=given["dtype"], seed=0
        ),
    )
    rates = functools.cache(lambda: Rates(config, rows))
    serve(
        given,
        {
            "run": lambda **arguments: run(core, **arguments),
            "turns": lambda **arguments: turns(core, **arguments),
            "rates": lambda: rates().measure(),
        },
    )


if __name__ == "__main__":
    main()
