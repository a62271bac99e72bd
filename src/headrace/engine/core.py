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
from headrace.engine.config import EngineConfig, EngineStats
from headrace.engine.grouped_cache import GroupedCache
from headrace.engine.latent_cache import LatentCache
from headrace.engine.live import Live, check
from headrace.engine.sampling import SamplingBatch
from headrace.engine.slots import SlotTable, Tokens, common_prefix
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.model.checkpoint import load_weights_into
from headrace.model.decoder import Decoder
from headrace.model.linear import store_input_major
from headrace.rollout.types import FinishReason

_MIN_AWAITED = 32
"""Wait for a neighbour's prefill to copy from only if it saves at least this many tokens."""


class GenerationFailure(NamedTuple):
    """A request that ended without a result through no fault of its own."""

    id: str
    code: str
    message: str


class EngineCore:
    """Continuous batching over `model`. Not thread-safe: one caller drives it.

    Args:
        model: the decoder, already holding the weights of `version`. The core takes it over: its
            fp32 CPU matrices are laid out anew in memory.
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
        store_input_major(model)
        self.config = config
        self._clock = clock
        self._vocab = shape.vocab_size
        self._cache = _new_cache(model, config)
        self._compiled = CompiledStep.create(model, self._cache) if config.compiled else None
        slots = config.max_slots
        self._max_running = min(config.max_running, slots)
        self._live: list[Live | None] = [None] * slots
        # A running slot has known == held + 1: the newest token is the next input.
        self._slots = SlotTable(self._cache, slots)
        self._running = 0
        self._prefilling = 0
        self._waiting: deque[Live] = deque()
        self._open: dict[str, Live] = {}
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
        check(request, vocab=self._vocab, max_context=self.config.max_context)
        if request.id in self._open:
            raise EngineError(EngineError.INVALID, f"id {request.id!r} is in use")
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
        live = Live(request, seed=seed, limit=min(sampling.max_tokens, room), now=self._clock())
        self._open[request.id] = live
        self._waiting.append(live)
        heapq.heappush(self._deadlines, (live.deadline, request.id))

    def abort(self, request_id: str) -> None:
        """End a request early; the next `step` returns what it has. Unknown ids are ignored."""
        if request_id in self._open:
            self._end_early(request_id, FinishReason.ABORTED)

    def collect(self) -> list[GenerationResult | GenerationFailure]:
        """What ended outside `step` (aborts) and was not returned yet."""
        ended, self._ended = self._ended, []
        return ended

    @torch.no_grad()
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
            for slot in np.flatnonzero(self._slots.known):
                self._slots.clear(int(slot))
            self._poisoned = False
        active = self._active
        self._stats.tokens_recomputed += int(self._slots.held[:active].sum())
        order = self._slots.drop_held(active)
        self._live[:active] = [self._live[i] for i in order]
        self._prefilling, self._running = active, 0
        self._batch = None

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

    def _finish(self, live: Live, reason: FinishReason) -> None:
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
        self._slots.touch(slot)
        if slot < self._running:
            self._running -= 1
            self._swap(slot, self._running)
            slot = self._running
            self._swap(slot, slot + self._prefilling)
        else:
            self._prefilling -= 1
            self._swap(slot, self._active)

    def _swap(self, a: int, b: int) -> None:
        self._slots.swap(a, b)
        self._live[a], self._live[b] = self._live[b], self._live[a]

    # -- admission ------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests slots, first come first served, best prefix first.

        A request that shares much of its prompt with one just admitted waits for that one,
        then copies: a group of rollouts of one prompt computes it once.
        """
        chosen: list[tuple[int, Live, Tokens]] = []
        passed: list[Live] = []
        awaited: list[Tokens] = []
        room = self._max_running - self._running
        while self._waiting and len(chosen) < room and len(passed) < room:
            live = self._waiting.popleft()
            prompt = np.array(live.request.prompt_ids, dtype=np.int32)
            ready = int(self._slots.shared(prompt).max())
            if any(common_prefix(prompt[:-1], other) >= ready + _MIN_AWAITED for other in awaited):
                passed.append(live)
                continue
            awaited.append(prompt)
            chosen.append((len(prompt) - ready, live, prompt))
        self._waiting.extendleft(reversed(passed))
        chosen.sort(key=lambda item: item[0])
        for _, live, prompt in chosen:
            target = self._active
            self._stats.tokens_reused += self._slots.place(prompt, target)
            self._live[target] = live
            live.started = self._clock()
            live.stamp(self.version)
            self._prefilling += 1

    # -- computing ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Compute prompt tokens of the first prefilling slots, within the budget of one step."""
        first = self._running
        todo = (self._slots.known - self._slots.held)[first : self._active]
        count, width = _prefill_group(todo, self.config.prefill_tokens)
        rows = slice(first, first + count)
        todo = np.minimum(todo[:count], width)
        starts = self._slots.held[rows]
        columns = starts[:, None] + np.arange(width)
        inputs = self._slots.tokens[
            np.arange(first, first + count)[:, None], columns.clip(max=self.config.max_context)
        ]
        positions = torch.from_numpy(columns)
        self._cache.begin_extend(first, positions, todo.tolist(), fresh=not starts.any())
        hidden = self.model(
            torch.from_numpy(inputs.astype(np.int64)),
            positions.clamp(max=self.config.max_context - 1),
            self._cache,
        )
        self._slots.held[rows] += todo
        self._stats.tokens_prefilled += int(todo.sum())
        if self._slots.held[first] < self._slots.known[first]:
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
                self._slots.tokens[np.arange(n), self._slots.held[:n]].astype(np.int64)
            )[:, None]
            self._positions = torch.from_numpy(self._slots.held[:n].copy())[:, None]
        if self._compiled is not None:
            logits = self._compiled(self._next_ids.view(-1), self._positions.view(-1))
        else:
            self._cache.begin_decode(self._positions, int(self._slots.held[:n].max()) + 1)
            hidden = self.model(self._next_ids, self._positions, self._cache)
            logits = self.model.logits(hidden[:, 0])
        ids, logprobs = self._batch.sample(logits)
        self._slots.held[:n] += 1
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
        self._slots.tokens[slots, self._slots.known[slots]] = ids
        self._slots.known[slots] += 1
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

    def _fail(self, live: Live) -> None:
        """End a request whose logits are not finite; what it wrote must never be reused."""
        self._poisoned = True
        # `_release` left the slot just behind the active ones.
        self._slots.clear(self._active)
        del self._open[live.request.id]
        self._stats.requests_failed += 1
        self._ended.append(
            GenerationFailure(
                live.request.id,
                EngineError.FAILED,
                f"logits are not finite under weight version {self.version}",
            )
        )


def _new_cache(model: Decoder, config: EngineConfig) -> SlotCache:
    """An empty cache of the kind the model's attention needs."""
    shape, dtype = model.config, model.embed.weight.dtype
    layers, slots, length = shape.num_layers, config.max_slots, config.max_context
    if shape.latent is None:
        return GroupedCache(
            layers=layers,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            slots=slots,
            length=length,
            dtype=dtype,
        )
    indexed: list[int] = []
    if shape.indexer is not None:
        indexed = [layer for layer in range(layers) if not shape.shares_selection(layer)]
    return LatentCache(
        layers=layers,
        latent_dim=shape.latent.kv_rank,
        rope_dim=shape.latent.rope_dim,
        index_dim=0 if shape.indexer is None else shape.indexer.head_dim,
        index_layers=indexed,
        slots=slots,
        length=length,
        dtype=dtype,
    )


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
