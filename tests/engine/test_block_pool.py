"""Block numbers and reference counts."""

import pytest

from headrace.engine.cache.blocks import BlockPool


def test_blocks_are_taken_shared_and_given_back() -> None:
    pool = BlockPool(4, 16)
    first = pool.allocate(3)
    assert first is not None
    assert sorted(first) == sorted(set(first))
    assert all(0 <= block < 4 for block in first)
    assert pool.free == 1
    assert [pool.references(block) for block in first] == [1, 1, 1]
    pool.share(first[:2])
    pool.release(first)
    assert pool.free == 2
    assert [pool.references(block) for block in first] == [1, 1, 0]
    pool.release(first[:2])
    assert pool.free == 4


def test_too_few_blocks_take_nothing() -> None:
    pool = BlockPool(3, 1)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is None
    assert pool.free == 1
    assert pool.allocate(0) == []


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2, 1)
    (block,) = pool.allocate(1) or []
    with pytest.raises(ValueError, match="can be shared"):
        pool.share([1 - block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block, block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([-1])
    with pytest.raises(ValueError, match="not kept"):
        pool.drop(block)
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockPool(0, 16)


def test_the_trees_reference_is_not_a_sequences_to_give_up() -> None:
    pool = BlockPool(2, 1)
    (block,) = pool.allocate(1) or []
    pool.keep(block)
    with pytest.raises(ValueError, match="kept already"):
        pool.keep(block)
    pool.release([block])
    assert (pool.free, pool.idle, pool.references(block)) == (1, 1, 1)
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])
    pool.drop(block)
    assert (pool.free, pool.idle, pool.references(block)) == (2, 0, 0)


def test_idle_blocks_give_way_in_the_order_of_their_last_use() -> None:
    pool = BlockPool(4, 1)
    a, b, c, d = pool.allocate(4) or []
    for block in (a, b, c, d):
        pool.keep(block)
    pool.release([a, b])
    pool.release([c])
    # Behind its prefix, so it goes before it.
    assert pool.oldest_idle() == b
    pool.share([b])
    assert pool.oldest_idle() == a
    pool.touch(a)
    assert pool.oldest_idle() == c
    # Held by a sequence: nothing to touch.
    pool.touch(d)
    pool.release([b])
    order = []
    while (block := pool.oldest_idle()) is not None:
        order.append(block)
        pool.drop(block)
    assert order == [c, a, b]
    assert (pool.free, pool.references(d)) == (3, 2)
