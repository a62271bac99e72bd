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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.engine.cache.blocks import BlockPool
from headrace.engine.cache.grouped import GroupedCache
from headrace.engine.cache.latent import HeadProducts, LatentCache
from headrace.engine.cache.paged import PagedBatch, PagedCache, block_tables
from headrace.engine.cache.prefix import PrefixTree
from headrace.engine.cache.transfer import Handovers
from headrace.engine.checks import check
from headrace.engine.compiled import CompiledStep, StepBuffers
from headrace.engine.config import EngineConfig, EngineStats, UpdatePolicy
from headrace.engine.drafting import Computed, Drafter
from headrace.engine.live import Live, Row
from headrace.engine.pacing import Pacer
from headrace.engine.packed_model import PackedProducts
from headrace.engine.plain_step import PlainStep
from headrace.engine.sampling.constrained import Grammars
from headrace.engine.sampling.draws import Draws
from headrace.engine.sampling.stops import Pieces, StopTexts
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk, Sequence
from headrace.engine.speculation import matching_prefix
from headrace.engine.types import (
    EngineError,
    GenerationFailure,
    GenerationRequest,
    Progress,
    Told,
)
from headrace.engine.updates import EngineWeights, check_update
from headrace.model.decoder import Decoder
from headrace.model.linear import store_input_major
from headrace.ops import row_independent
from headrace.rollout.types import FinishReason


