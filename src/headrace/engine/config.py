"""What an engine is sized by and what it counts, as data that crosses process borders."""

from typing import Literal

import msgspec

USER_ERROR = "user_error"
"""Failure code whose message is a `UserError`'s."""
UpdatePolicy = Literal["continue", "requeue"]
"""What becomes of running requests when the weights change: they compute what they have again and
go on, with a new span; or they begin again from their prompt, and nothing sampled is kept."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of an engine.

    Attributes:
        engine_id: stamped on every span.
        max_running: most requests in the batch at once.
        max_context: most tokens of prompt + output.
        max_waiting: most requests waiting to run; one more is refused.
        cache_tokens: tokens that the cache holds, of running requests and of finished ones whose
            prefixes may come again; 0 is room for max_running requests of max_context tokens.
        block_tokens: tokens of one block of the cache, the unit it is given out in.
        prefill_tokens: most prompt tokens computed per step while anything decodes, so that long
            prompts delay running requests by a bounded time.
        decode_slowdown: how many times longer a step may take because of the prompts computed in
            it: chunks of prompts follow the clock, between 16 and prefill_tokens. 0 bounds their
            tokens alone, and what is computed together does not depend on time.
        step_tokens: most tokens of a step; 0 is room for all running requests with their drafts
            and for prefill_tokens.
        dtype: "float32" or "bfloat16", of weights and cache.
        weights: "same" multiplies by weights of `dtype`; "int8" by 8-bit ones, with activations
            rounded to 8 bits per row, except the output projection. Half the memory traffic of
            bfloat16, at the price of logprobs that differ from the trainer's.
        draft_tokens: most tokens that the model's prediction layers draft per request and step, to
            be verified by the next pass (speculative decoding). Tokens stay those of plain
            decoding; how many a request drafts follows how many of its last ones stood. 0, or a
            model without such layers, drafts nothing.
        compiled: decode through the compiled step where model and machine allow it.
        deterministic: a request's tokens do not depend, to the bit, on what runs beside it.
        seed: of the draws of requests without a seed of their own; None takes one from the OS.
    """

    engine_id: str = "engine-0"
    max_running: int = 64
    max_context: int = 1024
    max_waiting: int = 1024
    cache_tokens: int = 0
    block_tokens: int = 16
    prefill_tokens: int = 512
    decode_slowdown: float = 0.0
    step_tokens: int = 0
    dtype: str = "float32"
    weights: str = "same"
    draft_tokens: int = 0
    compiled: bool = True
    deterministic: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_context", "max_waiting", "block_tokens", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig: {name} is {getattr(self, name)}; it must be >= 1")
        for name in ("cache_tokens", "step_tokens", "draft_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"EngineConfig: {name} is {getattr(self, name)}; it must be >= 0")
        if self.decode_slowdown and not 1 < self.decode_slowdown < float("inf"):
            raise ValueError(
                f"EngineConfig: decode_slowdown is {self.decode_slowdown}; use more than 1, or 0"
            )
        if self.max_context < 2:
            raise ValueError("EngineConfig: max_context must hold a prompt and an output token")
        if 0 < self.step_tokens <= self.max_running:
            raise ValueError(
                f"EngineConfig: step_tokens {self.step_tokens} must exceed max_running "
                f"{self.max_running}, or prompts would never be computed"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"EngineConfig: dtype {self.dtype!r} is not float32 or bfloat16")
        if self.weights not in ("same", "int8"):
            raise ValueError(f"EngineConfig: weights {self.weights!r} is not same or int8")

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        whole = -(-self.max_context // self.block_tokens)
        if self.cache_tokens:
            return max(1, self.cache_tokens // self.block_tokens)
        return self.max_running * whole

    @property
    def pass_tokens(self) -> int:
        """Most tokens of a step."""
        return self.step_tokens or self.max_running * (1 + self.draft_tokens) + self.prefill_tokens


class EngineStats(msgspec.Struct):
    """Counters since the start and the present load.

    Attributes:
        version: weight version in use.
        busy_s: seconds spent inside `step` and `load_weights`.
        tokens_sampled: tokens drawn.
        tokens_prefilled: prompt tokens computed, and tokens computed again after a weight update
            or a preemption.
        tokens_reused: prompt tokens whose keys and values were taken from a held sequence.
        tokens_recomputed: tokens computed again because the weights changed under a request.
        tokens_drafted: guesses of the prediction layers that were verified.
        tokens_accepted: of them, those that stood.
        requests_finished: of any reason, aborts and deadlines included.
        requests_failed: ended without a result (non-finite logits).
        waiting: requests that do not run.
        running: requests that do.
        preemptions: requests that gave up their blocks to one ahead of them, to go on later.
        blocks: blocks of the cache.
        blocks_free: of them, those that hold nothing.
        blocks_cached: of them, those that hold a prefix which may come again.
        updates: weight updates done.
        last_update_pause_s: seconds the last update kept every request from moving (loading; the
            recomputation after it is spread over the steps that follow).
        update_bytes: bytes of weights that updates wrote to the model.
        update_tensors: tensors these were; updates from shared memory write only what changed.
        requests_restarted: times a request began again from its prompt because of an update.
        cache_bytes: bytes of all blocks; the system commits those that were ever used.
        weights_bytes: bytes of the parameters and of their packed copies.
        handovers: prefixes given to, or taken from, an engine with the other role.
        handovers_stale: prefixes refused because they were computed by other weights or for a
            cache of another layout.
        handovers_failed: prefixes whose file could not be written, or read whole.
        handover_bytes: keys and values that crossed over.
    """

    version: int = 0
    busy_s: float = 0.0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    waiting: int = 0
    running: int = 0
    preemptions: int = 0
    blocks: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    updates: int = 0
    last_update_pause_s: float = 0.0
    update_bytes: int = 0
    update_tensors: int = 0
    requests_restarted: int = 0
    cache_bytes: int = 0
    weights_bytes: int = 0
    handovers: int = 0
    handovers_stale: int = 0
    handovers_failed: int = 0
    handover_bytes: int = 0
