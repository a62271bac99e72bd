"""What crosses the door of an engine: token ids in; token ids, logprobs and versions out.

Engines know nothing of text, chat templates, sessions' meaning or training.
"""

from typing import Protocol

import msgspec

from headrace.rollout.types import FinishReason, Span


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample.

    Attributes:
        max_tokens: most tokens to sample, >= 1.
        temperature: 0 means greedy. Logprobs are those of the distribution actually sampled from
            (after temperature, top-k and top-p); greedy reports the temperature-1 logprob.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely ids; 0 keeps all.
        seed: makes the request's draws a function of this seed alone; None draws one.
        stop_ids: sampling ends after one of these, which is kept as the last output id.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        id: unique; reused to abort.
        prompt_ids: at least one token.
        sampling: see SamplingParams.
        timeout_s: seconds after arrival at which it ends with FinishReason.DEADLINE.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float = 60.0


class GenerationResult(msgspec.Struct, frozen=True):
    """Everything sampled for one request; spans may be empty after an abort or deadline."""

    id: str
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    queue_s: float = 0.0
    """Seconds from arrival to the first prefill."""
    total_s: float = 0.0
    """Seconds from arrival to the end."""


class EngineError(Exception):
    """A request an engine refuses. `code` is one of the constants below."""

    INVALID = "invalid_request"
    TOO_LONG = "context_length_exceeded"
    OVERLOADED = "overloaded"
    CLOSED = "engine_closed"
    FAILED = "generation_failed"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineClient(Protocol):
    """What the gateway holds. Implemented by the process client, by tests' scripted engines and
    later by vLLM and SGLang adapters."""

    @property
    def weight_version(self) -> int:
        """Newest version all engines behind this client have loaded."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of prompt + output one request may have."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run one request to its end.

        Raises:
            EngineError: refused (invalid, too long, overloaded, closed).
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; its `generate` returns with FinishReason.ABORTED. Unknown: no-op."""
        ...

    async def load_weights(self, path: str, version: int) -> None:
        """Switch to the checkpoint directory at `path`, stamped `version`, while requests run."""
        ...
