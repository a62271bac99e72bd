"""The scheduler, block pool and prefix tree by random histories against a brute-force memory.

Instead of keys and values every token row remembers the weight version and the whole prefix it was
computed for. Before a chunk is computed all earlier rows of its sequence must hold just that, and
nobody but the sequence may hold the blocks it writes.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.cache.blocks import BlockPool
from headrace.engine.cache.prefix import PrefixTree
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.types import EngineError

TOKENS = st.integers(0, 1)
SESSIONS = st.sampled_from("abc")
LONG = [i % 3 for i in range(60)]


class Serving(RuleBasedStateMachine):
    """`open` maps every sequence that has not ended to the tokens it must have."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[Sequence, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.texts: list[list[int]] = []
        self.arrived = 0

    @initialize(
        blocks=st.integers(6, 40),
        size=st.sampled_from([1, 2, 3, 4]),
        running=st.integers(1, 6),
        spare=st.integers(0, 12),
        prefill=st.integers(1, 16),
    )
    def start(self, blocks, size, running, spare, prefill):
        self.running, self.step_tokens, self.prefill_tokens = running, running + spare, prefill
        self.most = min(70, blocks * size + 1)
        self.pool = BlockPool(blocks, size)
        self.tree = PrefixTree(self.pool)
        self.scheduler = Scheduler(
            self.pool,
            self.tree,
            max_running=running,
            max_waiting=6,
            max_context=70,
            step_tokens=self.step_tokens,
            prefill_tokens=prefill,
        )
        # (version, prefix) per token row.
        self.memory: list[tuple[int, tuple[int, ...]] | None] = [None] * (blocks * size)

    # -- acting

    def add(self, prompt: list[int], limit: int, session: str, priority: int) -> None:
        id = f"r{self.arrived}"
        self.arrived += 1
        sequence = Sequence(id, prompt, limit=limit, session=session, priority=priority)
        crowded = len(self.open) >= 6 + self.running
        if crowded or len(prompt) + limit > self.most:
            with pytest.raises(EngineError) as caught:
                self.scheduler.add(sequence)
            assert (caught.value.code == EngineError.TOO_LONG) == (len(prompt) + limit > self.most)
        else:
            self.scheduler.add(sequence)
            self.open[sequence] = list(prompt)

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=14),
        limit=st.integers(1, 12),
        session=SESSIONS,
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def arrive(self, prompt, limit, session, priority):
        self.add(prompt, limit, session, priority)

    @rule(
        count=st.integers(2, 5),
        cut=st.integers(34, 50),
        limit=st.integers(1, 12),
        session=SESSIONS,
    )
    def sample_one_long_prompt(self, count, cut, limit, session):
        for _ in range(count):
            self.add(LONG[:cut], limit, session, 0)

    @precondition(lambda self: self.texts)
    @rule(
        which=st.integers(0, 1000),
        more=st.lists(TOKENS, max_size=4),
        limit=st.integers(1, 8),
        session=SESSIONS,
    )
    def take_another_turn(self, which, more, limit, session):
        self.add(self.texts[which % len(self.texts)] + more, limit, session, 0)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1000), keep=st.booleans())
    def abort(self, which, keep):
        sequence = list(self.open)[which % len(self.open)]
        self.end(sequence, keep=keep)

    @precondition(lambda self: self.open)
    @rule()
    def update_weights(self):
        before = [sequence for sequence in self.open if sequence.state == "running"]
        self.scheduler.drop_computed(self.tree.version + 1)
        assert self.pool.free == self.pool.blocks
        assert all(not sequence.computed and not sequence.blocks for sequence in before)

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=30))
    def take_over_from_elsewhere(self, prompt):
        """As `kv_transfer` does with what another engine has computed of a prompt."""
        size, preempted = self.pool.block_tokens, self.scheduler.preempted
        tokens = np.array(prompt, dtype=np.int32)
        match = self.tree.match(tokens, len(tokens))
        if match.partial is not None:
            self.pool.release((match.partial,))
        held = len(match.blocks)
        taken = self.scheduler.lend(-(-len(prompt) // size) - held)
        blocks = match.blocks + taken
        end = min(len(prompt), len(blocks) * size)
        for position in range(held * size, end):
            row = blocks[position // size] * size + position % size
            self.memory[row] = (self.tree.version, tuple(prompt[: position + 1]))
        self.tree.insert(tokens[:end], blocks)
        self.pool.release(blocks)
        assert self.tree.peek(tokens, len(tokens)) >= end
        assert self.scheduler.preempted == preempted

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=12), stop=st.integers(0, 15))
    def step(self, tokens, stop):
        self.compute(tokens, stop)

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=12))
    def make_many_steps(self, tokens):
        for _ in range(8):
            self.compute(tokens, -1)

    def end(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.scheduler.finish(sequence, keep=keep)
        assert sequence.state == "done"
        self.ended[sequence.id] += 1
        self.texts.append(self.open.pop(sequence))

    def compute(self, tokens: list[int], stop: int) -> None:
        """One pass. Sampled tokens and drafts are taken from `tokens`; the sequence at `stop` ends
        early."""
        decoding = [sequence for sequence in self.open if sequence.decoding]
        for sequence in decoding:
            left = sequence.prompt_length + sequence.limit - sequence.length
            sequence.drafts = tokens[: min(len(tokens) % 4, left - 1)]
        running = {sequence for sequence in self.open if sequence.state == "running"}
        plan = self.scheduler.plan()
        chunks = plan.chunks
        self.check_plan(plan, decoding)
        self.check_admissions(running)
        rows = [(copy.target, self.rows(copy.source)[: copy.tokens]) for copy in plan.copies]
        for target, content in rows:
            at = target * self.pool.block_tokens
            self.memory[at : at + len(content)] = content
        for chunk in chunks:
            self.check_held(chunk.sequence, chunk.start)
        written: set[int] = set()
        for chunk in chunks:
            known = self.open[chunk.sequence] + chunk.sequence.drafts
            for position in range(chunk.start, chunk.start + chunk.count):
                row = self.row(chunk.sequence, position)
                assert row not in written
                written.add(row)
                assert self.pool.references(row // self.pool.block_tokens) == 1
                self.memory[row] = (self.tree.version, tuple(known[: position + 1]))
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            drafts = sequence.drafts
            sampled = [*drafts[: i % (len(drafts) + 1)], tokens[i % len(tokens)]]
            if not chunk.samples:
                sampled = []
            self.scheduler.advance(chunk, *sampled)
            if not sampled:
                continue
            self.open[sequence] += sampled
            if sequence.length == sequence.prompt_length + sequence.limit or i == stop:
                self.end(sequence)

    # -- checking

    def rows(self, block: int) -> list:
        size = self.pool.block_tokens
        return self.memory[block * size : (block + 1) * size]

    def row(self, sequence: Sequence, position: int) -> int:
        size = self.pool.block_tokens
        return sequence.blocks[position // size] * size + position % size

    def check_held(self, sequence: Sequence, computed: int) -> None:
        known = self.open[sequence]
        for position in range(computed):
            content = self.memory[self.row(sequence, position)]
            assert content == (self.tree.version, tuple(known[: position + 1]))

    def check_plan(self, plan, decoding: list[Sequence]) -> None:
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(set(sequences)) == len(sequences)
        assert bool(sequences) == bool(self.open)
        assert sum(chunk.count for chunk in plan.chunks) <= self.step_tokens
        going_on = {sequence for sequence in decoding if sequence.state == "running"}
        assert set(sequences[: len(going_on)]) == going_on
        if going_on:
            prefills = plan.chunks[len(going_on) :]
            assert sum(chunk.count for chunk in prefills) <= self.prefill_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.state == "running"
            assert chunk.count >= 1
            assert chunk.start == sequence.computed
            end = sequence.length + len(sequence.drafts)
            assert chunk.samples == (chunk.start + chunk.count == end)
            assert sequence not in going_on or chunk.count == 1 + len(sequence.drafts)
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.source for copy in plan.copies}
        assert all(self.pool.references(target) == 1 for target in targets)
        # Held until the copy is done, whatever the tree does.
        assert all(
            self.pool.references(copy.source) > (copy.source in self.tree) for copy in plan.copies
        )

    def check_admissions(self, before: set[Sequence]) -> None:
        """Whoever was preempted stays ahead of all of its class."""
        now = {sequence for sequence in self.open if sequence.state == "running"}
        preempted = [sequence.priority for sequence in before - now]
        admitted = [sequence.priority for sequence in now - before]
        assert not preempted or not admitted or min(admitted) > max(preempted)

    @invariant()
    def every_reference_has_a_holder(self):
        if not hasattr(self, "pool"):
            return
        holders = Counter(block for sequence in self.open for block in sequence.blocks)
        for sequence in self.open:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
        kept = {block for block in range(self.pool.blocks) if block in self.tree}
        assert len(kept) == self.tree.held
        for block in range(self.pool.blocks):
            assert self.pool.references(block) == holders[block] + (block in kept)
        assert self.pool.idle == sum(not holders[block] for block in kept)
        assert self.pool.free == self.pool.blocks - len(kept | set(holders))

    @invariant()
    def every_request_is_somewhere(self):
        if not hasattr(self, "pool"):
            return
        states = Counter(sequence.state for sequence in self.open)
        assert states["waiting"] == self.scheduler.waiting
        assert states["running"] == self.scheduler.running <= self.running
        assert not states["done"]
        for sequence, tokens in self.open.items():
            assert sequence.tokens.tolist() == tokens
            assert sequence.computed < sequence.length
            assert sequence.computed <= len(sequence.blocks) * self.pool.block_tokens
        assert all(count == 1 for count in self.ended.values())

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        todo = sum(s.length + s.limit for s in self.open)
        for _ in range(20 + 4 * todo):
            if not self.open:
                break
            self.compute([0, 1], -1)
            self.every_reference_has_a_holder()
            self.every_request_is_somewhere()
        assert not self.open
        assert self.pool.free + self.pool.idle == self.pool.blocks
        self.tree.reset(-1)
        assert self.pool.free == self.pool.blocks


Serving.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
TestServing = Serving.TestCase


@pytest.mark.parametrize("seed", range(5))
def test_long_histories_under_pressure(seed: int) -> None:
    """Hypothesis keeps histories short and calm; here pools are full most of the time."""
    draw = np.random.default_rng(seed)
    preempted = evicted = reused = 0
    for _ in range(10):
        world = Serving()
        world.start(
            blocks=int(draw.integers(6, 41)),
            size=int(draw.integers(1, 6)),
            running=int(draw.integers(1, 8)),
            spare=int(draw.integers(0, 13)),
            prefill=int(draw.integers(1, 17)),
        )
        load = draw.uniform(0.3, 1)
        for _ in range(200):
            act(world, draw, load)
            world.every_reference_has_a_holder()
            world.every_request_is_somewhere()
        world.teardown()
        preempted += world.scheduler.preempted
        evicted += world.tree.evicted
        reused += world.scheduler.reused_tokens
    # Else the histories would show little.
    assert preempted > 10
    assert evicted > 300
    assert reused > 300


def act(world: Serving, draw: np.random.Generator, load: float) -> None:
    """Something happens to `world`: most of all, a step or an arrival."""
    prompt = draw.integers(0, 2, draw.integers(1, 15)).tolist()
    limit, session = int(draw.integers(1, 31)), "abc"[draw.integers(3)]
    kind = draw.random()
    if kind < 0.4 * load:
        world.arrive(prompt, limit, session, int(draw.choice([0, 0, 0, 1, 2])))
    elif kind < 0.45 * load:
        world.sample_one_long_prompt(3, int(draw.integers(34, 51)), limit, session)
    elif kind < 0.6 * load and world.texts:
        world.take_another_turn(int(draw.integers(1000)), prompt[:4], limit, session)
    elif kind < 0.6 * load + 0.04 and world.open:
        world.abort(int(draw.integers(1000)), bool(draw.random() < 0.7))
    elif kind < 0.6 * load + 0.05 and world.open:
        world.update_weights()
    elif kind < 0.6 * load + 0.12:
        world.take_over_from_elsewhere(prompt * 2)
    else:
        world.step(draw.integers(0, 2, 6).tolist(), int(draw.integers(16)))
