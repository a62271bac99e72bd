"""Who computes which tokens in the next pass, and in which cache blocks.

Every running decode takes part in every pass; prompts are computed in chunks beside them, within a
budget that bounds how long they delay the decodes. Blocks are taken when they are needed. When none
is left, cached prefixes go first, then the running sequence that is last in line gives its blocks
back and computes them again later. It knows nothing of models, sampling parameters or clocks.

Two orders are at work. Sequences compete for admission and for prompt tokens by priority, then by
what their session was served so far, then by arrival. Running ones compete for blocks by priority,
then by when they first ran: that order never changes, so the first of them always gets on.
"""

import math
from heapq import heapify, heappop

import numpy as np

from headrace.engine.cache.blocks import BlockPool
from headrace.engine.cache.prefix import PrefixTree
from headrace.engine.sequence import Chunk, Copy, Plan, Sequence
from headrace.engine.types import EngineError

_MIN_AWAITED = 32
"""Wait for a neighbour's prefill only if it saves at least this many tokens."""

_Rank = tuple[int, int, float, int, Sequence]


class Scheduler:
    """Continuous batching over a pool of blocks. One caller drives it:

        plan = scheduler.plan()
        ...copy plan.copies, compute plan.chunks, sample...
        for chunk in plan.chunks: scheduler.advance(chunk, *sampled)
        scheduler.finish(sequence) for those that ended

    `finish` and `drop_computed` may come at any time but between `plan` and the copies it asks for.

    Attributes:
        preempted: times a sequence had to give its blocks back.
        reused_tokens: tokens that the prefix tree held when a sequence was admitted.
        prefilled_tokens: tokens computed by chunks that are not decodes.
        dropped_tokens: computed tokens lost to new weights.

    Args:
        pool: blocks to give out.
        tree: over the same pool.
        max_running: most sequences in a pass.
        max_waiting: most sequences waiting beside those that free places will take.
        max_context: most tokens of prompt and output.
        step_tokens: most tokens in a pass, at least max_running.
        prefill_tokens: most tokens of prefill chunks in a pass in which something decodes.

    Raises:
        ValueError: a size below 1, or step_tokens below max_running.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        *,
        max_running: int,
        max_waiting: int,
        max_context: int,
        step_tokens: int,
        prefill_tokens: int,
    ) -> None:
        if min(max_running, max_context, prefill_tokens) < 1 or max_waiting < 0:
            raise ValueError("max_running, max_context and prefill_tokens must be >= 1")
        if step_tokens < max_running:
            raise ValueError(
                f"step_tokens {step_tokens} cannot hold a token of each of max_running "
                f"{max_running} sequences; raise it or lower max_running"
            )
        self._pool = pool
        self._tree = tree
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_context = max_context
        self._step_tokens = step_tokens
        self._prefill_tokens = prefill_tokens
        self.beside = prefill_tokens
        """Prompt tokens that the next pass may compute if something decodes; its owner may lower
        it."""
        self._shares = FairShare()
        self._waiting: dict[Sequence, None] = {}
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._arrivals = 0
        self._turns = 0
        # Blocks that the last plan copies from; nobody may write them before that is done.
        self._sources: list[int] = []
        # Highest priority preempted by the plan being made: nobody may jump into that place.
        self._pressure: float = -math.inf
        self.preempted = 0
        self.reused_tokens = 0
        self.prefilled_tokens = 0
        self.dropped_tokens = 0

    @property
    def waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._prefilling) + len(self._decoding)

    # -- arriving and ending --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            EngineError: TOO_LONG if it can never fit, OVERLOADED if too many wait already; it was
                not queued.
        """
        self._check_fits(sequence)
        if self.waiting >= self._max_waiting + self._max_running - self.running:
            raise EngineError(
                EngineError.OVERLOADED,
                f"{self.waiting} requests are waiting already; try again later",
            )
        sequence.number = self._arrivals
        self._arrivals += 1
        self._shares.join(sequence.session)
        self._waiting[sequence] = None

    def _check_fits(self, sequence: Sequence) -> None:
        prompt, limit, size = sequence.prompt_length, sequence.limit, self._pool.block_tokens
        # The last sampled token is never an input, so it needs no room in a block.
        most = min(self._max_context, self._pool.blocks * size + 1)
        if prompt + limit <= most:
            return
        whose = (
            f"the context holds {self._max_context}"
            if most == self._max_context
            else f"the cache's {self._pool.blocks} blocks of {size} hold {most - 1}"
        )
        remedy = (
            f"ask for at most {most - prompt} new tokens, shorten the prompt"
            if prompt < most
            else f"shorten the prompt to at most {most - 1} tokens"
        )
        raise EngineError(
            EngineError.TOO_LONG,
            f"a prompt of {prompt} tokens and up to {limit} new ones can never fit: {whose}; "
            f"{remedy} or configure a larger engine",
        )

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence, waiting or running, for whatever reason; its blocks are given back.

        Args:
            keep: leave what it computed for others to reuse. False if its keys and values are not
                to be trusted: then what it computed and what was built upon that is forgotten.

        Raises:
            ValueError: it has ended before, or was never added.
        """
        self._settle()
        if sequence.state == "waiting" and sequence in self._waiting:
            del self._waiting[sequence]
        elif sequence.state == "running":
            if not keep:
                self._tree.forget(sequence.tokens[: sequence.computed], sequence.reused)
            self._stop(sequence, keep=keep)
        else:
            raise ValueError(f"sequence {sequence.id!r} is not in this scheduler")
        sequence.state = "done"
        self._shares.leave(sequence.session)

    def _stop(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a running sequence out of the batch and give its blocks back."""
        (self._decoding if sequence.decoding else self._prefilling).remove(sequence)
        blocks, computed = sequence.blocks, sequence.computed
        if keep and computed:
            used = -(-computed // self._pool.block_tokens)
            self._tree.insert(sequence.tokens[:computed], blocks[:used])
        self._pool.release(blocks)
        sequence.blocks, sequence.computed, sequence.decoding = [], 0, False
        sequence.drafts = []

    def _settle(self) -> None:
        """The copies of the last plan are done: their sources need no protection any more."""
        if self._sources:
            self._pool.release(self._sources)
            self._sources = []

    def drop_computed(self, version: int, *, restart: bool = False) -> None:
        """New weights: forget all keys and values (law L8).

        Running sequences compute theirs again, ahead of all that never ran; one that shares its
        prompt with another still computes it once.

        Args:
            version: of the new weights.
            restart: forget what was sampled, too, so that all begin at their prompts again; else
                they go on where they are.
        """
        self._settle()
        self._tree.reset(version)
        for sequence in [*self._decoding, *self._prefilling]:
            self.dropped_tokens += sequence.computed
            self._stop(sequence, keep=False)
            sequence.state = "waiting"
            self._waiting[sequence] = None
        if restart:
            for sequence in self._waiting:
                sequence.length = sequence.prompt_length

    def lend(self, most: int) -> list[int]:
        """Blocks that no running sequence will soon need, for contents from elsewhere.

        Held prefixes that were not used for longest give way.

        Args:
            most: how many are wanted.

        Returns:
            As many as there are, with a reference for the caller.
        """
        self._settle()
        return self._take(max(0, min(most, self._room())))

    # -- one pass -------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What to compute next: empty only if there is no sequence at all."""
        self._settle()
        self._pressure = -math.inf
        size = self._pool.block_tokens
        # Only where its blocks are full a decode needs attention.
        needy = [
            sequence
            for sequence in self._decoding
            if sequence.computed == len(sequence.blocks) * size
        ]
        for sequence in sorted(needy, key=_line) if len(needy) > self._pool.free else needy:
            if sequence.state == "running" and not self._grow(sequence, 1):
                self._preempt(sequence)
        drafts = self._make_room_for_drafts()
        budget = self._step_tokens - len(self._decoding) - drafts
        if self._decoding:
            budget = min(budget, self.beside)
        copies: list[Copy] = []
        prefills: list[Chunk] = []
        if self._prefilling or self._waiting:
            prefills = self._plan_prefills(budget, copies)
        # Only now, since a prefill may have preempted a decode.
        chunks = [
            Chunk(sequence, sequence.computed, 1 + len(sequence.drafts), True)
            for sequence in self._decoding
        ]
        chunks += prefills
        self._shares.pass_time(sum(chunk.count for chunk in chunks))
        return Plan(chunks, copies)

    def advance(self, chunk: Chunk, *sampled: int) -> None:
        """A chunk of the last plan was computed.

        Args:
            sampled: the next token if the chunk samples, after the drafts that stand; else none.

        Raises:
            ValueError: the sequence is no longer where the chunk begins, or a token is missing or
                one too many.
        """
        sequence = chunk.sequence
        if sequence.computed != chunk.start or sequence.state != "running":
            raise ValueError(f"sequence {sequence.id!r} has moved since this chunk was planned")
        most = 1 + len(sequence.drafts) if sequence.decoding else 1
        if bool(sampled) != chunk.samples or len(sampled) > most:
            raise ValueError(f"sequence {sequence.id!r}: {chunk} got the tokens {sampled}")
        self._settle()
        self._shares.charge(sequence.session, chunk.count)
        if sequence.decoding:
            # What was computed of drafts that do not stand is written over.
            sequence.computed += len(sampled)
        else:
            sequence.computed += chunk.count
            self._advance_prefill(chunk)
        sequence.drafts = []
        for token in sampled:
            sequence.append(token)

    def _advance_prefill(self, chunk: Chunk) -> None:
        sequence, size = chunk.sequence, self._pool.block_tokens
        self.prefilled_tokens += chunk.count
        full = sequence.computed // size
        if full > chunk.start // size:
            # At once, for those who wait for this prompt.
            self._tree.insert(sequence.tokens[: full * size], sequence.blocks[:full], in_use=True)
        if chunk.samples:
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
            sequence.decoding = True

    # -- admission and prefill ------------------------------------------------------------------

    def _plan_prefills(self, budget: int, copies: list[Copy]) -> list[Chunk]:
        """Share `budget` tokens among prefilling and waiting sequences."""
        chunks: list[Chunk] = []
        places = self._max_running - self.running
        prefilling, waiting = self._lines(places)
        while budget > 0 and (prefilling or waiting):
            if prefilling and not (waiting and waiting[0] < prefilling[0]):
                sequence = heappop(prefilling)[-1]
                if sequence.state != "running":
                    continue
            else:
                sequence = heappop(waiting)[-1]
                victim = None if places > 0 else self._last_behind(sequence)
                if sequence.priority <= self._pressure or (places <= 0 and victim is None):
                    waiting = []
                    continue
                held = self._tree.peek(sequence.tokens, _reusable(sequence))
                # Whoever waits for a neighbour's prefill keeps its place in the line.
                places -= 1
                if self._awaits(sequence, held):
                    continue
                if not self._admit(sequence, held, victim, copies):
                    waiting = []
                    continue
            count = self._grow(sequence, budget)
            if count:
                end = sequence.computed + count
                chunks.append(Chunk(sequence, sequence.computed, count, end == sequence.length))
                budget -= count
        if self._pressure == -math.inf:
            return chunks
        return [chunk for chunk in chunks if chunk.sequence.state == "running"]

    def _lines(self, places: int) -> tuple[list[_Rank], list[_Rank]]:
        """Heaps of the prefilling sequences and of the waiting ones that may be admitted.

        Fair share counts what stands before a sequence in its own session's line as served, so
        that the line as a whole is shared and not just its head.
        """
        ahead: dict[str, float] = {}

        def rank(sequence: Sequence) -> _Rank:
            session = sequence.session
            served = ahead.get(session)
            if served is None:
                served = self._shares.served(session)
            ahead[session] = served + sequence.length - sequence.computed
            if sequence.state == "waiting" and sequence.turn >= 0:
                # It ran before: head of its class.
                return -sequence.priority, 0, sequence.turn, sequence.number, sequence
            return -sequence.priority, 1, served, sequence.number, sequence

        prefilling = [rank(sequence) for sequence in self._prefilling]
        heapify(prefilling)
        waiting: list[_Rank] = []
        if self._waiting and (places > 0 or self._outranked()):
            waiting = [rank(sequence) for sequence in self._waiting]
            heapify(waiting)
        return prefilling, waiting

    def _outranked(self) -> bool:
        """Does a sequence wait that is of higher priority than a running one?"""
        highest = max(sequence.priority for sequence in self._waiting)
        return any(sequence.priority < highest for sequence in [*self._decoding, *self._prefilling])

    def _awaits(self, sequence: Sequence, held: int) -> bool:
        """Will a prefilling neighbour soon have computed much of what `sequence` needs?"""
        reach = held + _MIN_AWAITED
        if sequence.length <= reach or not sequence.takes_over:
            return False
        tokens = sequence.tokens[:reach]
        return any(
            other.length >= reach
            # One of low priority may not get on for long.
            and other.priority >= sequence.priority
            and other.tokens[reach - 1] == tokens[-1]
            and np.array_equal(other.tokens[:reach], tokens)
            for other in self._prefilling
        )

    def _admit(
        self, sequence: Sequence, held: int, victim: Sequence | None, copies: list[Copy]
    ) -> bool:
        """Let a waiting sequence run if all its known tokens find room; else nothing changes.

        Args:
            held: tokens of it that the tree has.
            victim: of lower priority, to be preempted for its place.
        """
        size = self._pool.block_tokens
        total = -(-sequence.length // size)
        # What preempting everybody of lower priority would add to the room.
        lower = sum(
            max(len(other.blocks), -(-other.length // size)) + 1
            for other in [*self._decoding, *self._prefilling]
            if other.priority < sequence.priority
        )
        if total - held // size > self._room() + lower:
            return False
        if victim is not None:
            self._preempt(victim)
        match = self._tree.match(sequence.tokens, _reusable(sequence))
        blocks, partial, computed = match.blocks, match.partial, match.tokens
        if partial is not None and total - len(blocks) > self._room():
            # Better to compute a few tokens than to hold one more block.
            self._pool.release((partial,))
            partial, computed = None, len(blocks) * size
        while total - len(blocks) > self._room():
            victim = self._last_behind(sequence)
            if victim is None:
                self._pool.release(blocks)
                return False
            self._preempt(victim)
        if partial is not None:
            target = self._take(1)
            copies.append(Copy(partial, target[0], match.partial_tokens))
            self._sources.append(partial)
            blocks += target
        sequence.blocks, sequence.computed, sequence.state = blocks, computed, "running"
        del self._waiting[sequence]
        self._prefilling.append(sequence)
        self.reused_tokens += computed
        if sequence.turn < 0:
            sequence.turn = self._turns
            self._turns += 1
            sequence.reused = computed
        return True

    # -- blocks ---------------------------------------------------------------------------------

    def _room(self) -> int:
        """Blocks for one more sequence, after what the running ones need soon."""
        size = self._pool.block_tokens
        owed = sum(
            -(-sequence.length // size) - len(sequence.blocks) for sequence in self._prefilling
        )
        return self._pool.free + self._pool.idle - owed - self.running

    def _grow(self, sequence: Sequence, most: int) -> int:
        """Give a running sequence blocks for its next tokens.

        Returns:
            How many of at most `most` tokens have room; 0 if nobody behind can give way.
        """
        size = self._pool.block_tokens
        count = min(most, sequence.length - sequence.computed)
        missing = -(-(sequence.computed + count) // size) - len(sequence.blocks)
        if missing <= 0:
            return count
        while not (available := self._pool.free + self._pool.idle):
            if sequence.computed < len(sequence.blocks) * size:
                break
            victim = self._last_behind(sequence)
            if victim is None:
                return 0
            self._preempt(victim)
        if missing > available:
            missing = available
            count = (len(sequence.blocks) + missing) * size - sequence.computed
        sequence.blocks += self._take(missing)
        return count

    def _make_room_for_drafts(self) -> int:
        """Blocks for the drafts of decoding sequences, or fewer drafts: nobody gives way for a
        guess. Returns how many drafts there are."""
        size, total = self._pool.block_tokens, 0
        # What prompts may need is left to them.
        spare = max(0, self._step_tokens - len(self._decoding) - self._prefill_tokens)
        for sequence in self._decoding:
            if not sequence.drafts:
                continue
            end = sequence.computed + 1 + len(sequence.drafts)
            missing = -(-end // size) - len(sequence.blocks)
            if missing > 0 and missing <= self._pool.free + self._pool.idle:
                sequence.blocks += self._take(missing)
            room = len(sequence.blocks) * size - sequence.computed - 1
            del sequence.drafts[max(0, min(room, spare - total)) :]
            total += len(sequence.drafts)
        return total

    def _take(self, n: int) -> list[int]:
        """`n` blocks that are known to be free or idle."""
        if n > self._pool.free:
            self._tree.evict(n - self._pool.free)
        blocks = self._pool.allocate(n)
        assert blocks is not None, "an idle block could not be evicted"
        return blocks

    def _last_behind(self, sequence: Sequence) -> Sequence | None:
        """The running sequence last in line, if it stands behind `sequence`.

        It is never one that this plan admitted, whose copies are still to be done: `_room` left
        enough for all that were prefilling then, and later candidates are of no higher priority.
        """
        last = max([*self._decoding, *self._prefilling], key=_line, default=None)
        return last if last is not None and _line(last) > _line(sequence) else None

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; what it computed stays in the tree while it can."""
        self._stop(sequence, keep=True)
        sequence.state = "waiting"
        sequence.preemptions += 1
        self._waiting[sequence] = None
        self._pressure = max(self._pressure, sequence.priority)
        self.preempted += 1


def _line(sequence: Sequence) -> tuple[int, float]:
    """Sorts by who keeps its blocks: priority, then who ran first; who waits stands last."""
    return -sequence.priority, sequence.turn if sequence.state == "running" else math.inf


class FairShare:
    """Tokens computed for each session, on a scale that moves on while a session is away.

    The scale's `now` is what a session has got by now that always had an equal share of the
    engine. Who comes back after a pause starts there, so that nobody saves up a claim; who got more
    than that waits until the others have caught up, and no stream of newcomers can delay that.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._open: dict[str, int] = {}
        self._now = 0.0
        self._sweep_at = 64

    def served(self, session: str) -> float:
        """Where a session with open sequences stands; the lowest is to be served next."""
        return self._served[session]

    def join(self, session: str) -> None:
        """A sequence of the session arrived."""
        if session not in self._open:
            self._served[session] = max(self._served.get(session, 0.0), self._now)
        self._open[session] = self._open.get(session, 0) + 1

    def leave(self, session: str) -> None:
        """A sequence of the session ended."""
        self._open[session] -= 1
        if self._open[session]:
            return
        del self._open[session]
        if len(self._served) > self._sweep_at:
            self._served = {
                name: served
                for name, served in self._served.items()
                if name in self._open or served > self._now
            }
            self._sweep_at = 2 * len(self._served) + 64

    def charge(self, session: str, tokens: int) -> None:
        """So many tokens were computed for a session with open sequences."""
        self._served[session] += tokens

    def pass_time(self, tokens: int) -> None:
        """So many tokens are computed for all sessions together."""
        if self._open:
            self._now += tokens / len(self._open)


def _reusable(sequence: Sequence) -> int:
    """Leading tokens that others may have computed; the last one's logits are always needed."""
    return sequence.length - 1 if sequence.takes_over else 0