class EngineCore:
    """Continuous batching over `model`. Not thread-safe: one caller drives it.

    Args:
        model: the decoder, already holding the weights of `version`. The core takes it over: its
            fp32 CPU matrices are laid out anew in memory.
        config: sizes; max_context must not exceed the model's positions.
        version: stamp of the weights in `model`.
        clock: monotonic seconds, for deadlines and timings.
        pieces: bytes that each token id spells, which stop texts and grammars need; or what gives
            them, called when the first request brings some.
        tags: ids among them that are no text, likewise.

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
        pieces: Pieces | None = None,
        tags: Collection[int] | Callable[[], Collection[int]] = (),
    ) -> None:
        shape = model.config
        if config.max_context > shape.max_positions:
            raise ValueError(
                f"max_context {config.max_context} exceeds the model's {shape.max_positions} "
                "positions; lower it"
            )
        self.model = model.eval()
        self._products = _pack(model, config)
        self.config = config
        self._clock = clock
        self._stops = StopTexts(pieces)
        self._vocab = shape.vocab_size
        self._grammars = Grammars(pieces, tags, self._vocab)
        heads = None if self._products is None else self._products.heads
        self._cache = _new_cache(model, config, heads)
        self._drafter: Drafter | None = None
        if config.draft_tokens and model.mtp is not None:
            self._drafter = Drafter(model, self._cache, self._logits)
        self._compiled: PlainStep | CompiledStep | None = None
        # Drafting goes on from hidden states, which the compiled step does not give.
        if config.compiled and self._drafter is None:
            if self._products is None:
                self._compiled = PlainStep.create(model, self._cache, config.max_context)
            if self._compiled is None:
                self._compiled = CompiledStep.create(
                    model, self._cache, config.max_context, self._products
                )
        self._buffers = StepBuffers(
            config.pass_tokens, config.max_running, config.max_context, config.block_tokens
        )
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
        self._pacer = None
        if config.decode_slowdown:
            most = config.prefill_tokens
            self._pacer = Pacer(config.decode_slowdown, least=min(16, most), most=most)
        self._open: dict[str, Live] = {}
        self._told: list[Told] = []
        self._deadlines: list[tuple[float, str]] = []
        self._draws = Draws()
        self._poisoned = False
        copies = [copy for copy in (self._compiled, self._products) if copy is not None]
        self._weights = EngineWeights(model, copies)
        first_seed = secrets.randbits(64) if config.seed is None else config.seed
        self._seeds = np.random.default_rng(first_seed)
        weights = sum(p.nbytes for p in model.parameters())
        weights += 0 if self._products is None else self._products.nbytes
        self._stats = EngineStats(
            version=version, cache_bytes=self._cache.nbytes, weights_bytes=weights
        )
        self.handovers = Handovers(
            self._cache, self._pool, self._tree, self._scheduler.lend, self._stats
        )

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
        return bool(self._open) or bool(self._told)

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
        stops = self._stops.matcher(request.sampling.stop)
        grammar = self._grammars.state(request.sampling)
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
        live = Live(request, sequence, seed=seed, stops=stops, grammar=grammar)
        self._open[request.id] = live
        heapq.heappush(self._deadlines, (sequence.deadline, request.id))

    def abort(self, request_id: str) -> None:
        """End a request early; the next `step` returns what it has. Unknown ids are ignored."""
        live = self._open.get(request_id)
        if live is not None:
            self._finish(live, FinishReason.ABORTED)

    def collect(self) -> list[Told]:
        """What happened outside `step` (aborts, restarts) and was not returned yet."""
        told, self._told = self._told, []
        return told

    def forget_prefixes(self) -> None:
        """Give up what is held of ended requests, for measurements that must not find it."""
        self._tree.reset(self.version)

    @torch.no_grad()
    def hold_noise(self, ids: list[int], seed: int = 0) -> None:
        """Hold random numbers as what `ids` computed, for measurements after long contexts.

        A request that starts with these ids then finds them in the cache. How long its steps take
        is as after a real prompt; what it samples means nothing.

        Args:
            ids: as many as the cache has room for; of a context that is held already nothing
                changes.
            seed: of the numbers, standard normal.

        Raises:
            EngineError: OVERLOADED: the free blocks of the cache do not hold them.
        """
        blocks = self._pool.allocate(-(-len(ids) // self.config.block_tokens))
        if blocks is None:
            raise EngineError(
                EngineError.OVERLOADED,
                f"{len(ids)} tokens do not fit the {self._pool.free} free blocks of "
                f"{self.config.block_tokens}; call forget_prefixes first or raise cache_tokens",
            )
        self._cache.fill_normal(blocks, torch.Generator().manual_seed(seed))
        self._tree.insert(np.asarray(ids, dtype=np.int32), blocks)
        self._pool.release(blocks)

    @torch.no_grad()
    def load_weights(self, path: str, version: int, policy: UpdatePolicy = "continue") -> None:
        """Switch to other weights of the same model, between two steps.

        Everything held is dropped. What becomes of running requests is up to `policy`.

        Args:
            path: see `EngineWeights.load`.
            version: their stamp; that of a published version is its own.
            policy: "continue" computes the running sequences again and goes on with a new span;
                "requeue" lets them begin again from their prompts, with the same seed and deadline.

        Raises:
            EngineError: INVALID version or policy.
            UserError: the weights cannot be read or do not fit the model. Nothing has changed, and
                requests go on as if this had not been called.
            HalfLoaded: a checkpoint failed when a part of it was already in the model. This core
                must not be used any more.
        """
        check_update(version, policy)
        started = time.perf_counter()
        report = self._weights.load(path, version)
        self._scheduler.drop_computed(version, restart=policy == "requeue")
        if report.tensors_changed:
            self._poisoned = not self._weights.finite
        self._switch_requests(version, restart=policy == "requeue")
        pause = time.perf_counter() - started
        stats = self._stats
        stats.version = version
        stats.updates += 1
        stats.update_bytes += report.bytes_copied
        stats.update_tensors += report.tensors_changed
        stats.last_update_pause_s = pause
        stats.busy_s += pause

    def _switch_requests(self, version: int, *, restart: bool) -> None:
        """Tell those that have begun that what follows comes from other weights."""
        for live in self._open.values():
            if live.started is None:
                continue
            if restart:
                if live.request.stream and live.ids:
                    self._told.append(Progress(live.request.id, (), (), (), version, restart=True))
                live.restart()
                self._stats.requests_restarted += 1
            live.stamp(version)
        if restart:
            self._draws.forget()

    @torch.inference_mode()
    def step(self) -> list[Told]:
        """One pass over what the scheduler chose.

        Returns:
            What ended, and before that for each request that streams what was sampled for it.
        """
        started = time.perf_counter()
        self._expire()
        pacer = self._pacer
        if pacer is not None:
            self._scheduler.beside = pacer.tokens
        plan = self._scheduler.plan()
        for copy in plan.copies:
            self._cache.copy(copy.source, copy.target, copy.tokens)
        decoding = prompt_tokens = 0
        if pacer is not None:
            decoding = sum(chunk.sequence.decoding for chunk in plan.chunks)
            prompt_tokens = sum(chunk.count for chunk in plan.chunks[decoding:])
        if plan.chunks:
            with row_independent() if self.config.deterministic else nullcontext():
                self._compute(plan.chunks)
        seconds = time.perf_counter() - started
        if pacer is not None:
            pacer.passed(seconds, decoding=decoding, prompt_tokens=prompt_tokens)
        self._stats.busy_s += seconds
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
        self._told.append(live.result(self.config.engine_id, reason, self._clock()))

    def _fail(self, live: Live) -> None:
        """End a request that cannot go on. If that is because its logits are not finite, what it
        wrote must never be reused."""
        problem = "no token of the model goes on with its grammar"
        if not live.is_stuck():
            self._poisoned = True
            problem = f"logits are not finite under weight version {self.version}"
        self._end(live)
        self._stats.requests_failed += 1
        self._told.append(GenerationFailure(live.request.id, EngineError.FAILED, problem))

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
        logits = []
        hidden = None
        native = self._native(chunks, lives)
        if native:
            logits.append(self._step(chunks[:native]))
        if native < len(chunks):
            last, hidden = self._extend(chunks[native:], lives[native:])
            logits.append(last)
        sampling = [live for live, chunk in zip(lives, chunks, strict=True) if chunk.samples]
        rows: Iterator[Row] = iter(())
        if sampling:
            rows = self._draws.sample(
                sampling, logits[0] if len(logits) == 1 else torch.cat(logits)
            )
        self._accept(chunks, lives, rows, hidden)

    def _native(self, chunks: list[Chunk], lives: list[Live]) -> int:
        """How many of the leading chunks go through the compiled step."""
        if self._compiled is None:
            return 0
        # Over packed weights it multiplies rows of prompts as the decoder does, and saves the way
        # there; without, torch multiplies many rows faster.
        whole = isinstance(self._compiled, CompiledStep) and self._products is not None
        for index, (chunk, live) in enumerate(zip(chunks, lives, strict=True)):
            if not ((chunk.count == 1 and chunk.samples) or (whole and not live.scores_prompt)):
                return index
        return len(chunks)

    def _step(self, chunks: list[Chunk]) -> Tensor:
        """Logits [m, V] of the rows that sample, through the compiled step."""
        batch = self._buffers.update(chunks)
        if isinstance(self._compiled, PlainStep):
            return self._compiled(batch.ids, batch.positions, batch.tables)
        assert self._compiled is not None
        return self._compiled(batch)

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
            taken = depth = 0
            if not chunk.samples:
                self._scheduler.advance(chunk)
            else:
                drafts = live.sequence.drafts
                drawn = list(islice(rows, 1 + len(drafts)))
                drawn = drawn[: 1 + matching_prefix([row.id for row in drawn], drafts)]
                if live.is_stuck(len(drawn)) or any(row.logprob != row.logprob for row in drawn):
                    done.append((live, None))
                    continue
                taken, reason = live.take(drawn, len(drafts))
                self._scheduler.advance(chunk, *live.ids[-taken:])
                self._stats.tokens_sampled += taken
                self._stats.tokens_drafted += len(drafts)
                self._stats.tokens_accepted += taken - 1
                if live.request.stream:
                    self._told.append(live.progress(taken, self.version))
                if reason is None:
                    depth = live.draft_depth(self.config.draft_tokens)
                else:
                    done.append((live, reason))
            if self._drafter is not None and hidden is not None:
                # Rows of drafts that do not stand are of no use.
                standing = hidden[first : first + taken] if decoding else hidden[first:end]
                computed.append(Computed(live.sequence, chunk.start, standing, depth))
        if self._drafter is not None:
            # Of those that end, too: who takes over their blocks needs the layer's rows as well.
            self._drafter.draft(computed)
        for live, reason in done:
            if reason is None:
                self._fail(live)
            else:
                self._finish(live, reason)


def _pack(model: Decoder, config: EngineConfig) -> PackedProducts | None:
    """Packed products where the config asks for what only they give, or where they are faster."""
    alone = config.deterministic
    if config.weights == "int8":
        return PackedProducts(model, "int8", row_independent=alone)
    half = model.embed.weight.dtype == torch.bfloat16
    if half or alone:
        return PackedProducts(model, "bfloat16" if half else "float32", row_independent=alone)
    store_input_major(model)
    return None


def _new_cache(
    model: Decoder, config: EngineConfig, heads: Mapping[int, HeadProducts] | None
) -> PagedCache:
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
        heads=heads,
        one_form=config.deterministic,
    )
