"""What an engine is sized by and what it counts, as data that crosses process borders."""

import msgspec

USER_ERROR = "user_error"
"""Failure code whose message is a `UserError`'s."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of an engine.

    Attributes:
        engine_id: stamped on every span.
        max_slots: most sequences held at once, running and retained together.
        max_running: most requests in the batch at once; at most max_slots.
        max_context: most tokens of prompt + output.
        max_waiting: most requests waiting for a slot; one more is refused.
        prefill_tokens: most prompt tokens (padding included) computed per step, so that long
            prompts delay running requests by a bounded time.
        dtype: "float32" or "bfloat16", of weights and cache.
        compiled: decode through the compiled step where model and machine allow it.
        seed: of the draws of requests without a seed of their own; None takes one from the OS.
    """

    engine_id: str = "engine-0"
    max_slots: int = 64
    max_running: int = 64
    max_context: int = 1024
    max_waiting: int = 1024
    prefill_tokens: int = 512
    dtype: str = "float32"
    compiled: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_running", "max_context", "max_waiting", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig: {name} is {getattr(self, name)}; it must be >= 1")
        if self.max_context < 2:
            raise ValueError("EngineConfig: max_context must hold a prompt and an output token")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"EngineConfig: dtype {self.dtype!r} is not float32 or bfloat16")


class EngineStats(msgspec.Struct):
    """Counters since the start and the present load.

    Attributes:
        version: weight version in use.
        busy_s: seconds spent inside `step` and `load_weights`.
        tokens_sampled: tokens drawn.
        tokens_prefilled: tokens computed by prefill passes, without padding, recomputation
            after a weight update included.
        tokens_reused: prompt tokens whose keys and values were taken from a held sequence.
        tokens_recomputed: tokens computed again because the weights changed under a request.
        requests_finished: of any reason, aborts and deadlines included.
        requests_failed: ended without a result (non-finite logits).
        waiting: requests without a slot.
        running: requests holding one.
        updates: weight updates done.
        last_update_pause_s: seconds the last update kept every request from moving (loading; the
            recomputation after it is spread over the steps that follow).
    """

    version: int = 0
    busy_s: float = 0.0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    waiting: int = 0
    running: int = 0
    updates: int = 0
    last_update_pause_s: float = 0.0
