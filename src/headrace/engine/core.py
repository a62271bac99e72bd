"""The engine itself: a synchronous continuous batch over one decoder and one slot cache.

Each `step` admits waiting requests, prefills some of them and decodes one token for every running
one, so a request joins and leaves the batch at any step. It knows nothing of processes, sockets or
text; `worker` drives it and `client` is what others hold.

Slots are ordered: [running | prefilling | retained and empty]. Running slots being neighbours is
what lets a decode pass work on views of the cache. A finished request's slot keeps its keys and
values until the space is needed, and a prompt that starts like any held sequence copies or takes
over that prefix (several turns of one agent, several rollouts of one prompt). New weights make all
of it worthless: everything held is dropped and running requests compute their whole sequence again
before they sample their next token (law L8).
"""

import heapq
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.cache import SlotCache
from headrace.engine.compiled import CompiledStep
from headrace.engine.sampling import SamplingBatch
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.model.checkpoint import load_weights_into
from headrace.model.decoder import Decoder
from headrace.rollout.types import FinishReason, Span

_MIN_SHARED = 8
"""A shared prefix shorter than this is cheaper to compute than to copy."""
_MIN_AWAITED = 32
"""Wait for a neighbour's prefill to copy from only if it saves at least this many tokens."""


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


class GenerationFailure(NamedTuple):
    """A request that ended without a result through no fault of its own."""

    id: str
    code: str
    message: str


class _Live:
    """One request between arrival and end."""

    __slots__ = (
        "arrived",
        "deadline",
        "ids",
        "limit",
        "logprobs",
        "marks",
        "request",
        "seed",
        "started",
        "stop_ids",
    )

    def __init__(self, request: GenerationRequest, *, seed: int, limit: int, now: float) -> None:
        self.request = request
        self.seed = seed
        self.limit = limit
        self.stop_ids = frozenset(request.sampling.stop_ids)
        self.arrived = now
        self.started: float | None = None
        self.deadline = now + request.timeout_s
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        # (index of the first token, version): where each span begins.
        self.marks: list[tuple[int, int]] = []

    def stamp(self, version: int) -> None:
        """Tokens from here on come from `version`."""
        if self.marks and self.marks[-1][0] == len(self.ids):
            self.marks.pop()
        self.marks.append((len(self.ids), version))

    def spans(self, engine_id: str) -> tuple[Span, ...]:
        # A request that never left the queue has no marks, hence one end too many.
        ends = [start for start, _ in self.marks[1:]] + [len(self.ids)]
        return tuple(
            Span(tuple(self.ids[start:end]), tuple(self.logprobs[start:end]), version, engine_id)
            for (start, version), end in zip(self.marks, ends, strict=False)
            if end > start
        )


