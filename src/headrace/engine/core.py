"""The engine itself: a synchronous continuous batch over one decoder and one paged cache.

Each `step` is one pass of the model over the tokens that the scheduler chose: one for every running
request and pieces of prompts beside them, so a request joins and leaves the batch at any step. The
core knows nothing of processes, sockets or text; `worker` drives it and `client` is what others
hold.

What a finished request computed stays in the prefix tree until its blocks are needed, and a prompt
that starts like anything held computes only the rest (several turns of one agent, several rollouts
of one prompt). New weights make all of it worthless: everything held is dropped and running
requests compute their whole sequence again before they sample their next token (law L8), or begin
again from their prompt. The weights are always one whole version: an update that is refused has
changed nothing, and one that fails halfway ends the engine.
"""

import heapq
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import NamedTuple, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.engine.blocks import BlockPool
from headrace.engine.compiled import CompiledStep
from headrace.engine.config import EngineConfig, EngineStats, UpdatePolicy
from headrace.engine.drafting import Computed, Drafter
from headrace.engine.grouped_cache import GroupedCache
from headrace.engine.latent_cache import LatentCache
from headrace.engine.live import Live, Row, check
from headrace.engine.packed_model import PackedProducts
from headrace.engine.paged_cache import PagedBatch, PagedCache, block_tables
from headrace.engine.prefix import PrefixTree
from headrace.engine.sampling import SamplingBatch
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk, Sequence
from headrace.engine.speculation import matching_prefix
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.model.checkpoint import load_weights_into
from headrace.model.decoder import Decoder
from headrace.model.linear import store_input_major
from headrace.model.shared_folder import is_published
from headrace.model.shared_weights import LoadReport, load_shared_into
from headrace.ops import row_independent
from headrace.rollout.types import FinishReason


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
        ValueError: max_context is longer than the model's positions, or deterministic is asked of
            a model with latent attention.
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
        if config.deterministic and shape.latent is not None:
            raise ValueError(
                "deterministic needs products that do not depend on the batch, which latent "
                "attention and experts do not have yet; leave it out for this model"
            )
        if config.max_context > shape.max_positions:
            raise ValueError(
                f"max_context {config.max_context} exceeds the model's {shape.max_positions} "
                "positions; lower it"
            )
        self.model = model.eval()
        self._products = _pack(model, config)
        self.config = config
        self._clock = clock
        self._vocab = shape.vocab_size
        self._cache = _new_cache(model, config)
        self._drafter: Drafter | None = None
        if config.draft_tokens and model.mtp is not None:
            self._drafter = Drafter(model, self._cache, self._logits)
        self._compiled = None
        if config.compiled and self._products is None:
            self._compiled = CompiledStep.create(model, self._cache, config.max_context)
        self._pool = BlockPool(config.blocks, config.block_tokens)
        self._tree = PrefixTree(self._pool, version)
        self._scheduler = Scheduler(
            self._pool,
            self._tree,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_context=config.max_context,
            step_tokens=config.pass_tokens,
            prefill_tokens=config.prefill_tokens,
        )
        self._open: dict[str, Live] = {}
        self._ended: list[GenerationResult | GenerationFailure] = []
        self._deadlines: list[tuple[float, str]] = []
        self._batch: tuple[list[Live], SamplingBatch] = ([], SamplingBatch([], [], []))
        self._poisoned = False
        # Checksums of the published version that the model holds, by tensor; empty if it is none.
        self._held: dict[str, int] = {}
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
        scheduler = self._scheduler
        return msgspec.structs.replace(
            self._stats,
            waiting=scheduler.waiting,
            running=scheduler.running,
            preemptions=scheduler.preempted,
            tokens_prefilled=scheduler.prefilled_tokens,
            tokens_reused=scheduler.reused_tokens,
            tokens_recomputed=scheduler.dropped_tokens,
            blocks=self._pool.blocks,
            blocks_free=self._pool.free,
            blocks_cached=self._tree.held,
        )

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; a later `step` returns its result.

        Raises:
            EngineError: INVALID, TOO_LONG or OVERLOADED; nothing was queued.
        """
        check(request, vocab=self._vocab, max_context=self.config.max_context)
        if request.id in self._open:
            raise EngineError(EngineError.INVALID, f"id {request.id!r} is in use")
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(1 << 63))
        now = self._clock()
        room = self.config.max_context - len(request.prompt_ids)
        sequence = Sequence(
            request.id,
            np.array(request.prompt_ids, dtype=np.int32),
            limit=min(request.sampling.max_tokens, room),
            session=request.session or request.id,
            priority=request.priority,
            arrived=now,
            deadline=now + request.timeout_s,
            takes_over=request.sampling.prompt_logprobs is None,
        )
        self._scheduler.add(sequence)
        live = Live(request, sequence, seed=seed)
        self._open[request.id] = live
        heapq.heappush(self._deadlines, (sequence.deadline, request.id))

    def abort(self, request_id: str) -> None:
        """End a request early; the next `step` returns what it has. Unknown ids are ignored."""
        live = self._open.get(request_id)
        if live is not None:
            self._finish(live, FinishReason.ABORTED)

    def collect(self) -> list[GenerationResult | GenerationFailure]:
        """What ended outside `step` (aborts) and was not returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def forget_prefixes(self) -> None:
        """Give up what is held of ended requests, for measurements that must not find it."""
        self._tree.reset(self.version)

    @torch.no_grad()
    def load_weights(self, path: str, version: int, policy: UpdatePolicy = "continue") -> None:
        """Switch to other weights of the same model, between two steps.

        Everything held is dropped. What becomes of running requests is up to `policy`.

        Args:
            path: a checkpoint directory, read as a whole; or what `shared_weights.publish`
                returned, of which only tensors are copied that differ from the last such update.
            version: their stamp; that of a published version is its own.
            policy: "continue" computes the running sequences again and goes on with a new span;
                "requeue" lets them begin again from their prompts, with the same seed and deadline.

        Raises:
            EngineError: INVALID version or policy.
            UserError: the weights cannot be read or do not fit the model. Nothing has changed, and
                requests go on as if this had not been called.
            RuntimeError: a checkpoint failed when a part of it was already in the model. This core
                must not be used any more.
        """
        if version < 0:
            raise EngineError(EngineError.INVALID, f"version is {version}; it must be >= 0")
        if policy not in get_args(UpdatePolicy):
            raise EngineError(
                EngineError.INVALID,
                f"policy is {policy!r}; it must be one of {', '.join(get_args(UpdatePolicy))}",
            )
        started = time.perf_counter()
        if is_published(path):
            report = load_shared_into(self.model, path, self._held, version=version)
        else:
            report = self._load_checkpoint(path)
        self._scheduler.drop_computed(version, restart=policy == "requeue")
        if report.tensors_changed:
            self._poisoned = not all(bool(p.sum().isfinite()) for p in self.model.parameters())
            for packed in (self._compiled, self._products):
                if packed is not None:
                    packed.repack()
        self._switch_requests(version, restart=policy == "requeue")
        pause = time.perf_counter() - started
        stats = self._stats
        stats.version = version
        stats.updates += 1
        stats.update_bytes += report.bytes_copied
        stats.update_tensors += report.tensors_changed
        stats.last_update_pause_s = pause
        stats.busy_s += pause

    def _load_checkpoint(self, path: str) -> LoadReport:
        """Load a checkpoint directory: all of it, or nothing."""
        started = time.perf_counter()
        tensors = list(self.model.hf_tensors().values())
        # A parameter and the views of it share one count of writes.
        writes = [tensor._version for tensor in tensors]
        try:
            load_weights_into(self.model, path)
        except Exception as error:
            if writes == [tensor._version for tensor in tensors]:
                raise
            raise RuntimeError(
                f"checkpoint {path} failed when parts of it were loaded ({error}); "
                "these weights are of no version"
            ) from error
        self._held = {}
        copied = sum(tensor.nbytes for tensor in tensors)
        return LoadReport(copied, len(tensors), time.perf_counter() - started)

    def _switch_requests(self, version: int, *, restart: bool) -> None:
        """Tell those that have begun that what follows comes from other weights."""
        for live in self._open.values():
            if live.started is None:
                continue
            if restart:
                live.restart()
                self._stats.requests_restarted += 1
            live.stamp(version)
        if restart:
            # Their draws are counted from the start again.
            self._batch = ([], SamplingBatch([], [], []))

    @torch.inference_mode()
    def step(self) -> list[GenerationResult | GenerationFailure]:
        """One pass over what the scheduler chose; returns what ended."""
        started = time.perf_counter()
        self._expire()
        plan = self._scheduler.plan()
        for copy in plan.copies:
            self._cache.copy(copy.source, copy.target, copy.tokens)
        if plan.chunks:
            self._compute(plan.chunks)
        self._stats.busy_s += time.perf_counter() - started
        return self.collect()

    # -- ending ---------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            live = self._open.get(request_id)
            # An id may have been used again after its first request ended.
            if live is not None and live.sequence.deadline == deadline:
                self._finish(live, FinishReason.DEADLINE)

    def _end(self, live: Live) -> None:
        """Forget a request; what it computed stays for others unless it may not be finite."""
        del self._open[live.request.id]
        self._scheduler.finish(live.sequence, keep=not self._poisoned)
        if len(self._deadlines) > 64 + 2 * len(self._open):
            self._deadlines = [(a.sequence.deadline, a.request.id) for a in self._open.values()]
            heapq.heapify(self._deadlines)

    def _finish(self, live: Live, reason: FinishReason) -> None:
        self._end(live)
        self._stats.requests_finished += 1
        self._ended.append(live.result(self.config.engine_id, reason, self._clock()))

    def _fail(self, live: Live) -> None:
        """End a request whose logits are not finite; what it wrote must never be reused."""
        self._poisoned = True
        self._end(live)
        self._stats.requests_failed += 1
        self._ended.append(
            GenerationFailure(
                live.request.id,
                EngineError.FAILED,
                f"logits are not finite under weight version {self.version}",
            )
        )

    # -- computing ------------------------------------------------------------------------------

    def _compute(self, chunks: list[Chunk]) -> None:
        """Run the pass and hand its logits to the requests whose next token they give."""
        lives = [self._open[chunk.sequence.id] for chunk in chunks]
        if any(live.started is None for live in lives):
            now = self._clock()
            for live in lives:
                if live.started is None:
                    live.started = now
                    live.stamp(self.version)
        decoding = 0
        if self._compiled is not None:
            decoding = next(
                (i for i, c in enumerate(chunks) if c.count != 1 or not c.samples), len(chunks)
            )
        logits = []
        hidden = None
        if decoding:
            logits.append(self._decode(chunks[:decoding]))
        if decoding < len(chunks):
            last, hidden = self._extend(chunks[decoding:], lives[decoding:])
            logits.append(last)
        sampling = [live for live, chunk in zip(lives, chunks, strict=True) if chunk.samples]
        rows: Iterator[Row] = iter(())
        if sampling:
            rows = self._sample(sampling, logits[0] if len(logits) == 1 else torch.cat(logits))
        self._accept(chunks, lives, rows, hidden)

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        """Logits [n, V] of one token of each sequence, through the compiled step."""
        assert self._compiled is not None
        sequences = [chunk.sequence for chunk in chunks]
        ids = torch.tensor([int(s.tokens[-1]) for s in sequences])
        positions = torch.tensor([chunk.start for chunk in chunks])
        return self._compiled(ids, positions, block_tables([s.blocks for s in sequences]))

    def _extend(self, chunks: list[Chunk], lives: list[Live]) -> tuple[Tensor, Tensor]:
        """Logits [m, V] of the rows that sample, and hidden states [S, D] of all rows.

        A chunk samples from its last row, and from the rows before its drafts.
        """
        starts, counts = [c.start for c in chunks], [c.count for c in chunks]
        tables = block_tables([c.sequence.blocks for c in chunks])
        batch = PagedBatch.of(starts, counts, tables, self.config.block_tokens)
        ids = []
        for chunk in chunks:
            ids.append(chunk.sequence.tokens[chunk.start : chunk.start + chunk.count])
            ids.append(np.array(chunk.sequence.drafts, dtype=np.int32))
        self._cache.begin(batch)
        rows = torch.from_numpy(np.concatenate(ids).astype(np.int64))[None]
        with row_independent() if self.config.deterministic else nullcontext():
            hidden = self.model(rows, batch.positions[None], self._cache)[0]
        end = 0
        last: list[int] = []
        for chunk, live in zip(chunks, lives, strict=True):
            first, end = end, end + chunk.count
            if chunk.samples:
                last += range(end - 1 - len(chunk.sequence.drafts), end)
            if live.scores_prompt:
                live.score_prompt(chunk.start, self._logits(hidden[first:end]))
        return self._logits(hidden[last]), hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, D] -> logits [n, V]."""
        if self._products is None:
            return self.model.logits(hidden)
        return self._products.logits(hidden)

    def _sample(self, lives: list[Live], logits: Tensor) -> Iterator[Row]:
        """Draw for every row: one of each request, and one for each of its drafts."""
        if any(live.sequence.drafts for live in lives):
            batch = _verifying_batch(lives)
            # The kept batch counts one token per request and step.
            self._batch = ([], batch)
        else:
            if self._batch[0] != lives:
                self._batch = (lives, _sampling_batch(lives))
            batch = self._batch[1]
        draw = batch.sample(logits)
        alternatives = draw.alternatives or [()] * len(logits)
        rows = (draw.ids.tolist(), draw.logprobs.tolist(), draw.raw_logprobs.tolist(), alternatives)
        return map(Row._make, zip(*rows, strict=True))

    def _accept(
        self,
        chunks: list[Chunk],
        lives: list[Live],
        rows: Iterator[Row],
        hidden: Tensor | None,
    ) -> None:
        """Give requests their new tokens, end those that are done, draft for the others.

        Args:
            rows: what was drawn, for each request that samples after its drafts, in order.
            hidden: [S, D] of all chunks; None after the compiled step, which drafts nothing.
        """
        done: list[tuple[Live, FinishReason | None]] = []
        computed: list[Computed] = []
        end = 0
        for chunk, live in zip(chunks, lives, strict=True):
            first, end = end, end + chunk.count
            decoding = live.sequence.decoding
            if not chunk.samples:
                self._scheduler.advance(chunk)
                taken = 0
            else:
                drafts = live.sequence.drafts
                drawn = list(islice(rows, 1 + len(drafts)))
                drawn = drawn[: 1 + matching_prefix([row.id for row in drawn], drafts)]
                if any(row.logprob != row.logprob for row in drawn):
                    done.append((live, None))
                    continue
                taken, reason = live.take(drawn, len(drafts))
                self._scheduler.advance(chunk, *live.ids[-taken:])
                self._stats.tokens_sampled += taken
                self._stats.tokens_drafted += len(drafts)
                self._stats.tokens_accepted += taken - 1
                if reason is not None:
                    done.append((live, reason))
                    continue
            if self._drafter is not None and hidden is not None:
                # Rows of drafts that do not stand are of no use.
                standing = hidden[first : first + taken] if decoding else hidden[first:end]
                depth = live.draft_depth(self.config.draft_tokens) if taken else 0
                computed.append(Computed(live.sequence, chunk.start, standing, depth))
        for live, reason in done:
            if reason is None:
                self._fail(live)
            else:
                self._finish(live, reason)
        if self._drafter is not None:
            self._drafter.draft(computed)


def _verifying_batch(lives: list[Live]) -> SamplingBatch:
    """As `_sampling_batch`, with a row for each draft: the one after the first i of them draws what
    the request would draw if those were its output."""
    rows = [
        (live, live.sequence.drafts[:count])
        for live in lives
        for count in range(1 + len(live.sequence.drafts))
    ]
    return SamplingBatch(
        [live.request.sampling for live, _ in rows],
        [live.seed for live, _ in rows],
        [len(live.ids) + len(before) for live, before in rows],
        [live.request.prompt_ids for live, _ in rows],
        [[*live.ids, *before] for live, before in rows],
    )


def _sampling_batch(lives: list[Live]) -> SamplingBatch:
    return SamplingBatch(
        [live.request.sampling for live in lives],
        [live.seed for live in lives],
        [len(live.ids) for live in lives],
        [live.request.prompt_ids for live in lives],
        [live.ids for live in lives],
    )


def _pack(model: Decoder, config: EngineConfig) -> PackedProducts | None:
    """Packed products where the config asks for what only they give, or where they are faster."""
    if config.weights == "int8":
        return PackedProducts(model, "int8")
    half = model.embed.weight.dtype == torch.bfloat16
    if half or config.deterministic:
        return PackedProducts(model, "bfloat16" if half else "float32")
    store_input_major(model)
    return None


def _new_cache(model: Decoder, config: EngineConfig) -> PagedCache:
    """An empty cache of the kind the model's attention needs."""
    shape, dtype = model.config, model.embed.weight.dtype
    # One more for the rows of the layer that drafts.
    layers = shape.num_layers + bool(config.draft_tokens and shape.mtp is not None)
    if shape.latent is None:
        return GroupedCache(
            layers=layers,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            blocks=config.blocks,
            block_tokens=config.block_tokens,
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
        blocks=config.blocks,
        block_tokens=config.block_tokens,
        dtype=dtype,
    )
