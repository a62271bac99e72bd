"""The prefix tree against a plain list of everything that was inserted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.cache.blocks import BlockPool
from headrace.engine.cache.prefix import PrefixTree

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Cache:
    """Sequences that come and go at once; remembers which tokens each block was filled with."""

    def __init__(self, block_tokens: int, blocks: int = 200) -> None:
        self.pool = BlockPool(blocks, block_tokens)
        self.tree = PrefixTree(self.pool)
        self.filled: dict[int, tuple[int, ...]] = {}
        self.used: dict[int, int] = {}
        self.clock = 0

    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.clock += 1
            self.used[block] = self.clock

    def visit(self, tokens: tuple[int, ...], *, reuse: bool = True) -> int:
        """Match, compute the rest, insert and leave. Returns how many tokens matched."""
        size = self.pool.block_tokens
        blocks, matched = [], 0
        if reuse:
            match = self.tree.match(ids(*tokens), len(tokens))
            blocks, matched = match.blocks, match.tokens
            if match.partial is not None:
                assert 0 < match.partial_tokens < size
                self.check_block(match.partial, tokens[:matched])
                self.release([match.partial])
            assert matched == len(blocks) * size + match.partial_tokens
        for i, block in enumerate(blocks):
            self.check_block(block, tokens[: (i + 1) * size])
        new = self.pool.allocate(-(-len(tokens) // size) - len(blocks))
        assert new is not None
        for i, block in enumerate(new, len(blocks)):
            self.filled[block] = tokens[: (i + 1) * size]
        blocks = blocks + new
        self.tree.insert(ids(*tokens), blocks)
        self.release(blocks)
        return matched

    def check_block(self, block: int, prefix: tuple[int, ...]) -> None:
        assert self.filled[block][: len(prefix)] == prefix

    @property
    def held(self) -> set[int]:
        return {block for block in range(self.pool.blocks) if block in self.tree}


def longest(tokens: tuple[int, ...], known: list[tuple[int, ...]], limit: int) -> int:
    """Length of the longest prefix of tokens[:limit] that one of `known` begins with."""
    prefixes = {other[:n] for other in known for n in range(len(other) + 1)}
    return max((n for n in range(limit + 1) if tokens[:n] in prefixes), default=0)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 4), st.lists(IDS, max_size=12), IDS, st.data())
def test_finds_the_longest_held_prefix_to_the_token(size, known, query, data) -> None:
    cache = Cache(size)
    for i, tokens in enumerate(known):
        reuse = data.draw(st.booleans())
        matched = cache.visit(tokens, reuse=reuse)
        assert matched == (longest(tokens, known[:i], len(tokens)) if reuse else 0)
    limit = data.draw(st.integers(0, len(query)))
    assert cache.tree.peek(ids(*query), limit) == longest(query, known, limit)
    # Whatever several sequences share is held once.
    held = cache.held
    assert len({cache.filled[block] for block in held}) == len(held) == cache.tree.held
    assert cache.pool.free + cache.pool.idle == cache.pool.blocks
    cache.tree.reset(1)
    assert (cache.pool.free, cache.tree.held, cache.tree.version) == (200, 0, 1)
    assert cache.tree.peek(ids(*query), len(query)) == 0


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 3), st.lists(st.one_of(IDS, st.none()), max_size=20))
def test_the_least_recently_used_leaf_goes_first(size, history) -> None:
    """None evicts one block."""
    cache = Cache(size)
    for tokens in history:
        if tokens is not None:
            cache.visit(tokens)
            continue
        held = cache.held
        freed = cache.tree.evict(1)
        gone = held - cache.held
        assert freed == len(gone) == min(1, len(held))
        for block in gone:
            paths = {b: cache.filled[b] for b in held}
            parents = {path[: (len(path) - 1) // size * size] for path in paths.values()}
            leaves = [b for b, path in paths.items() if path not in parents]
            assert block == min(leaves, key=cache.used.__getitem__)
    left = cache.tree.held
    assert cache.tree.evict(1000) == left
    assert cache.pool.free == cache.pool.blocks


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 3), st.lists(IDS, max_size=12), st.integers(0, 30))
def test_copies_of_held_blocks_never_hinder_eviction(size, known, n) -> None:
    cache = Cache(size)
    for tokens in known:
        cache.visit(tokens, reuse=False)
    held = cache.tree.held
    assert cache.tree.evict(n) == min(n, held)
    assert cache.tree.held == held - min(n, held)
    assert cache.tree.evict(held) == cache.tree.held + held - min(n, held)
    assert cache.pool.free == cache.pool.blocks


def test_who_computed_held_tokens_again_used_them_too() -> None:
    cache = Cache(2)
    cache.visit((1, 2))
    cache.visit((3, 4))
    cache.visit((1, 2), reuse=False)
    cache.tree.evict(1)
    assert cache.tree.peek(ids(1, 2), 2) == 2


def test_a_held_block_is_not_evicted() -> None:
    cache = Cache(2)
    cache.visit((1, 2, 3, 4))
    cache.visit((1, 2, 5, 6))
    match = cache.tree.match(ids(1, 2, 5, 6, 7), 5)
    assert match.tokens == 4
    assert cache.tree.evict(10) == 1
    assert cache.tree.peek(ids(1, 2, 3, 4), 4) == 2
    cache.pool.release(match.blocks)
    assert cache.tree.evict(10) == 2


def test_the_limit_cuts_a_block() -> None:
    cache = Cache(4)
    cache.visit(tuple(range(8)))
    match = cache.tree.match(np.arange(8, dtype=np.int32), 7)
    assert (len(match.blocks), match.partial_tokens, match.tokens) == (1, 3, 7)
    assert match.partial is not None
    assert cache.pool.references(match.partial) == 2


def test_a_longer_block_replaces_the_part_it_continues() -> None:
    cache = Cache(4)
    cache.visit((1, 2, 3, 4, 5, 6))
    assert cache.tree.held == 2
    cache.visit((1, 2, 3, 4, 5, 6, 7))
    assert cache.tree.held == 2
    assert cache.tree.peek(ids(1, 2, 3, 4, 5, 6, 7, 8), 8) == 7
    cache.visit((1, 2, 3, 4, 5))
    assert cache.tree.held == 2


def test_in_use_nothing_hangs_below_another_copy() -> None:
    cache = Cache(2)
    cache.visit((1, 2))
    own = cache.pool.allocate(2)
    assert own is not None
    cache.tree.insert(ids(1, 2, 3, 4), own, in_use=True)
    assert cache.tree.held == 1
    # Hence all idle blocks can be had while the sequence lives.
    assert cache.tree.evict(5) == 1
    cache.tree.insert(ids(1, 2, 3, 4), own, in_use=True)
    assert cache.held == set(own)


def test_a_block_held_without_its_prefix_stays_out() -> None:
    cache = Cache(2)
    cache.visit((1, 2, 3, 4))
    leaving, staying = (cache.tree.match(ids(1, 2, 3, 4), 4).blocks for _ in range(2))
    cache.tree.forget(ids(1, 2, 3, 4), 0)
    other = cache.pool.allocate(1)
    assert other is not None
    cache.tree.insert(ids(1, 2), other)
    cache.pool.release(other)
    cache.tree.insert(ids(1, 2, 3, 4), leaving)
    cache.pool.release(leaving)
    assert cache.held == set(other)
    assert cache.tree.evict(1) == 1
    cache.pool.release(staying)
    assert cache.pool.free == cache.pool.blocks


def test_forgets_what_follows_a_position() -> None:
    cache = Cache(2)
    cache.visit((1, 2, 3, 4, 5))
    cache.visit((1, 2, 3, 4, 6, 7))
    cache.visit((1, 2, 8))
    cache.tree.forget(ids(1, 2, 3, 4, 5), 3)
    assert cache.tree.peek(ids(1, 2, 3, 4, 5), 5) == 2
    assert cache.tree.peek(ids(1, 2, 8), 3) == 3
    cache.tree.forget(ids(9, 9), 0)
    assert cache.tree.held == 2
    assert cache.pool.free == cache.pool.blocks - 2


def test_blocks_and_tokens_must_fit() -> None:
    cache = Cache(2)
    with pytest.raises(ValueError, match="do not fill"):
        cache.tree.insert(ids(1, 2, 3), [0])