class EngineCore:
    """Continuous batching over `model`. Not thread-safe: one caller drives it.

    Args:
        model: the decoder, already holding the weights of `version`.
        config: sizes; max_context must not exceed the model's positions.
        version: stamp of the weights in `model`.
        clock: monotonic seconds, for deadlines and timings.

    Raises:
        ValueError: max_context is longer than the model's positions.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shape = model.config
        if config.max_context > shape.max_positions:
            raise ValueError(
                f"max_context {config.max_context} exceeds the model's {shape.max_positions} "
                "positions; lower it"
            )
        self.model = model.eval()
        self.config = config
        self._clock = clock
        self._vocab = shape.vocab_size
        self._cache = SlotCache(
            layers=shape.num_layers,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            slots=config.max_slots,
            length=config.max_context,
            dtype=next(model.parameters()).dtype,
        )
        self._compiled = CompiledStep.create(model, self._cache) if config.compiled else None
        slots = config.max_slots
        self._max_running = min(config.max_running, slots)
        self._live: list[_Live | None] = [None] * slots
        self._tokens = np.zeros((slots, config.max_context + 1), dtype=np.int32)
        # Tokens known and tokens whose keys and values are held, per slot. A running slot has
        # known == held + 1: the newest token is the next input.
        self._known = np.zeros(slots, dtype=np.int64)
        self._held = np.zeros(slots, dtype=np.int64)
        self._last_used = np.zeros(slots, dtype=np.int64)
        self._tick = 0
        self._running = 0
        self._prefilling = 0
        self._waiting: deque[_Live] = deque()
        self._open: dict[str, _Live] = {}
        self._ended: list[GenerationResult | GenerationFailure] = []
        self._deadlines: list[tuple[float, str]] = []
        self._batch: SamplingBatch | None = None
        self._next_ids = torch.empty(0, 1, dtype=torch.int64)
        self._positions = torch.empty(0, 1, dtype=torch.int64)
        self._poisoned = False
        first_seed = secrets.randbits(64) if config.seed is None else config.seed
        self._seeds = np.random.default_rng(first_seed)
        self._stats = EngineStats(version=version)

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._stats.version

    @property
    def compiled(self) -> bool:
        """Whether decoding runs through the compiled step."""
        return self._compiled is not None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return bool(self._open) or bool(self._ended)

    def stats(self) -> EngineStats:
        """A copy of the counters and the present load."""
        return msgspec.structs.replace(
            self._stats,
            waiting=len(self._waiting),
            running=self._running + self._prefilling,
        )

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; a later `step` returns its result.

        Raises:
            EngineError: INVALID, TOO_LONG or OVERLOADED; nothing was queued.
        """
        self._validate(request)
        # Whoever fits a free slot is admitted by the next step and does not count as waiting.
        if len(self._waiting) >= self.config.max_waiting + self._max_running - self._active:
            raise EngineError(
                EngineError.OVERLOADED, f"{len(self._waiting)} requests are waiting already"
            )
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(1 << 63))
        room = self.config.max_context - len(request.prompt_ids)
        live = _Live(request, seed=seed, limit=min(sampling.max_tokens, room), now=self._clock())
        self._open[request.id] = live
        self._waiting.append(live)
        heapq.heappush(self._deadlines, (live.deadline, request.id))

    def _validate(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        problem = None
        if request.id in self._open:
            problem = f"id {request.id!r} is in use"
        elif not request.prompt_ids:
            problem = "prompt_ids is empty"
        elif min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self._vocab:
            problem = f"prompt_ids holds an id outside the vocabulary of {self._vocab}"
        elif sampling.max_tokens < 1:
            problem = f"max_tokens is {sampling.max_tokens}; it must be >= 1"
        elif not 0 <= sampling.temperature <= 1e6:
            problem = f"temperature is {sampling.temperature}; it must be 0 (greedy) or positive"
        elif 0 < sampling.temperature < 1e-6:
            problem = f"temperature is {sampling.temperature}; use 0 for greedy"
        elif not 0 < sampling.top_p <= 1:
            problem = f"top_p is {sampling.top_p}; it must lie in (0, 1]"
        elif sampling.top_k < 0:
            problem = f"top_k is {sampling.top_k}; it must be >= 0 (0 keeps all)"
        elif not request.timeout_s > 0:
            problem = f"timeout_s is {request.timeout_s}; it must be positive"
        if problem is not None:
            raise EngineError(EngineError.INVALID, problem)
        if len(request.prompt_ids) >= self.config.max_context:
            raise EngineError(
                EngineError.TOO_LONG,
                f"prompt of {len(request.prompt_ids)} tokens leaves no room in the context of "
                f"{self.config.max_context}",
            )

    def abort(self, request_id: str) -> None:
        """End a request early; the next `step` returns what it has. Unknown ids are ignored."""
        if request_id in self._open:
            self._end_early(request_id, FinishReason.ABORTED)

    def collect(self) -> list[GenerationResult | GenerationFailure]:
        """What ended outside `step` (aborts) and was not returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def load_weights(self, path: str, version: int) -> None:
        """Switch to the checkpoint directory at `path`, between two steps.

        Everything held is dropped; running requests compute their sequence again and go on.

        Raises:
            EngineError: INVALID version.
            UserError: the checkpoint cannot be read or does not fit the model.
        """
        if version < 0:
            raise EngineError(EngineError.INVALID, f"version is {version}; it must be >= 0")
        started = time.perf_counter()
        try:
            load_weights_into(self.model, path)
        finally:
            # Whatever was read before a failure, keys and values are no longer to be trusted.
            self._drop_held()
        if not all(bool(p.sum().isfinite()) for p in self.model.parameters()):
            self._poisoned = True
        if self._compiled is not None:
            self._compiled.repack()
        self._stats.version = version
        for live in self._live:
            if live is not None:
                live.stamp(version)
        pause = time.perf_counter() - started
        self._stats.updates += 1
        self._stats.last_update_pause_s = pause
        self._stats.busy_s += pause

    def _drop_held(self) -> None:
        """Forget all keys and values; every running request becomes a prefilling one."""
        if self._poisoned:
            for slot in np.flatnonzero(self._known):
                self._cache.clear(int(slot))
            self._poisoned = False
        self._stats.tokens_recomputed += int(self._held[: self._active].sum())
        self._held[:] = 0
        self._prefilling += self._running
        self._running = 0
        self._batch = None
        # Neighbours of like length waste least padding; with nothing held, moving is free.
        order = np.argsort(self._known[: self._active], kind="stable")
        lives = [self._live[i] for i in order]
        self._live[: self._active] = lives
        self._tokens[: self._active] = self._tokens[order]
        self._known[: self._active] = self._known[order]

    @property
    def _active(self) -> int:
        return self._running + self._prefilling

    @torch.inference_mode()
    def step(self) -> list[GenerationResult | GenerationFailure]:
        """Admit, prefill, decode one token for every running request; returns what ended."""
        started = time.perf_counter()
        self._expire()
        # One cohort at a time: closing gaps reorders prefilling slots, so an open-ended cohort
        # could leave one of them waiting for ever.
        if self._waiting and not self._prefilling and self._running < self._max_running:
            self._admit()
        if self._prefilling:
            self._prefill()
        if self._running:
            self._decode()
        self._stats.busy_s += time.perf_counter() - started
        return self.collect()

    # -- ending ---------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            live = self._open.get(request_id)
            # An id may have been used again after its first request ended.
            if live is not None and live.deadline == deadline:
                self._end_early(request_id, FinishReason.DEADLINE)

    def _end_early(self, request_id: str, reason: FinishReason) -> None:
        live = self._open[request_id]
        if live.started is None:
            self._waiting.remove(live)
        else:
            self._release(self._live.index(live))
        self._finish(live, reason)

    def _finish(self, live: _Live, reason: FinishReason) -> None:
        del self._open[live.request.id]
        now = self._clock()
        self._stats.requests_finished += 1
        self._ended.append(
            GenerationResult(
                live.request.id,
                live.spans(self.config.engine_id),
                reason,
                queue_s=(now if live.started is None else live.started) - live.arrived,
                total_s=now - live.arrived,
            )
        )
        if len(self._deadlines) > 64 + 2 * len(self._open):
            self._deadlines = [(a.deadline, a.request.id) for a in self._open.values()]
            heapq.heapify(self._deadlines)

    def _release(self, slot: int) -> None:
        """Take the request out of `slot`, keeping what it holds, and close the gap it leaves."""
        self._batch = None
        self._live[slot] = None
        self._tick += 1
        self._last_used[slot] = self._tick
        if slot < self._running:
            self._running -= 1
            self._swap(slot, self._running)
            slot = self._running
            self._swap(slot, slot + self._prefilling)
        else:
            self._prefilling -= 1
            self._swap(slot, self._active)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._cache.swap(a, b, int(self._held[a]), int(self._held[b]))
        self._live[a], self._live[b] = self._live[b], self._live[a]
        for array in (self._tokens, self._known, self._held, self._last_used):
            array[[a, b]] = array[[b, a]]

    # -- admission ------------------------------------------------------------------------------

    def _shared(
        self, prompt: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Leading tokens of the prompt each slot has within its first `lengths`: [slots].

        The last prompt token is never counted: its logits must be computed.
        """
        limit = len(prompt) - 1
        n = len(lengths)
        equal = np.ones((n, limit + 1), dtype=bool)
        equal[:, :limit] = self._tokens[:n, :limit] == prompt[:limit]
        equal[:, limit] = False
        return np.minimum(equal.argmin(1), lengths)

    def _admit(self) -> None:
        """Give waiting requests slots, first come first served, best prefix first.

        A request that shares much of its prompt with one just admitted waits for that one,
        then copies: a group of rollouts of one prompt computes it once.
        """
        chosen: list[tuple[int, _Live, npt.NDArray[np.int32]]] = []
        passed: list[_Live] = []
        awaited: list[npt.NDArray[np.int32]] = []
        room = self._max_running - self._running
        while self._waiting and len(chosen) < room and len(passed) < room:
            live = self._waiting.popleft()
            prompt = np.array(live.request.prompt_ids, dtype=np.int32)
            ready = int(self._shared(prompt, self._held).max())
            if any(_common(prompt[:-1], other) >= ready + _MIN_AWAITED for other in awaited):
                passed.append(live)
                continue
            awaited.append(prompt)
            chosen.append((len(prompt) - ready, live, prompt))
        self._waiting.extendleft(reversed(passed))
        chosen.sort(key=lambda item: item[0])
        for _, live, prompt in chosen:
            self._place(live, prompt)

    def _place(self, live: _Live, prompt: npt.NDArray[np.int32]) -> None:
        """Move a request into the slot after the active ones, with the longest prefix held."""
        target = self._active
        shared = self._shared(prompt, self._held)
        source = int(shared.argmax())
        reused = int(shared[source])
        if reused < _MIN_SHARED:
            reused = 0
        if reused and source >= target and reused == self._held[source]:
            self._swap(source, target)
        else:
            idle = range(target, self.config.max_slots)
            # An empty slot first, then the one left alone longest; never the source if avoidable.
            victim = min(idle, key=lambda i: (reused and i == source, self._rank(i)))
            if victim == source:
                self._swap(source, target)
            else:
                self._held[victim] = 0
                self._swap(victim, target)
                if source == target:
                    source = victim
                self._cache.copy(source, target, reused)
        self._live[target] = live
        self._tokens[target, : len(prompt)] = prompt
        self._known[target] = len(prompt)
        self._held[target] = reused
        self._stats.tokens_reused += reused
        live.started = self._clock()
        live.stamp(self.version)
        self._prefilling += 1

    def _rank(self, slot: int) -> int:
        return int(self._last_used[slot]) if self._held[slot] else -1

    # -- computing ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Compute prompt tokens of the first prefilling slots, within the budget of one step."""
        first = self._running
        todo = (self._known - self._held)[first : self._active]
        count, width = _prefill_group(todo, self.config.prefill_tokens)
        rows = slice(first, first + count)
        todo = np.minimum(todo[:count], width)
        starts = self._held[rows]
        columns = starts[:, None] + np.arange(width)
        inputs = self._tokens[
            np.arange(first, first + count)[:, None], columns.clip(max=self.config.max_context)
        ]
        positions = torch.from_numpy(columns)
        longest = int((starts + todo).max())
        self._cache.begin_extend(first, positions, longest, fresh=not starts.any())
        hidden = self.model(
            torch.from_numpy(inputs.astype(np.int64)),
            positions.clamp(max=self.config.max_context - 1),
            self._cache,
        )
        self._held[rows] += todo
        self._stats.tokens_prefilled += int(todo.sum())
        if self._held[first] < self._known[first]:
            return
        last = hidden[torch.arange(count), torch.from_numpy(todo - 1)]
        batch = self._sampling_batch(first, count)
        ids, logprobs = batch.sample(self.model.logits(last))
        self._running += count
        self._prefilling -= count
        self._batch = None
        self._accept(first, ids.tolist(), logprobs.tolist())

    def _decode(self) -> None:
        """One token for every running slot."""
        n = self._running
        if self._batch is None:
            self._batch = self._sampling_batch(0, n)
            self._next_ids = torch.from_numpy(
                self._tokens[np.arange(n), self._held[:n]].astype(np.int64)
            )[:, None]
            self._positions = torch.from_numpy(self._held[:n].copy())[:, None]
        if self._compiled is not None:
            logits = self._compiled(self._next_ids.view(-1), self._positions.view(-1))
        else:
            self._cache.begin_decode(self._positions, int(self._held[:n].max()) + 1)
            hidden = self.model(self._next_ids, self._positions, self._cache)
            logits = self.model.logits(hidden[:, 0])
        ids, logprobs = self._batch.sample(logits)
        self._held[:n] += 1
        self._next_ids = ids[:, None]
        self._positions = self._positions + 1
        self._accept(0, ids.tolist(), logprobs.tolist())

    def _sampling_batch(self, first: int, count: int) -> SamplingBatch:
        lives = [live for live in self._live[first : first + count] if live is not None]
        return SamplingBatch(
            [live.request.sampling for live in lives],
            [live.seed for live in lives],
            [len(live.ids) for live in lives],
        )

    def _accept(self, first: int, ids: list[int], logprobs: list[float]) -> None:
        """Append one sampled token to each slot from `first` on, and end those that are done."""
        n = len(ids)
        slots = np.arange(first, first + n)
        self._tokens[slots, self._known[slots]] = ids
        self._known[slots] += 1
        self._stats.tokens_sampled += n
        done: list[tuple[int, FinishReason | None]] = []
        for i, live in enumerate(self._live[first : first + n]):
            assert live is not None
            token, logprob = ids[i], logprobs[i]
            if logprob != logprob:
                done.append((first + i, None))
                continue
            live.ids.append(token)
            live.logprobs.append(logprob)
            if token in live.stop_ids:
                done.append((first + i, FinishReason.STOP))
            elif len(live.ids) >= live.limit:
                done.append((first + i, FinishReason.LENGTH))
        # From the back, so that closing a gap never moves a slot that is still to be ended.
        for slot, reason in reversed(done):
            live = self._live[slot]
            assert live is not None
            self._release(slot)
            if reason is None:
                self._fail(live)
            else:
                self._finish(live, reason)

    def _fail(self, live: _Live) -> None:
        """End a request whose logits are not finite; what it wrote must never be reused."""
        self._poisoned = True
        # `_release` left the slot just behind the active ones.
        self._cache.clear(self._active)
        self._held[self._active] = 0
        del self._open[live.request.id]
        self._stats.requests_failed += 1
        self._ended.append(
            GenerationFailure(
                live.request.id,
                EngineError.FAILED,
                f"logits are not finite under weight version {self.version}",
            )
        )


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def _prefill_group(todo: npt.NDArray[np.int64], budget: int) -> tuple[int, int]:
    """How many leading rows to prefill together and how many tokens of each: (count, width).

    Rows are padded to the longest, so a row joins only while the padded size stays within the
    budget and padding within a quarter. A row alone may be cut to the budget.
    """
    count, width, useful = 1, int(todo[0]), int(todo[0])
    if width >= budget:
        return 1, budget
    for tokens in todo[1:].tolist():
        wider = max(width, tokens)
        padded = (count + 1) * wider
        if padded > budget or padded > 1.25 * (useful + tokens) + 64:
            break
        count, width, useful = count + 1, wider, useful + tokens
    return count, width
