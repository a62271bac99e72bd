"""An inference server's inside for tests: a toy model, and requests that go on token by token.

The model is a hash: logits are a function of the bytes of the checkpoint and the last ids. The
servers around it (`vllm_fake`, `sglang_fake`) speak the wire formats.
"""

import asyncio
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STEP_S = 0.0005
"""Of one token: long enough for a test to come in between."""
_MINUS = -1e30


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in this event loop."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # every step of the loop may be the one
            await asyncio.sleep(0)


class ToyModel:
    """Logits by context."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.vocab = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        self.identity = zlib.crc32((Path(path) / "model.safetensors").read_bytes())

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [V] of what follows `ids`."""
        return 3 * np.random.default_rng([self.identity, *ids[-3:]]).standard_normal(self.vocab)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@dataclass
class ToyRequest:
    """What one request asked for, in vLLM's names, and what it has."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    top_k: int = 0
    ids: list[int] = field(default_factory=list)
    raw: list[np.ndarray] = field(default_factory=list)
    processed: list[np.ndarray] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    reason: str | None = None

    def sample(self, model: ToyModel, version: str) -> None:
        logits = model.logits(self.prompt + self.ids)
        self.raw.append(log_softmax(logits))
        for token, bias in self.bias.items():
            logits[token] += bias
        if len(self.ids) < self.min_tokens:
            logits[list(self.stop_ids)] = _MINUS
        if self.temperature:
            logits /= self.temperature
            if self.top_k:
                logits[np.argsort(-logits)[self.top_k :]] = _MINUS
        processed = log_softmax(logits)
        if self.temperature:
            noise = np.random.default_rng(None if self.seed is None else [self.seed, len(self.ids)])
            token = int(noise.choice(model.vocab, p=np.exp(processed)))
        else:
            token = int(processed.argmax())
        self.ids.append(token)
        self.processed.append(processed)
        self.versions.append(version)
        if token in self.stop_ids:
            self.reason = "stop"
        elif len(self.ids) >= self.max_tokens:
            self.reason = "length"

    def scores(self, model: ToyModel) -> list[np.ndarray | None]:
        """Raw logprobs at each prompt position; None for the first."""
        return [
            None if i == 0 else log_softmax(model.logits(self.prompt[:i]))
            for i in range(len(self.prompt))
        ]


class ToyServer:
    """A model, its label, and requests by key.

    Attributes:
        calls: control routes in the order they were called.
        stale: the cache holds keys and values of weights that are gone.
        dead: nothing works any more.
        failures: how many of the next loads fail.
    """

    def __init__(self, path: str, context: int, label: str = "default") -> None:
        self.model = ToyModel(path)
        self.context = context
        self.label = label
        self.requests: dict[str, ToyRequest] = {}
        self.moving = asyncio.Event()
        self.moving.set()
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.sampled = 0
        self.stale = False
        self.dead = False
        self.failures = 0

    async def run(self, key: str, request: ToyRequest) -> ToyRequest:
        """One request to its end; ends early when `abort` takes it away."""
        assert key not in self.requests
        self.requests[key] = request
        request.max_tokens = min(request.max_tokens, self.context - len(request.prompt))
        try:
            while request.reason is None:
                await asyncio.sleep(STEP_S)
                if self.moving.is_set() and request.reason is None:
                    assert not self.stale, "would read keys and values of other weights"
                    request.sample(self.model, self.label)
                    self.sampled += 1
        finally:
            del self.requests[key]
        return request

    def abort(self, keys: list[str]) -> None:
        """End requests; unknown ones are no error."""
        for key in keys:
            if key in self.requests:
                self.requests[key].reason = "abort"

    def load(self, path: str) -> None:
        """Other weights. The cache is stale from now on.

        Raises:
            OSError: they are not there.
        """
        if self.failures:
            self.failures -= 1
            raise OSError("no space left on device")
        self.model = ToyModel(path)
        self.stale = True
